"""The backward passes of a step: what each counts, which share of the step they are, and what is given back."""

import math

from straggle.merge.step_passes import EqualPasses


def test_the_loop_may_say_later_how_many_equal_passes_there_are():
    passes = EqualPasses(1, 2.0).of_number(3)
    assert (passes.number, passes.weight, passes.usual_number) == (3, 2.0, 3)


def test_equal_passes_have_nothing_to_give_back():
    passes = EqualPasses(4)
    assert passes.give_back_at == math.inf
    assert passes.give_back() is passes
    assert passes.as_submitted() is passes
