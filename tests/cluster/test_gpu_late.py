"""On a GPU: a rank whose device is slow, and whose host is not, is late by its device, and not by its host."""

from __future__ import annotations

import pytest
import torch
from ranks import digest, run_forked, staged
from torch import Tensor, nn
from training import features

from straggle import FixedDeadline, LateHandling, StepReport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS, STAGE_S, DEADLINE_S, NUM_STEPS = 6, 0.06, 0.1, 12


def product_seconds(matrix: Tensor) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (begin, end):  # the first product warms up
        matrix @ matrix
        event.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def train(rank: int, late_by: str) -> tuple[str, list[StepReport]]:
    """Rank 1 has 0.36 s of work for its device in each backward pass."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS))).cuda()
    matrix = torch.ones(4096, 4096, device="cuda")
    number = round(STAGE_S / product_seconds(matrix)) if rank == 1 else 0

    def work(_gradient: Tensor) -> None:
        for _ in range(number):
            torch.mm(matrix, matrix)

    def works(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        output.register_hook(work)

    for layer in module:
        layer.register_forward_hook(works)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    deadline, late_handling = FixedDeadline(DEADLINE_S, warmup_steps=3), LateHandling(late_by=late_by, grace_s=5.0)
    reports = []
    with staged(module, stages=LAYERS, deadline=deadline, late_handling=late_handling) as model:
        for step in range(NUM_STEPS):
            with model.step():
                model(features(rank, step).cuda()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert model.last_report is not None
            reports.append(model.last_report)
        return digest(parameter.cpu() for parameter in module.parameters()), reports


@pytest.mark.parametrize(("late_by", "least", "most"), [("device", 6, NUM_STEPS), ("host", 0, 0)])
def test_slow_device_is_late_by_its_own_clock_only(late_by: str, least: int, most: int) -> None:
    (parameters, reports), (same, _) = run_forked(train, 2, late_by)
    assert parameters == same
    assert least <= sum(report.late_ranks == (1,) for report in reports) <= most
