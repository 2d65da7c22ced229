"""Whether a rank is slow as such, of steps whose times are written down, and what AutoDeadline makes of it."""

import math

import pytest
import torch

from straggle.policies.auto_deadline import StepTimes, choose_for
from straggle.policies.ordinary import differences, lag_that_drops, vary_together
from straggle.policies.price import HIGH, LOW
from straggle.policies.step_model import StopRules

RULES = StopRules(quorum=2, grace_s=0.02)


def of(rows):
    """Differences of steps given by when each rank ends them."""
    end_s = torch.tensor(rows, dtype=torch.float64)
    quorum_s = end_s.nan_to_num(math.inf).kthvalue(2, dim=1).values
    return differences(end_s, quorum_s.nan_to_num(0.0, posinf=0.0), torch.zeros(len(rows)))


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
        ([[1.0, 1.0, 1.2, math.nan]] * 4, 0.2, 0.0, False),  # one is absent
        ([[math.nan] * 4] * 2, 0.0, 0.0, False),
    ],
)
def test_differences(rows, lag_s, held_up, any_slow):
    seen = of(rows)
    assert seen.lag_s == pytest.approx(lag_s)
    assert seen.held_up == pytest.approx(held_up)
    assert seen.any_slow == any_slow


def test_ordinary_lag_is_that_of_the_ranks_which_are_there():
    # with a fourth rank at lag 0, more than one in a hundred of them would be needed to show
    rows = [[1.0, 1.0, 1.0 + 0.3 * (step < 2), math.nan] for step in range(60)]
    assert of(rows).lag_s > of([[*row[:3], 1.0] for row in rows]).lag_s


@pytest.mark.parametrize(
    ("share", "needs_s", "lag_s"),
    [
        (0.5, [0.0, 0.1, 0.2, 0.3], 0.1),
        (0.25, [0.0, 0.1, 0.2, 0.3], 0.2),
        (0.2, [0.0, 0.1, 0.2, 0.3], 0.3),
        (0.25, [0.0, 0.1, 0.2, math.inf], 0.1),  # never comes in, so no lag is too short for it
        (0.5, [-1.0, -1.0, -1.0, -1.0], 0.0),
        (1.0, [0.1, 0.2], 0.0),
        (0.5, [math.inf], 0.0),
    ],
)
def test_lag_that_drops(share, needs_s, lag_s):
    needs_s = torch.tensor(needs_s, dtype=torch.float64)
    assert lag_that_drops(share, needs_s, torch.full_like(needs_s, 1 / len(needs_s))) == pytest.approx(lag_s)


def noise(steps, ranks, spread, seed=0):
    return (spread * torch.randn(steps, ranks, generator=torch.Generator().manual_seed(seed))).exp().double()


def test_ranks_of_a_busy_machine_vary_together_and_independent_ones_do_not():
    busy = noise(50, 1, 0.2, seed=1)
    assert not vary_together(noise(50, 4, 0.2))
    assert vary_together(noise(50, 4, 0.2) * busy)
    assert not vary_together(noise(50, 4, 0.2) * torch.tensor([1.0, 1.0, 1.0, 2.0]))  # one is slow as such
    absent = torch.tensor([1.0, 1.0, 1.0, math.nan])
    assert not vary_together(noise(50, 4, 0.2) * absent)
    assert vary_together(noise(50, 4, 0.2) * busy * absent)
    assert vary_together(noise(9, 4, 0.2))  # too few to know


def chosen(factor, longest_s=1.4, **options):
    """By 50 steps of units that take a quarter of ``factor`` (ranks) each."""
    unit_s = torch.cumsum(torch.tensor(factor, dtype=torch.float64).unsqueeze(-1).expand(-1, -1, 4) / 4, 2)
    at_once = torch.zeros(unit_s.shape[:2])
    quorum_s = unit_s[..., -1].kthvalue(2, dim=1).values
    steps = StepTimes(unit_s, torch.full_like(unit_s, 0.25), at_once, at_once[:, 0], quorum_s)
    return choose_for(steps, RULES, longest_s=longest_s, least_gain=0.01, **options)


def test_ordinary_difference_is_no_reason_for_a_shorter_deadline_though_it_would_gain():
    generator = torch.Generator().manual_seed(0)
    factor = (1 + 0.1 * torch.randn(50, 4, generator=generator)).tolist()
    one = chosen(factor)
    assert one.tau_s == 1.4
    assert 0.3 < one.after_quorum_s < 0.5


@pytest.mark.parametrize(("price", "spread", "is_shorter"), [(LOW, 0.1, True), (LOW, 0.02, False), (HIGH, 0.1, False)])
def test_ranks_that_vary_by_themselves_are_a_reason_where_much_is_gained(price, spread, is_shorter):
    factor = noise(50, 16, spread).tolist()
    assert (chosen(factor, price=price).tau_s < 1.2) == is_shorter


def test_rank_that_is_slow_as_such_is_a_reason_and_then_no_time_after_the_quorum_is_given():
    one = chosen([[1.0, 1.0, 1.01, 2.0]] * 50)
    assert one.tau_s < 1.1
    assert one.after_quorum_s == 0.0
    assert one.gain > 0.5


def test_slow_rank_of_which_nothing_is_gained_leaves_the_longest():
    one = chosen([[1.0, 1.0, 1.0, 1.0]] * 10, longest_s=1.2)
    assert (one.tau_s, one.after_quorum_s) == (1.2, pytest.approx(0.2))


def test_noise_does_not_pay_its_price_and_the_slow_rank_beside_it_does():
    noisy = noise(50, 4, 0.25)
    assert chosen(noisy.tolist(), price=0.1).tau_s < 1.0
    dear = chosen(noisy.tolist(), price=3.0)
    assert dear.tau_s == 1.4
    quorum_s = noisy.kthvalue(2, dim=1).values.unsqueeze(1)
    late = (noisy > 1.4) & (noisy > quorum_s + dear.after_quorum_s)
    assert late.float().mean() <= 0.04  # of which nearly all is in: 0.005 of the gradients is missing
    assert chosen((noise(50, 4, 0.05) * torch.tensor([1.0, 1.0, 1.0, 2.0])).tolist(), price=3.0).tau_s < 1.2


def test_stall_among_noise_is_not_waited_for():
    noisy = noise(50, 4, 0.25)
    with_stall = noisy.clone()
    with_stall[25, 1] += 10.0  # one of 200 times: 0.005 of all
    without = chosen(noisy.tolist(), price=3.0).after_quorum_s
    assert chosen(with_stall.tolist(), price=3.0).after_quorum_s == pytest.approx(without, abs=0.2)
