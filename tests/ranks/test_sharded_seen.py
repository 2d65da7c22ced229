"""What is shown of a sharded model's replicas while they train, and which rank made one late."""

from __future__ import annotations

import math

import torch
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ranks import logged, run_ranks, staged
from sharding import batch, pair
from training import Signals

from straggle import FixedDeadline, LateHandling
from straggle.observe.metrics import MetricsExporter

STUCK_AT, UNTIL, NUM_STEPS = 2, 4, 6


def train(rank: int) -> list[tuple[str, dict[str, str], float]]:
    """Rank 3 is stuck from a step until rank 0 has merged a later one; this rank's metrics."""
    both, signals = pair(), Signals()
    late = {"deadline": FixedDeadline(1.0), "late_handling": LateHandling(grace_s=0.0)}
    with (
        staged(both.net, mesh=both.mesh["dp_replicate"], **late) as model,
        MetricsExporter(model, port=None) as exporter,
    ):
        for number in range(NUM_STEPS):
            if rank == 3 and number == STUCK_AT:
                signals.wait(f"merged {UNTIL}")
            with model.step():
                model(batch(number, rank)).square().mean().backward()
            if rank == 0:
                signals.send(f"merged {number}")
        assert model.job_rank == rank
        exporter.close()
        text = generate_latest(exporter.registry).decode()
    return [
        (own.name, own.labels, own.value) for family in text_string_to_metric_families(text) for own in family.samples
    ]


def test_metrics_are_of_replicas_and_count_for_the_rank_that_made_its_replica_late() -> None:
    results = run_ranks(train, 4)
    made_late, late = [], []
    for rank, samples in enumerate(results):
        assert {labels["rank"] for _, labels, _ in samples} == {str(rank)}
        (info,) = (labels for name, labels, _ in samples if name == "straggle_run_info")
        assert info["replica"] == str(rank // 2)
        made_late.append(sum(value for name, _, value in samples if name == "straggle_made_late_steps_total"))
        late.append(sum(value for name, _, value in samples if name == "straggle_late_steps_total"))
    assert late[:2] == [0, 0]
    assert late[2] == late[3] > UNTIL - STUCK_AT
    assert made_late == [0, 0, 0, late[3]]


def odd_one(rank: int) -> list[str]:
    """Rank 3 has no finite gradient in one step, and does not step its optimizer in another; what is logged."""
    both = pair()
    with logged("straggle.loop.step_warnings") as lines, staged(both.net, mesh=both.mesh["dp_replicate"]) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(NUM_STEPS):
            with model.step():
                (model(batch(number, rank)).square().mean() * (math.nan if (rank, number) == (3, 2) else 1)).backward()
            if (rank, number) != (3, 4):
                optimizer.step()
            optimizer.zero_grad()
    return lines


def test_warnings_name_ranks_and_not_their_replicas() -> None:
    for rank, lines in enumerate(run_ranks(odd_one, 4)):
        nan = [line for line in lines if "were not finite" in line]
        assert [line.partition(" were")[0] for line in nan] == [f"step 2: gradients of ranks [{rank + 2}]"] * (
            rank < 2
        )  # the first of those with the same shards reports it
        unlike = [line for line in lines if "have not stepped as often" in line]
        assert len(unlike) == (rank in (1, 3))  # rank 0 holds no shards of rank 3
        assert all(line.startswith("step 5: the optimizers of ranks [3] have not stepped") for line in unlike)
