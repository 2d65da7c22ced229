"""Fairness over ranks and depth bias: closed forms of small runs."""

import math

import pytest

from straggle import RankReport, StageReport, StepReport
from straggle.observe.numbers.fairness import jain_index
from straggle.observe.numbers.run import run_of


def fairness_of(reports):
    return run_of(reports).fairness


def rank(number, *shares, weight=1.0, **rest):
    reach = sum(shares) / len(shares)
    stage_s = (math.nan,) * len(shares)
    return RankReport(
        rank=number, wait_s=0, compute_s=1.0, reach=reach, stages=shares, stage_s=stage_s, weight=weight, **rest
    )


def step(*ranks, names=("head", "blocks.0")):
    return StepReport(0, 1.0, 1.0, ranks, tuple(StageReport(name, 10, 0.0, False) for name in names))


def test_nobody_late_is_fair():
    fairness = fairness_of([step(rank(0, 1, 1), rank(1, 1, 1))] * 3)
    assert fairness.stages == (1.0, 1.0)
    assert fairness.depth_bias == 0.0
    assert fairness.index == fairness.input_index == fairness.least == fairness.input_least == 1.0


def test_rank_that_never_comes_to_the_input_stage_is_starved_there():
    fairness = fairness_of([step(*(rank(number, 1, 1) for number in range(3)), rank(3, 1, 0))] * 5)
    assert fairness.depth_bias == pytest.approx(0.25)
    assert fairness.input_index == pytest.approx(3 / 4)
    assert fairness.input_least == 0.0
    assert fairness.index == pytest.approx(3.5**2 / (4 * 3.25))
    assert fairness.least == pytest.approx(0.5 / 0.875)


def test_contributions_count_by_their_weight():
    fairness = fairness_of([step(rank(0, 1, 1, weight=3), rank(1, 1, 0, weight=1))])
    assert fairness.stages == (1.0, 0.75)
    assert fairness.ranks == pytest.approx((3 / 1.75, 0.5 / 1.75))
    assert fairness.input_ranks == (2.0, 0.0)


def test_who_takes_turns_at_being_late_is_fair_though_the_input_gets_less():
    steps = [step(*(rank(number, 1, 0 if number == late else 1) for number in range(4))) for late in range(4)]
    fairness = fairness_of([step(*(rank(number, 1, 1) for number in range(4))), *steps])  # stages are planned after one
    assert fairness.depth_bias == pytest.approx(0.25)
    assert fairness.index == fairness.input_index == pytest.approx(1.0)


def test_rank_without_data_is_not_missed_in_the_stages():
    fairness = fairness_of([step(rank(0, 1, 1), rank(1, 1, 1, idle=True))])
    assert fairness.stages == (1.0, 1.0)
    assert fairness.ranks == (2.0, 0.0)


def test_stages_that_are_planned_anew_begin_anew():
    before = step(rank(0, 0, 0), rank(1, 1, 1))
    after = step(rank(0, 1, 1, 1), rank(1, 1, 1, 1), names=("a", "b", "c"))
    fairness = fairness_of([before, after])
    assert fairness.stages == (1.0, 1.0, 1.0)
    assert fairness.ranks == pytest.approx((2 / 3, 4 / 3))


@pytest.mark.parametrize(
    ("values", "index"), [([1, 1, 1, 1], 1.0), ([5, 0, 0, 0], 0.25), ([1, 1, 0, 0], 0.5), ([0, 0], math.nan)]
)
def test_jain_index(values, index):
    assert jain_index(values) == pytest.approx(index, nan_ok=True)
