"""Moments of stages: as few as it takes, and none that is too early."""

from itertools import count

import pytest
from torch import nn

from straggle.backward.stages import plan_stages
from straggle.observe.watch.steps import StageEnds

PLAN = plan_stages(nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), 3)
ALL = [index for stage in PLAN.stages for index in stage.parameters]


def one_pass(ends, indices):
    """The parameters of the moments that are taken in a pass."""
    ends.begin()
    for index in indices:
        ends.gradient(index)
    ends.over()
    return [index for index, _ in ends.moments]


@pytest.fixture
def ends():
    return StageEnds(count().__next__)


def test_every_gradient_has_a_moment_until_there_is_a_plan_and_then_every_stage(ends):
    assert one_pass(ends, ALL) == ALL
    ends.follow(PLAN)
    assert one_pass(ends, ALL) == ALL  # how many a stage has is known from here on
    for indices in (ALL, ALL[::-1]):
        taken = one_pass(ends, indices)
        assert taken == [max(stage.parameters, key=indices.index) for stage in in_order(indices)]


def in_order(indices):
    """The stages, in the order in which their last gradients come."""
    return sorted(PLAN.stages, key=lambda stage: max(map(indices.index, stage.parameters)))


def test_stage_with_fewer_gradients_than_before_ends_with_the_pass_and_one_with_more_with_its_last(ends):
    ends.follow(PLAN)
    one_pass(ends, ALL)
    first, middle, last = (stage.parameters for stage in PLAN.stages)
    assert one_pass(ends, [first[0], *middle, *last]) == [middle[-1], last[-1], first[-1]]
    assert one_pass(ends, ALL) == [first[0], first[1], middle[-1], last[-1]]
    assert one_pass(ends, ALL) == [first[-1], middle[-1], last[-1]]


def test_stage_without_a_gradient_has_no_moment(ends):
    ends.follow(PLAN)
    one_pass(ends, ALL)
    first = PLAN.stages[0].parameters
    assert one_pass(ends, first) == [first[-1]]


def test_moments_of_a_pass_that_is_over_stay_as_they_are_in_the_next(ends):
    one_pass(ends, ALL)
    moments = ends.moments
    one_pass(ends, ALL)
    assert moments == list(zip(ALL, range(len(ALL)), strict=True))


def test_gradient_of_a_parameter_that_is_in_no_stage_has_a_moment_of_its_own(ends):
    ends.follow(PLAN)  # such as of what was frozen when the stages were planned
    one_pass(ends, [*ALL, len(ALL)])
    assert one_pass(ends, [*ALL, len(ALL)])[-1] == len(ALL)
