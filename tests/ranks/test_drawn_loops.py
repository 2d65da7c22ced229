"""Loops drawn by a number, whose ranks are cut somewhere: what is merged is the mean over what each rank gave."""

import pytest
from drawn_loops import draw, problems_of, train
from ranks import run_ranks


def problems_with(numbers):
    """By the number of its loop."""
    loops = {number: draw(number) for number in numbers}
    found = {number: problems_of(own, run_ranks(train, own.ranks, own, seed=number)) for number, own in loops.items()}
    return {number: problems for number, problems in found.items() if problems}


@pytest.mark.parametrize("first", [0, 25, 50])
def test_what_is_merged_is_the_mean_over_what_each_rank_gave(first):
    assert problems_with(range(first, first + 25)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("first", [1000, 2000])
def test_it_is_in_hundreds_of_others(first):
    assert problems_with(range(first, first + 150)) == {}
