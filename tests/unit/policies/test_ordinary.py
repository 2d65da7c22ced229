"""Whether a rank is clearly slow, of steps whose times are written down, and what AutoDeadline makes of it."""

import math
from dataclasses import replace

import pytest
import torch

from straggle.policies.auto_deadline import choose_for, price_of
from straggle.policies.ordinary import differences, lag_that_drops, one_stands_out, vary_together
from straggle.policies.price import HIGH, HIGHEST, LOW
from straggle.policies.step_model import StopRules
from straggle.policies.thresholds import Expected, StepTimes

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
    assert not vary_together(noise(50, 4, 0.2) * torch.tensor([1.0, 1.0, 1.0, 2.0]))  # one is clearly slow
    absent = torch.tensor([1.0, 1.0, 1.0, math.nan])
    assert not vary_together(noise(50, 4, 0.2) * absent)
    assert vary_together(noise(50, 4, 0.2) * busy * absent)
    assert vary_together(noise(9, 4, 0.2))  # too few to know
    shared = noise(50, 1, 0.02, seed=1)  # a hundredth of the variance, which 512 ranks show plainly
    assert not vary_together(noise(50, 512, 0.2) * shared)
    assert vary_together(noise(50, 512, 0.2) * busy)


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


def test_clearly_slow_rank_is_a_reason_and_then_no_time_after_the_quorum_is_given():
    one = chosen([[1.0, 1.0, 1.01, 2.0]] * 50)
    assert one.tau_s < 1.1
    assert one.after_quorum_s == 0.0
    assert one.gain > 0.5


def test_longest_deadline_that_pays_gives_no_time_after_the_quorum_either():
    """As on a machine that is busy in most steps, and was not in those that the longest deadline is taken from."""
    one = chosen((noise(50, 4, 0.03) * torch.tensor([1.36, 1.36, 1.36, 6.0])).tolist())
    assert (one.tau_s, one.after_quorum_s) == (1.4, 0.0)
    assert one.gain > 1


@pytest.mark.parametrize("spread", [0.03, 0.05, 0.08])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shared", [0.0, 0.1])
def test_stall_that_the_longest_deadline_shortens_too_is_no_reason_to_drop_for_noise(spread, seed, shared):
    """Where work is dealt out: a stall in 50 steps gains so much that all that was dropped beside it seemed paid."""
    factor = noise(50, 4, spread, seed=seed) * noise(50, 1, shared, seed=seed + 50)
    factor[30, 3] += 8
    one = chosen(factor.tolist(), price=HIGH)
    assert one.tau_s == 1.4
    assert one.after_quorum_s > 0.3
    assert one.dropped == 0.0


def test_gain_over_another_threshold_is_in_gradient_per_second():
    assert Expected(0.9, 1.0).gain_over(Expected(1.0, 1.5)) == pytest.approx(0.9 * 1.5 - 1)
    assert Expected(0.9, 0.0).gain_over(Expected(1.0, 1.5)) == 0.0


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


BUSY = noise(50, 1, 0.24, seed=1)
SLOW = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("factor", "price"),
    [
        (noise(50, 6, 0.27), LOW),  # each by itself
        (noise(50, 6, 0.27) * BUSY, HIGHEST),  # on a shared machine, none of them slow
        (noise(50, 6, 0.27) * BUSY * SLOW, LOW),  # one clearly slow
        (noise(50, 6, 0.27) * BUSY * torch.tensor([math.nan, *SLOW[1:]]), LOW),  # and one absent
        (noise(5, 6, 0.27) * BUSY[:5], HIGH),  # too few steps to know
    ],
)
def test_price_of_what_is_dropped_is_highest_on_a_shared_machine_where_no_rank_stands_out(factor, price):
    steps = StepTimes.entered_at_once(factor.unsqueeze(-1), torch.zeros(len(factor)))
    steps = replace(steps, quorum_s=factor.nan_to_num(math.inf).kthvalue(3, dim=1).values)
    assert price_of(steps, dealt=False) == price
    assert price_of(steps, dealt=True) == max(price, HIGH)


@pytest.mark.parametrize(
    ("end_s", "stands_out"),
    [
        ([[1.0, 1.0, 1.0]] * 4, False),  # none is slow
        ([[1.0, 1.0, 3.0]] * 4, True),
        ([[1.0, 1.0, 3.0], [1.0, 3.0, 1.0], [3.0, 1.0, 1.0]] * 4, False),  # each now and then
        ([[1.0, 1.0, 3.0]], True),  # nothing is known of one step
        ([[1.0, math.nan, 3.0]] * 4, True),
    ],
)
def test_one_rank_stands_out(end_s, stands_out):
    end_s = torch.tensor(end_s, dtype=torch.float64)
    assert one_stands_out(end_s, torch.ones(len(end_s))) == stands_out


@pytest.mark.parametrize(("ranks", "stands_out"), [(2, False), (3, False), (6, True), (12, True)])
def test_of_few_ranks_one_is_further_from_the_others_by_chance(ranks, stands_out):
    """``F`` is 4 for any number of ranks here: one in 500 windows of six alike has that, one in 50 of three."""
    slow = torch.zeros(60, ranks, dtype=torch.float64)
    slow[:, 0] += 1.0
    noise = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(30).unsqueeze(1).expand(60, ranks)
    between = 60 * slow.mean(0).var()
    within = noise.square().sum() / (60 * ranks - ranks)
    end_s = 2.4 + 0.1 * noise + 0.1 * slow * (4 * within / between).sqrt()
    assert one_stands_out(end_s, torch.ones(60)) == stands_out


def test_on_a_shared_machine_no_more_than_little_is_dropped_though_it_would_bring_three_times_as_much():
    factor = (noise(50, 4, 0.27) * BUSY).tolist()
    longer, shorter = (chosen(factor, price=price, longest_s=1.2) for price in (HIGHEST, HIGH))
    assert longer.tau_s == shorter.tau_s == 1.2
    assert longer.after_quorum_s > shorter.after_quorum_s
