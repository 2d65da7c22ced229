"""How many messages gloo has on their way at a time."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from straggle.backward.stages import MIN_STAGES
from straggle.merge.groups import Group, gloo_group, messages_at_a_time
from straggle.policies.merge_time import MESSAGES_AT_A_TIME, QUICK_AT_A_TIME


@pytest.mark.parametrize("number", [MESSAGES_AT_A_TIME, QUICK_AT_A_TIME])
def test_group_has_as_many_messages_on_their_way_as_it_is_to_have(number: int) -> None:
    group = gloo_group(dist.HashStore(), 0, 1, 5.0, at_a_time=number)
    assert getattr(group.options, "_threads") == number  # noqa: B009  (a name of torch's)
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0] * 3


def test_all_stages_of_a_model_that_has_the_least_of_them_are_on_their_way_at_a_time_where_links_are_slow() -> None:
    assert getattr(gloo_group(dist.HashStore(), 0, 1, 5.0).options, "_threads") >= MIN_STAGES  # noqa: B009


class Slow:
    """A group, and the clock by which its small messages take so long."""

    def __init__(self, took_s: list[float]) -> None:
        self._took_s, self._now = iter(took_s), 0.0

    def all_reduce(self, tensor: Tensor) -> Slow:
        assert tensor.numel() == 1
        self._now += next(self._took_s)
        return self

    def wait(self) -> None:
        """It has been merged."""

    def clock(self) -> float:
        return self._now


@pytest.mark.parametrize(
    ("took_s", "number"),
    [
        ([2e-4] * 4, QUICK_AT_A_TIME),
        ([0.1, 0.02, 2e-4, 0.01], QUICK_AT_A_TIME),  # a busy machine, and connections that are made
        ([0.1, 0.02, 0.02, 0.021], MESSAGES_AT_A_TIME),  # links with 5 ms
    ],
)
def test_many_messages_are_on_their_way_where_a_small_one_takes_long(took_s: list[float], number: int) -> None:
    group = Slow(took_s)
    assert messages_at_a_time(cast(Group, group), group.clock) == number
