"""Whether a rank is slow as such, of steps whose times are written down, and what AutoDeadline makes of it."""

import math

import pytest
import torch

from straggle.policies.auto_deadline import StepTimes, choose_for
from straggle.policies.ordinary import differences
from straggle.policies.step_model import StopRules

RULES = StopRules(quorum=2, grace_s=0.02)


def of(rows):
    """Differences of steps given by when each rank ends them."""
    end_s = torch.tensor(rows, dtype=torch.float64)
    return differences(end_s, end_s.kthvalue(2, dim=1).values, torch.zeros(len(rows)))


@pytest.mark.parametrize(
    ("rows", "lag_s", "held_up", "any_slow"),
    [
        ([[1.0, 1.0, 1.0, 1.0]] * 4, 0.0, 0.0, False),
        ([[1.0, 1.0, 1.2, 1.4]] * 4, 0.4, 0.0, False),  # as far apart as ranks that are not slow can be
        ([[1.0, 1.0, 1.2, 2.0]] * 4, 0.2, 0.4, True),  # 0.8 s of 2
        ([[4.0, 4.0, 4.8, 4.0]] * 4, 0.8, 0.0, False),  # all are slow at once
        ([[1.0, 1.0, 1.0, math.inf]] * 4, 0.0, 0.9, True),
        ([[1.0, 1.0, 1.0, 1.5], *[[1.0] * 4] * 49], 0.0, 0.5 / 50.5, False),  # a stall that costs too little
        ([[1.0, 1.0, 1.0, 9.0], *[[1.0] * 4] * 3], 0.0, 2 / 3, True),
        ([[0.0, 0.0, 0.0, 0.0]], 0.0, 0.0, False),
    ],
)
def test_differences(rows, lag_s, held_up, any_slow):
    seen = of(rows)
    assert seen.lag_s == pytest.approx(lag_s)
    assert seen.held_up == pytest.approx(held_up)
    assert seen.any_slow == any_slow


def chosen(factor, longest_s=1.4):
    """By 50 steps of units that take a quarter of ``factor`` (ranks) each."""
    unit_s = torch.cumsum(torch.tensor(factor, dtype=torch.float64).unsqueeze(-1).expand(-1, -1, 4) / 4, 2)
    at_once = torch.zeros(unit_s.shape[:2])
    quorum_s = unit_s[..., -1].kthvalue(2, dim=1).values
    steps = StepTimes(unit_s, torch.full_like(unit_s, 0.25), at_once, at_once[:, 0], quorum_s)
    return choose_for(steps, RULES, longest_s=longest_s, least_gain=0.01)


def test_ordinary_difference_is_no_reason_for_a_shorter_deadline_though_it_would_gain():
    generator = torch.Generator().manual_seed(0)
    factor = (1 + 0.1 * torch.randn(50, 4, generator=generator)).tolist()
    one = chosen(factor)
    assert one.tau_s == 1.4
    assert 0.1 < one.after_quorum_s < 0.4


def test_rank_that_is_slow_as_such_is_a_reason_and_then_no_time_after_the_quorum_is_given():
    one = chosen([[1.0, 1.0, 1.01, 2.0]] * 50)
    assert one.tau_s < 1.1
    assert one.after_quorum_s == 0.0
    assert one.gain > 0.5


def test_slow_rank_of_which_nothing_is_gained_leaves_the_longest():
    one = chosen([[1.0, 1.0, 1.0, 1.0]] * 10, longest_s=1.2)
    assert (one.tau_s, one.after_quorum_s) == (1.2, 0.0)
