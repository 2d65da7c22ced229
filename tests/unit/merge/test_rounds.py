"""In which buffers a step is merged."""

from torch import nn

from straggle import Merge
from straggle.backward.clocks import Stopwatch
from straggle.backward.stages import plan_stages
from straggle.merge.late.sides import MergeSide, TrainingSide
from straggle.merge.round.rounds import Rounds
from straggle.source.replicated import slots_of


def rounds(kind=Rounds):
    model = nn.Linear(3, 2)
    options = {"merge": Merge(), "all_or_nothing": False, "num_state": 0, "num_replicas": 2}
    return kind(slots_of(model.named_parameters()), plan_stages(model), **options)


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
