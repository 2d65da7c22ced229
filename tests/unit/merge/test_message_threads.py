"""How many messages gloo has on their way at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import pytest
import torch
import torch.distributed as dist
from rounds import merged_round
from torch import Tensor, nn

from straggle.backward.stages import MIN_STAGES, plan_stages
from straggle.merge.options import Merge
from straggle.merge.round.rounds import Rounds
from straggle.merge.wire.groups import Group, ProcessGroups, gloo_group, messages_at_a_time
from straggle.policies.network.merge_time import MESSAGES_AT_A_TIME, QUICK_AT_A_TIME, Link
from straggle.policies.network.rank_links import Way
from straggle.source.replicated import slots_of


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
    """A group of two ranks, and the clock by which its small messages take so long; on the other one, ``other_s``."""

    def __init__(self, took_s: list[float], other_s: float) -> None:
        self._took_s, self._now, self._other_s = iter(took_s), 0.0, other_s

    def all_reduce(self, tensor: Tensor) -> Slow:
        assert tensor.numel() == 1
        self._now += next(self._took_s)
        return self

    def all_gather(self, tensors: Sequence[Tensor], tensor: Tensor) -> Slow:
        tensors[0].copy_(tensor)
        tensors[1].fill_(self._other_s)
        return self

    def wait(self) -> None:
        """It has been merged."""

    def clock(self) -> float:
        return self._now


@pytest.mark.parametrize(
    ("took_s", "other_s", "number"),
    [
        ([2e-4] * 4, 3e-4, QUICK_AT_A_TIME),
        ([0.1, 0.02, 2e-4, 0.01], 3e-4, QUICK_AT_A_TIME),  # a busy machine, and connections that are made
        ([0.1, 0.02, 0.02, 0.021], 0.02, MESSAGES_AT_A_TIME),  # links with 5 ms
        ([2e-4] * 4, 2e-3, MESSAGES_AT_A_TIME),  # all ranks have to make the same groups
    ],
)
def test_many_messages_are_on_their_way_where_a_small_one_takes_long(
    took_s: list[float], other_s: float, number: int
) -> None:
    group = Slow(took_s, other_s)
    assert messages_at_a_time(cast(Group, group), 2, group.clock) == number


NARROW, WIDE = cast(Group, object()), cast(Group, object())


@pytest.mark.parametrize("wide", [WIDE, None])
def test_steps_are_merged_by_the_wide_group_for_good_when_a_link_is_slow(wide: Group | None) -> None:
    module = nn.Linear(2, 2)
    rounds = Rounds(
        slots_of(module.named_parameters()),
        plan_stages(module),
        merge=Merge(),
        all_or_nothing=False,
        num_state=0,
        num_replicas=2,
    )
    rounds.merge_among(ProcessGroups(NARROW, NARROW, (0, 1), wide), (0, 1), 0)
    groups = []
    for step, latencies_s in [(16, (1e-5, math.nan)), (31, (1e-5, 0.02)), (32, (1e-5, 0.02)), (48, (1e-5, 1e-5))]:
        rounds.merged(
            merged_round(step, ways=tuple(Way(0, rank, Link(own_s, 1e9)) for rank, own_s in enumerate(latencies_s, 1)))
        )
        groups.append(rounds.groups.data)
    assert groups == [NARROW, NARROW, wide or NARROW, wide or NARROW]
