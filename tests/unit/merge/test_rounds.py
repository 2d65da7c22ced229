"""Whether a step's telemetry goes with its gradients: all members have to say the same, or they would wait for ever."""

import pytest
from torch import nn

from straggle import Merge
from straggle.backward.stages import plan_stages
from straggle.merge.rounds import Rounds


def rounds():
    model = nn.Linear(3, 2)
    options = {"merge": Merge(), "all_or_nothing": False, "num_changes": 0, "world_size": 2}
    return Rounds(list(model.parameters()), plan_stages(model), **options)


@pytest.mark.parametrize(("step", "apart"), [(4, False), (5, True), (6, False)])
def test_telemetry_goes_apart_in_the_step_in_which_the_members_changed_and_in_no_other(step, apart):
    members = rounds()
    assert not members.tells_apart(step)
    members.merge_among_none()
    members.merge_among(None, (0, 1), 1, step=5)
    assert members.tells_apart(step) is apart


def test_after_another_change_it_is_the_step_of_that_one():
    members = rounds()
    members.merge_among(None, (0, 1), 1, step=5)
    members.merge_among(None, (1,), 2, step=6)
    assert [members.tells_apart(step) for step in (5, 6)] == [False, True]
