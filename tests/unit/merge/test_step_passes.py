"""The backward passes of a step: what each counts, which share of the step they are, and what is given back."""

import math

import pytest

from straggle.merge.round.step_passes import EqualPasses


def test_equal_passes_each_have_the_weight_of_the_step():
    passes = EqualPasses(4).weighed(3.0)
    assert [passes.weight_of(number) for number in range(4)] == [3.0] * 4
    assert (passes.weight, passes.own_weight, passes.number, passes.most) == (3.0, 3.0, 4, 4)
    assert not passes.may_end_early


def test_a_rank_whose_data_end_gives_less_than_its_passes_weigh():
    passes = EqualPasses(4, 2.0).with_data(3)
    assert (passes.number, passes.weight_of(0), passes.weight) == (3, 2.0, 1.5)
    assert passes.may_end_early
    assert passes.with_data(1).weight == pytest.approx(0.5)


def test_the_loop_may_say_later_how_many_equal_passes_there_are():
    passes = EqualPasses(1, 2.0).of_number(3)
    assert (passes.number, passes.weight, passes.usual_number) == (3, 2.0, 3)


def test_the_share_of_equal_passes_is_by_their_number():
    assert EqualPasses(4).share(1, 2) == 0.5
    assert EqualPasses(4).share(3, 2) == 1.0


def test_equal_passes_have_nothing_to_give_back():
    passes = EqualPasses(4)
    assert passes.give_back_at == math.inf
    assert passes.give_back() is passes
    assert passes.as_submitted() is passes
