"""In which buffers a step is merged, and whether its telemetry goes with its gradients.

All members have to say the same of the second, or they would wait for ever.
"""

import pytest
from torch import nn

from straggle import Merge
from straggle.backward.clocks import Stopwatch
from straggle.backward.stages import plan_stages
from straggle.merge.rank_state import MergeSide, TrainingSide
from straggle.merge.rounds import Rounds


def rounds(kind=Rounds):
    model = nn.Linear(3, 2)
    options = {"merge": Merge(), "all_or_nothing": False, "num_state": 0, "world_size": 2}
    return kind(list(model.parameters()), plan_stages(model), **options)


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


class Counting(Rounds):
    """Counts the buffers that it makes."""

    num_made = 0

    def new_buffers(self):
        self.num_made += 1
        return super().new_buffers()


def test_a_round_takes_no_memory_where_there_is_a_spare():
    own, stopwatch = rounds(Counting), Stopwatch()
    sides = TrainingSide(stopwatch), MergeSide(stopwatch)
    own.make_spare()
    own.make_spare()  # there is one
    assert own.num_made == 1
    first = own.begin(*sides).buffers
    assert own.num_made == 1
    assert own.begin(*sides).buffers is not first
    assert own.num_made == 2
    own.hold(first)
    own.free_held()
    own.make_spare()
    assert own.begin(*sides).buffers is first
    assert own.num_made == 2
