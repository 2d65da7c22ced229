"""What a rank has drawn, as the passes of its step: what each counts, and what is put back."""

import math
import sys

import pytest

from straggle.pools.drawn import Drawn, PoolWeights

OF_POOL = PoolWeights((1.0, 2.0, 3.0, 2.0), world_size=2)  # a micro-batch counts 2 / 8 of its weight


class Draws:
    """Those of a rank whose stand-in may put some back."""

    def __init__(self, may_put_back=True):
        self.may_put_back, self.num_put_back, self.kept = may_put_back, 0, None

    def put_back(self, num_begun):
        self.kept, self.num_put_back = num_begun, self.num_put_back + 1


def test_each_micro_batch_that_was_drawn_has_its_own_weight():
    drawn = Drawn([2, 0], OF_POOL)
    assert [drawn.weight_of(number) for number in range(2)] == [0.75, 0.25]
    assert (drawn.weight, drawn.own_weight) == (1.0, 4.0)
    assert [drawn.share(number, 99) for number in range(3)] == [0.0, 0.75, 1.0]


def test_the_weights_of_all_ranks_are_together_one_for_each_rank():
    assert Drawn([2, 0], OF_POOL).weight + Drawn([1, 3], OF_POOL).weight == 2.0


def test_of_what_is_drawn_no_parameter_is_complete_while_there_may_be_more():
    assert Drawn([2], OF_POOL, is_open=True).most == sys.maxsize
    assert Drawn([2], OF_POOL).most == 1


def test_a_rank_for_which_nothing_was_left_has_no_passes_and_no_weight():
    nothing = Drawn([], OF_POOL)
    assert (nothing.number, nothing.weight, nothing.share(0, 1)) == (0, 0.0, 0.0)
    assert not nothing.may_end_early


def test_what_the_loop_says_of_its_passes_changes_nothing_of_what_is_drawn():
    drawn = Drawn([2, 0], OF_POOL)
    assert drawn.weighed(2.0) is drawn.of_number(7) is drawn.with_data(1) is drawn
    assert math.isnan(drawn.usual_number)


def test_what_is_not_begun_is_put_back_and_there_may_be_more():
    draws = Draws()
    drawn = Drawn([2, 0, 1], OF_POOL, num_begun=1, draws=draws, stuck_at=7.0)
    assert drawn.give_back_at == 7.0
    kept = drawn.give_back()
    assert (draws.kept, kept.parts, kept.is_open, kept.own_weight) == (1, (2,), True, 3.0)
    assert kept.give_back_at == math.inf  # all that it has left is begun


@pytest.mark.parametrize(("num_begun", "draws"), [(2, Draws()), (1, Draws(may_put_back=False)), (1, None)])
def test_nothing_is_put_back_that_is_begun_or_was_dealt_out_or_while_the_store_is_away(num_begun, draws):
    assert Drawn([2, 0], OF_POOL, num_begun=num_begun, draws=draws, stuck_at=7.0).give_back_at == math.inf


def test_a_replay_submits_as_many_as_it_had_then():
    drawn = Drawn([2, 0, 1], OF_POOL, num_submitted=1)
    assert drawn.number == 3
    assert (drawn.as_submitted().parts, drawn.as_submitted().number) == ((2,), 1)
    whole = Drawn([2, 0, 1], OF_POOL)
    assert whole.as_submitted() is whole
