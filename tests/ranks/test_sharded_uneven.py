"""Sharded replicas with different numbers of batches: all make as many steps, and one without data counts nothing."""

from __future__ import annotations

import pytest
import torch
from ranks import Raised, run_ranks, staged
from sharding import batch, pair
from torch import nn

from straggle.lab.world.faults import Stall
from straggle.lab.world.run import run_world

SHARDS = 2


def step_alone(plain: nn.Module, optimizer: torch.optim.Optimizer, passes: list[list[torch.Tensor]]) -> None:
    """One step: the mean over replicas, each of the mean over its passes."""
    for own in passes:
        for x in own:
            (plain(x).square().mean() / len(own) / len(passes)).backward()
    optimizer.step()
    optimizer.zero_grad()


def batches_of(rank: int, number: int) -> list[torch.Tensor]:
    return [batch(each, rank) for each in range(number)]


def uneven(rank: int, numbers: list[int], passes: int, epochs: int) -> tuple[float, int]:
    """The gap to a whole model that has the same batches, and the steps; ``numbers``: of each replica's batches."""
    both = pair(replicas=len(numbers))
    alone = torch.optim.AdamW(both.plain.parameters(), lr=0.01)
    steps = 0
    with staged(both.net, mesh=both.mesh["dp_replicate"]) as model:
        optimizer = torch.optim.AdamW(both.net.parameters(), lr=0.01, fused=True)
        for _ in range(epochs):
            loader = model.join(batches_of(rank, numbers[rank // SHARDS]))
            for first in loader:
                with model.step(num_microbatches=passes):
                    for number in range(passes):
                        x = next(loader) if number else first
                        (model(x).square().mean() / passes).backward()
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        for _ in range(epochs):
            for at in range(0, max(numbers), passes):
                had = [(place, number) for place, number in enumerate(numbers) if number > at]
                step_alone(
                    both.plain,
                    alone,
                    [
                        [
                            torch.cat([batch(each, SHARDS * place + shard) for shard in range(SHARDS)])
                            for each in range(at, min(at + passes, number))
                        ]
                        for place, number in had
                    ],
                )
    return both.gap(), steps


@pytest.mark.parametrize(("numbers", "passes"), [([3, 5], 1), ([5, 1, 3], 1), ([4, 8], 2)])
def test_replicas_with_unequal_numbers_of_batches_train_as_one_process_does(numbers: list[int], passes: int) -> None:
    ends = run_ranks(uneven, SHARDS * len(numbers), numbers, passes, 2)
    assert [steps for _, steps in ends] == [2 * max(numbers) // passes] * len(ends)
    assert max(gap for gap, _ in ends) < 1e-5


def with_stalls(rank) -> tuple[int, list[bool], list[list[float]]]:
    both = pair()
    for block in both.net.blocks:
        block.register_forward_pre_hook(lambda *_: rank.work(0.005))
    seen = []
    with staged(both.net, mesh=both.mesh["dp_replicate"], deadline=0.08) as model:
        optimizer = torch.optim.SGD(both.net.parameters(), lr=0.01)
        for epoch in range(2):
            for x in model.join(batches_of(rank.number, 6 + 4 * (rank.number // SHARDS) * (1 - 2 * epoch) + 4 * epoch)):
                with model.step():
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(model.last_report.ranks[rank.number // SHARDS].stood_in)
        return len(seen), seen, [own.to_local().tolist() for own in both.net.parameters()]


@pytest.mark.parametrize("at_s", [0.2, 0.32, 0.55])
@pytest.mark.parametrize("stalled", [0, 3])
def test_loops_end_together_though_a_rank_of_a_replica_is_stuck_at_their_end(stalled: int, at_s: float) -> None:
    run = run_world(with_stalls, ranks=4, faults=[Stall(stalled, at_s, 0.6)])
    assert len({steps for steps, _, _ in run.results}) == 1
    for shard in range(SHARDS):
        assert run.results[shard][2] == run.results[SHARDS + shard][2]
    assert any(any(seen) for _, seen, _ in run.results)


def unequal_inside(rank: int, numbers: list[int], passes: int) -> None:
    both = pair()
    with staged(both.net, mesh=both.mesh["dp_replicate"]) as model:
        loader = model.join(batches_of(rank, numbers[rank]))
        for first in loader:
            with model.step(num_microbatches=passes):
                for number in range(passes):
                    (model(next(loader) if number else first).square().mean() / passes).backward()


@pytest.mark.parametrize(("numbers", "passes"), [([2, 2, 3, 4], 1), ([4, 4, 3, 4], 2), ([3, 2, 4, 4], 1)])
def test_ranks_of_a_replica_with_unequal_numbers_are_refused_and_named(numbers: list[int], passes: int) -> None:
    ends = run_ranks(unequal_inside, 4, numbers, passes, outcomes=True)
    place = 0 if numbers[0] != numbers[1] else 1
    least = min(numbers[SHARDS * place : SHARDS * place + SHARDS])
    for rank in range(SHARDS * place, SHARDS * place + SHARDS):
        named = (
            f"rank {SHARDS * place + numbers[SHARDS * place :].index(least)} has had {least} in loop 1 and has no more"
        )
        assert isinstance(ends[rank], Raised)  # the other replica may have had its last step by then
        assert named in ends[rank].message
        assert f"ranks {[SHARDS * place, SHARDS * place + 1]} shard one copy of the model" in ends[rank].message
