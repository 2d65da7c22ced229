"""What a dropped gradient must bring, of steps whose times are written down, and what AutoDeadline makes of it."""

import math
from dataclasses import replace

import pytest
import torch

from straggle import AutoDeadline, History, Progress
from straggle.policies.auto_deadline import choose_for
from straggle.policies.price import PRICE, Kept, kept, one_is_slow, price_of, vary_together
from straggle.policies.what_if.recorded_steps import StepTimes
from straggle.policies.what_if.step_model import StopRules

RULES = StopRules(quorum=2, grace_s=0.02)


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
    return choose_for(steps, RULES, longest_s=longest_s, least_gain=0.1, **options)


def test_ordinary_difference_is_no_reason_for_a_shorter_deadline_though_it_would_gain():
    generator = torch.Generator().manual_seed(0)
    factor = (1 + 0.1 * torch.randn(50, 4, generator=generator)).tolist()
    one = chosen(factor)
    assert one.tau_s == 1.4
    assert 0.3 < one.after_quorum_s < 0.5


@pytest.mark.parametrize(
    ("price", "spread", "is_shorter"), [(0.0, 0.1, True), (0.0, 0.02, False), (PRICE, 0.02, False)]
)
def test_ranks_that_vary_by_themselves_are_a_reason_if_much_is_gained(price, spread, is_shorter):
    factor = noise(50, 16, spread).tolist()
    assert (chosen(factor, price=price).tau_s < 1.2) == is_shorter


def test_clearly_slow_rank_is_a_reason_and_then_no_time_after_the_quorum_is_given():
    one = chosen([[1.0, 1.0, 1.01, 2.0]] * 50)
    assert one.tau_s < 1.1
    assert one.after_quorum_s == 0.0
    assert one.gain > 0.5


@pytest.mark.parametrize("spread", [0.03, 0.05, 0.08])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shared", [0.0, 0.1])
def test_stall_that_the_longest_deadline_shortens_too_is_no_reason_to_drop_for_noise(spread, seed, shared):
    """Where work is dealt out: a stall in 50 steps gains so much that all that was dropped beside it seemed paid."""
    factor = noise(50, 4, spread, seed=seed) * noise(50, 1, shared, seed=seed + 50)
    factor[30, 3] += 8
    one = chosen(factor.tolist(), price=PRICE)
    assert one.tau_s == 1.4
    assert one.after_quorum_s > 0.3
    assert one.dropped == pytest.approx(1 / 200)  # the rank that stalls, and nothing else


def test_slow_rank_of_which_nothing_is_gained_leaves_the_longest():
    one = chosen([[1.0, 1.0, 1.0, 1.0]] * 10, longest_s=1.2)
    assert (one.tau_s, one.after_quorum_s) == (1.2, pytest.approx(0.2))


def test_noise_does_not_pay_its_price_and_the_slow_rank_beside_it_does():
    noisy = noise(50, 4, 0.25)
    assert chosen(noisy.tolist(), price=0.0).tau_s < 1.0
    dear = chosen(noisy.tolist(), price=PRICE)
    assert dear.tau_s == 1.4
    quorum_s = noisy.kthvalue(2, dim=1).values.unsqueeze(1)
    late = (noisy > 1.4) & (noisy > quorum_s + dear.after_quorum_s)
    assert late.float().mean() <= 0.04  # of which nearly all is in: 0.005 of the gradients is missing
    assert chosen((noise(50, 4, 0.05) * torch.tensor([1.0, 1.0, 1.0, 2.0])).tolist(), price=PRICE).tau_s < 1.2


def test_stall_among_noise_is_not_waited_for():
    noisy = noise(50, 4, 0.25)
    with_stall = noisy.clone()
    with_stall[25, 1] += 10.0  # one of 200 times: 0.005 of all
    without = chosen(noisy.tolist(), price=PRICE).after_quorum_s
    assert chosen(with_stall.tolist(), price=PRICE).after_quorum_s == pytest.approx(without, abs=0.2)


BUSY = noise(50, 1, 0.24, seed=1)
SLOW = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("factor", "price"),
    [
        (noise(50, 6, 0.27), 0.0),  # each by itself
        (noise(50, 6, 0.27) * BUSY, PRICE),  # on a shared machine, none of them slow
        (noise(50, 6, 0.27) * BUSY * SLOW, 0.0),  # one clearly slow
        (noise(50, 6, 0.27) * BUSY * torch.tensor([math.nan, *SLOW[1:]]), 0.0),  # and one absent
        (noise(5, 6, 0.27) * BUSY[:5], PRICE),  # too few steps to know
    ],
)
def test_what_is_dropped_has_a_price_on_a_shared_machine_if_no_rank_is_slow_and_if_work_is_dealt_out(factor, price):
    assert price_of(factor, dealt=False) == price
    assert price_of(factor, dealt=True) == PRICE


@pytest.mark.parametrize(
    ("end_s", "is_slow"),
    [
        ([[1.0, 1.0, 1.0]] * 4, False),
        ([[1.0, 1.0, 3.0]] * 4, True),
        ([[1.0, 1.0, 1.2]] * 4, False),  # not clearly
        ([[1.0, 1.0, 3.0], [1.0, 3.0, 1.0], [3.0, 1.0, 1.0]] * 4, False),  # each now and then
        ([[1.0, math.nan, 3.0]] * 4, True),
        ([[1.0, 1.0, 1.5], [9.0, 9.0, 13.5]] * 4, True),  # in busy steps as well
        ([[1.0]] * 4, False),
        ([[math.nan, math.nan]] * 4, False),
    ],
)
def test_one_rank_is_slow(end_s, is_slow):
    assert one_is_slow(torch.tensor(end_s, dtype=torch.float64)) == is_slow


def test_longest_deadline_drops_on_a_shared_machine_only_what_brings_its_price():
    """What is late there now and then brings three to five times as much as is dropped."""
    one = chosen((noise(50, 4, 0.27) * BUSY).tolist(), price=PRICE, longest_s=1.2)
    assert one.tau_s == 1.2
    assert one.dropped < 0.02
    assert one.gain >= PRICE * one.dropped


def test_rank_that_is_slow_whatever_it_is_given_is_a_reason_to_drop_although_work_is_dealt_out():
    unit_s = torch.tensor([1.0, 1.0, 1.0, 1.8]).view(1, 4, 1).repeat(40, 1, 1) * noise(40, 4, 0.01).unsqueeze(-1)
    share, at_once = torch.ones_like(unit_s), torch.zeros(40, 4)
    progress = Progress(unit_s, share, share, torch.ones(1), at_once + 1, at_once, at_once[:, 0])
    seen = History(40, unit_s[..., 0], torch.ones(40, 4, dtype=torch.bool), progress, dealt=True)
    assert AutoDeadline().decide(seen).predicted_drop < 0.01
    assert AutoDeadline().decide(replace(seen, evenly=False)).predicted_drop > 0.2
    policy = AutoDeadline()
    policy.decide(seen)
    assert policy.decide(replace(seen, evenly=False)).predicted_drop > 0.2  # it chooses again at once


NAN = math.nan


def steps(rows):
    """``rows`` of (share that rank 1 brought, its seconds, seconds with waiting); rank 0 takes 1 s, and all weigh 1."""
    reach, own_s, waiting_s = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    computed = torch.stack([torch.ones_like(reach), reach], 1).unsqueeze(2)
    at_once = torch.zeros(len(rows), 2, dtype=torch.float64)
    entered_s = at_once.clone()
    entered_s[:, 1] = 1.5 * own_s.isnan()
    progress = Progress(computed, computed, computed, torch.ones(1).double(), at_once + 1, entered_s, at_once[:, 0])
    return kept(progress, torch.stack([torch.ones_like(own_s), own_s], 1), waiting_s)


@pytest.mark.parametrize(
    ("rows", "gain", "num_steps", "broken"),
    [
        ([(1.0, 2.0, 2.0)] * 25, 0.0, 0, False),  # nothing was dropped
        ([(0.5, 1.0, 2.0)] * 25, 0.75 * 2 - 1, 25, False),
        ([(0.0, 1.5, 2.0)] * 25, 0.5 * 2 / 1.5 - 1, 25, True),  # half of all is gone for a quarter of the time
        ([(0.0, 1.5, 2.0)] * 19, 0.5 * 2 / 1.5 - 1, 19, False),  # too few to say
        ([(0.0, NAN, 4.0)] * 25, 0.5 * 4 / 1.5 - 1, 25, False),  # stood in for after 1.5 s
        ([(0.5, 1.0, 2.0), *[(1.0, 1.0, 1.0)] * 8], 0.5, 1, False),  # the others had nothing to gain
        ([(0.5, 1.4, 1.5), (0.5, 1.4, 2.1)] * 10, 0.75 * 1.8 / 1.4 - 1, 20, True),
    ],
)
def test_gain_as_it_came(rows, gain, num_steps, broken):
    seen = steps(rows)
    assert seen.gain == pytest.approx(gain)
    assert seen.num_steps == num_steps
    assert seen.broken(0.01) == broken


@pytest.mark.parametrize(
    ("gain", "dropped", "price", "broken"),
    [
        (0.04, 0.1, 0.5, True),
        (0.06, 0.1, 0.5, False),
        (0.2, 0.1, 3.0, True),
        (0.31, 0.1, 3.0, False),
    ],
)
def test_what_was_dropped_must_have_brought_its_price(gain, dropped, price, broken):
    assert Kept(gain, 0.0, 20, dropped).broken(0.01, price) == broken


def test_what_may_be_noise_is_not_broken():
    assert not Kept(-0.1, 0.2, 20).broken(0.01)
    assert Kept(-0.1, 0.1, 20).broken(0.01)
    even = steps([(0.5, 1.4, 1.5), (0.5, 1.4, 2.1)] * 9)
    assert even.error == pytest.approx((1 + even.gain) * (0.3 / 1.8) / math.sqrt(17))
