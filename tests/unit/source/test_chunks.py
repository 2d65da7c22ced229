"""Which gradients are merged by one call."""

import math

import pytest
import torch
from torch import nn

from straggle.backward.stages import plan_stages
from straggle.source.chunks import GradientChunks, group_ends
from straggle.source.replicated import slots_of

PLAN = plan_stages(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), 2)  # parameters 5, 4, 3, 2 and 1, 0


@pytest.mark.parametrize(
    ("nbytes", "group_bytes", "ends"),
    [
        ([1, 1, 1, 1, 1, 1], math.inf, [[5, 4, 3, 2], [1, 0]]),
        ([1, 1, 1, 1, 1, 1], 2, [[5, 4], [3, 2], [1, 0]]),
        ([1, 1, 1, 1, 1, 1], 3, [[5, 4, 3], [2], [1, 0]]),
        ([1, 9, 1, 1, 1, 1], 4, [[5, 4, 3, 2], [1], [0]]),
        ([1, 1, 1, 1, 1, 1], 0, [[5], [4], [3], [2], [1], [0]]),
    ],
)
def test_group_is_complete_with_its_stage_or_its_bytes(nbytes, group_bytes, ends):
    assert [stage.parameters for stage in PLAN.stages] == [(5, 4, 3, 2), (1, 0)]
    assert group_ends([(stage,) for stage in PLAN.stages], nbytes, group_bytes) == {group[-1] for group in ends}


@pytest.mark.parametrize(("group_bytes", "ends"), [(math.inf, {0}), (4, {2, 0}), (5, {1, 0})])
def test_small_stages_that_share_a_message_share_groups(group_bytes, ends):
    assert len(PLAN.buckets()) == 1
    assert group_ends(PLAN.buckets(), [1] * 6, group_bytes) == ends


def test_gradients_on_several_devices_have_no_groups():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    alike, mixed = (
        GradientChunks(slots_of(module.named_parameters())),
        GradientChunks(slots_of([*module[:2].named_parameters(), *meta().named_parameters()])),
    )
    for groups in (alike, mixed):
        groups.follow(PLAN)
    assert alike.ends == {0}
    assert mixed.ends == set()


def meta():
    return nn.Linear(4, 4, device=torch.device("meta"))
