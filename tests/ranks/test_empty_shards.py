"""Parameters without elements: of a layer with fewer rows than ranks, some ranks of a replica have nothing.

Such a rank gives and takes as the others do: gradients are those of the whole model, reports are finite, and a late
replica's stages count.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks import run_ranks, staged
from sharding import mesh_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import straggle

NUM_STEPS = 5


class Rows(nn.Module):
    """Adds ``weight * x`` summed; the weight has so many rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(float(rows)) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + (0.1 * self.weight * x[:1]).sum()


def layers(rows: Sequence[int]) -> nn.Sequential:
    return nn.Sequential(*map(Rows, rows))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(torch.tensor([1.0 + rank, float(step)])).square().sum()


def options_of(rows: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Those that plan, divide or count by elements."""
    return {
        "none": {},
        "a stage each": {"stages": [str(number) for number in range(len(rows))]},
        "by time": {"stages": straggle.BalancedByTime()},
        "auto": {"deadline": straggle.AutoDeadline()},
        "shadow": {"deadline": straggle.Shadow(straggle.AutoDeadline())},
        "estimator": {"estimator": straggle.LastOwn()},
        "bounded": {"deadline": straggle.DropBudget(straggle.QuantileDeadline(0.5), 0.1)},
    }


def train(rank: int, rows: Sequence[int], sharded: bool, options: dict[str, Any]) -> None:
    """Steps of all, then one in which the last rank is late, and one of all: gradients and reports are as they are."""
    plain, net, mesh = layers(rows), layers(rows), None
    ranks = torch.distributed.get_world_size()
    if sharded:
        mesh = mesh_of()
        for unit in (*net, net):
            fully_shard(unit, mesh=mesh["dp_shard"])
        options = {**options, "mesh": mesh["dp_replicate"]}
    late_step, stops = NUM_STEPS - 2, list[straggle.Step]()

    def stop(*_: Any) -> None:
        for step in stops:
            step.stop()

    net[-1].register_full_backward_hook(stop)
    with staged(net, **options) as model:
        for number in range(NUM_STEPS):
            late = number == late_step
            with model.step() as step:
                stops[:] = [step] if late and rank == ranks - 1 else []  # a replica leaves behind the second layer
                loss_of(model, number, rank).backward()
            report = model.last_report
            assert str(report)
            assert not late or len(rows) < 3 or report.ranks[-1].late
            late |= any(own.late for own in report.ranks)  # on a busy machine, under a deadline
            assert all(0.0 <= own.reach <= 1.0 for own in report.ranks)
            assert all(own.reach == 1.0 for own in report.ranks if not own.late)
            assert all(late or stage.weight == len(report.ranks) for stage in report.stages)
            plain.zero_grad()
            for other in range(ranks):
                (loss_of(plain, number, other) / ranks).backward()
            for own, all_of_it in zip(net.parameters(), plain.parameters(), strict=True):
                if not late:
                    torch.testing.assert_close(whole(own.grad), all_of_it.grad)
            model.zero_grad()


def whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def train_all(rank: int, cases: Sequence[Sequence[int]], sharded: bool, only: Sequence[str] | None = None) -> None:
    for rows in cases:
        for name, options in options_of(rows).items():
            if only is None or name in only:
                train(rank, rows, sharded, copy.deepcopy(options))


def test_rank_that_has_nothing_of_a_stage_takes_part_as_the_others_do() -> None:
    run_ranks(train_all, 4, [[3, 1, 1]], True, ["a stage each"])


def test_model_without_any_element_is_merged() -> None:
    run_ranks(train_all, 2, [[0], [0, 0], [0, 3]], False, ["none", "a stage each"])


@pytest.mark.parametrize("rows", [[1], [1, 1], [3, 1, 1], [1, 3, 1], [1, 1, 2], [1, 4, 1]])
def test_sharded_layers_of_any_few_rows_are_merged_under_each_option(rows: list[int]) -> None:
    run_ranks(train_all, 4, [rows], True)


def test_parameters_without_elements_are_merged_under_each_option() -> None:
    run_ranks(train_all, 3, [[0], [0, 0], [1], [0, 3], [3, 0], [1, 0, 2]], False)
