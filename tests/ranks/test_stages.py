"""All ranks divide the parameters into the same stages."""

import pytest
import torch
from ranks import run_forked, staged
from torch import nn


class Crossed(nn.Module):
    """Uses its layers in another order than it defines them, and rank 1 in yet another."""

    def __init__(self, rank):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.order = "cab" if rank == 0 else "abc"

    def forward(self, x):
        for name in self.order:
            x = getattr(self, name)(x)
        return x


def learn(rank, num_microbatches):
    with staged(Crossed(rank), stages=3) as model:
        reports = []
        for _ in range(2):
            with model.step(num_microbatches):
                for _ in range(num_microbatches):
                    model(torch.ones(1, 4)).sum().backward()
            reports.append([stage.name for stage in model.last_report.stages])
        return reports


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_plan_follows_rank_zeros_order_after_the_first_step_on_every_rank(num_microbatches):
    for first, second in run_forked(learn, 3, num_microbatches):
        assert first == ["c", "b", "a"]
        assert second == ["b", "a", "c"]
