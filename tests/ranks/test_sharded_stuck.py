"""One rank of a sharded replica is stuck: its replica is late as a whole, catches up as one, and the rank is named."""

from __future__ import annotations

import pytest
import torch
from ranks import digest, run_ranks, staged
from sharding import batch, pair
from training import Signals

from straggle import FixedDeadline, LateHandling, StepReport

STUCK_AT, UNTIL, NUM_STEPS = 3, 6, 12
PLACES = ["data", "forward", "backward"]


def train(rank: int, place: str) -> tuple[str, str, int, list[StepReport]]:
    """Rank 3 is stuck from a step until rank 0 has merged a later one; hashes of parameters and of their whole."""
    both, signals, now = pair(), Signals(), {"step": 0, "stuck": False}

    def reach(here: str) -> None:
        if rank == 3 and here == place and now["step"] == STUCK_AT and not now["stuck"]:
            now["stuck"] = True
            signals.wait(f"merged {UNTIL}")

    block = both.net.blocks[2].up
    block.register_forward_hook(lambda _m, _a, output: output.register_hook(lambda _: reach("backward")) and None)
    block.register_forward_pre_hook(lambda *_: reach("forward"))
    reports = []
    late = {"deadline": FixedDeadline(1.0), "late_handling": LateHandling(grace_s=0.0)}
    with staged(both.net, mesh=both.mesh["dp_replicate"], **late) as model:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for number in range(NUM_STEPS):
            now["step"] = number
            reach("data")
            with model.step():
                model(batch(number, rank)).square().mean().backward()
            reports.append(model.last_report)
            if rank == 0:
                signals.send(f"merged {number}")
            optimizer.step()
            optimizer.zero_grad()
    own = [parameter.to_local() for parameter in both.net.parameters()]
    updates = {int(state["step"]) for state in optimizer.state.values()}
    return digest(own), digest(parameter.full_tensor() for parameter in both.net.parameters()), max(updates), reports


@pytest.mark.parametrize("place", PLACES)
def test_replica_with_a_stuck_rank_is_stood_in_for_and_catches_up_as_one(place: str) -> None:
    results = run_ranks(train, 4, place)
    shards, whole, updates, _ = zip(*results, strict=True)
    assert shards[0] == shards[2]
    assert shards[1] == shards[3]
    assert len(set(whole)) == 1
    assert set(updates) == {NUM_STEPS}
    for rank, (*_, reports) in enumerate(results):
        assert [report.step for report in reports] == list(range(NUM_STEPS))
        without = [report for report in reports if STUCK_AT <= report.step <= UNTIL]
        assert all(report.ranks[1].stood_in or report.ranks[1].late for report in without), rank
        assert not any(report.ranks[0].stood_in for report in without)
        late = [report for report in reports[STUCK_AT : UNTIL + 2] if report.ranks[1].late]
        assert {report.slowest_ranks[1] for report in late} == {3}, rank  # also in the step in which it comes back
