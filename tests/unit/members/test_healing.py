"""When a rank that waits for its state leaves again, as that is of no use, and which objects it takes a state for."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from straggle import DealtLoader
from straggle.members.healed.healing import Healing, is_loader
from straggle.members.views.view import View

LET_IN = View(3, {0: "a"}, job="j").with_joined({1: "b"}, step=9, giver=0)


def reasons(training_step: int, takes_part_from: int) -> list[str]:
    """Why rank 1, which `LET_IN` has let in, leaves before it has its state."""
    left: list[str] = []
    membership = SimpleNamespace(
        view=LET_IN,
        spawn=lambda *_: None,
        leave=lambda why, **_: left.append(why.reason),
    )
    rank = SimpleNamespace(
        training=SimpleNamespace(step=training_step), merging=SimpleNamespace(takes_part_from=takes_part_from)
    )
    channel, member = SimpleNamespace(membership=membership), SimpleNamespace(fell_behind=False)
    parts: list[Any] = [channel, rank, SimpleNamespace(), member, None, None]
    healing = Healing(*parts)
    healing.let_in(LET_IN)
    healing.leave_if_lost()
    return left


def test_rank_that_went_on_before_it_was_let_in_leaves_again() -> None:
    """As one does that was told to end: its state would come too late, and it would wait for it for ever."""
    assert reasons(10, 9) == ["returns: it was told to end, and went on to step 10 without the state of step 9"]


@pytest.mark.parametrize(("training_step", "takes_part_from"), [(9, 9), (4, 9), (10, sys.maxsize)])
def test_rank_that_waits_for_its_state_stays(training_step: int, takes_part_from: int) -> None:
    assert reasons(training_step, takes_part_from) == []


class Stream:
    """As a loader of torchdata's: it has no length."""

    def __iter__(self) -> Iterator[int]:
        return iter([0])


class Drawing(Stream):
    """As a framework's loaders, which are their own iterators."""

    def __len__(self) -> int:
        return 1

    def __next__(self) -> int:
        return 0


class Shadows:
    """As averages of weights that are kept in a list."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        return iter([0])


class Metric(nn.Module):
    """As torchmetrics' are."""

    def __iter__(self) -> Iterator[int]:
        raise NotImplementedError


class Samples(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([0])

    def __len__(self) -> int:
        return 1


LAYER, OPTIMIZER = nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)], lr=0.1)
ALIKE = [
    LAYER,
    nn.Sequential(LAYER),
    nn.ModuleList([LAYER]),
    nn.ModuleDict({"layer": LAYER}),
    nn.ParameterList([torch.zeros(1)]),
    AveragedModel(LAYER),
    Metric(),
    OPTIMIZER,
    StepLR(OPTIMIZER, 1),
    torch.amp.GradScaler("cpu"),
    Shadows(),
    OrderedDict(),
    object(),
    DealtLoader.__new__(DealtLoader),
]
LOADERS = [DataLoader([0]), RandomSampler([0]), DistributedSampler([0], 1, 0), Samples(), Stream(), Drawing()]


@pytest.mark.parametrize("value", ALIKE, ids=lambda own: type(own).__name__)
def test_what_ranks_have_alike_is_no_loader_though_it_can_be_iterated_over(value: object) -> None:
    assert not is_loader(value)


@pytest.mark.parametrize("value", LOADERS, ids=lambda own: type(own).__name__)
def test_where_a_rank_is_in_its_own_data_is_its_loaders_state(value: object) -> None:
    assert is_loader(value)
