"""What of ranks' times goes with their samples, against ranks of which that is known."""

import math
import random
from itertools import pairwise

import pytest

from straggle.policies.shares.sample_time import Change, Level, split

NO_ERRORS = (0.0,) * 4
MEAN = 8.0
RANKS = ((0.05, 0.0125), (0.4, 0.02), (0.0, 0.03), (0.2, 0.0))  # seconds that are fixed, and of a sample
SHARES = {
    1: [(8.0,), (5.0,), (2.0,)],
    2: [(8.0, 8.0), (12.0, 4.0), (10.0, 6.0)],
    3: [(8.0, 8.0, 8.0), (10.0, 9.0, 5.0), (6.0, 8.0, 10.0)],
    4: [(8.0, 8.0, 8.0, 8.0), (10.0, 10.0, 10.0, 2.0), (9.0, 6.0, 12.0, 5.0)],
}


def level(counts, ranks, *, slower=1.0, errors=NO_ERRORS):
    times = zip(counts, ranks, strict=True)
    return Level(counts, tuple(slower * (fixed + own * count) for count, (fixed, own) in times), errors[: len(counts)])


def changes_of(ranks, shares, **options):
    return [Change(*pair) for pair in pairwise(level(counts, ranks, **options) for counts in shares)]


@pytest.mark.parametrize("world_size", SHARES)
def test_what_goes_with_samples_and_what_does_not_is_found_from_changes_of_the_shares(world_size):
    ranks, shares = RANKS[:world_size], SHARES[world_size]
    now = level(shares[-1], ranks)
    found = split(changes_of(ranks, shares), MEAN, now.counts, now.seconds, drift=0.0)
    for own, (fixed, per_sample) in zip(found, ranks, strict=True):
        assert (own.fixed_s, own.per_sample_s) == pytest.approx((fixed, per_sample), abs=1e-6)
        assert own.seconds(4.0) == pytest.approx(fixed + 4 * per_sample, abs=1e-6)


@pytest.mark.parametrize("world_size", SHARES)
def test_before_any_change_all_of_the_time_goes_with_the_samples(world_size):
    now = level(SHARES[world_size][0], RANKS[:world_size])
    for own, seconds in zip(split([], MEAN, now.counts, now.seconds), now.seconds, strict=True):
        assert (own.fixed_s, own.per_sample_s, own.is_known) == (0.0, pytest.approx(seconds / MEAN), False)


@pytest.mark.parametrize("slower", [0.5, 1.0, 3.0])
def test_rank_that_is_slower_now_is_so_in_both_parts(slower):
    shares = SHARES[4]
    now = level(shares[-1], RANKS, slower=slower)
    found = split(changes_of(RANKS, shares), MEAN, now.counts, now.seconds, drift=0.0)
    expected = [(slower * fixed, slower * per_sample) for fixed, per_sample in RANKS]
    assert [own for each in found for own in (each.fixed_s, each.per_sample_s)] == pytest.approx(
        [own for pair in expected for own in pair], abs=1e-6
    )


@pytest.mark.parametrize("machine", [0.9, 1.15])
def test_what_the_machine_did_to_all_ranks_hides_nothing_of_the_one_whose_share_changed_most(machine):
    ranks = ((0.0, 0.02), (0.0, 0.02), (0.0, 0.02), (0.0, 0.08))
    before, after = level((8.0,) * 4, ranks), level((10.0, 10.0, 10.0, 2.0), ranks, slower=machine)
    slow = split([Change(before, after)], MEAN, after.counts, after.seconds)[3]
    assert slow.fixed_s < 0.12 * slow.seconds(8)


def test_rank_that_becomes_slow_meanwhile_says_nothing():
    ranks = ((0.0, 0.02), (0.0, 0.02), (0.0, 0.02), (0.0, 0.08))
    before, after = level((8.0,) * 4, ranks), level((10.0, 10.0, 10.0, 2.0), (*ranks[:3], (0.0, 0.8)))
    slow = split([Change(before, after)], MEAN, after.counts, after.seconds)[3]
    assert not slow.is_known
    assert slow.fixed_s < 0.2 * slow.seconds(8)


def test_rank_that_was_not_measured_is_as_the_others():
    ranks = ((0.16, 0.02),) * 4  # half of it is fixed at 8 samples
    (first,) = changes_of(ranks, [(8.0,) * 4, (2.0, 10.0, 10.0, 10.0)])
    unknown = first.without([3])
    found = split([unknown], MEAN, (8.0,) * 4, (0.32,) * 3 + (0.64,), drift=0.0)
    assert [own.is_known for own in found] == [True, True, True, False]
    assert found[3].fixed_s == pytest.approx(0.64 * (1 - 0.625), abs=0.01)  # (1 + 3 * 0.5) / 4 goes with its samples


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fixed", [0.0, 0.4])
def test_fixed_delay_is_told_from_slow_samples_beside_noise(fixed, seed):
    draw = random.Random(seed)

    def noisy(counts):
        slow = (fixed + 0.1, 0.0125) if fixed else (0.1, 0.0625)
        exact = level(counts, ((0.1, 0.0125),) * 3 + (slow,))
        seconds = tuple(own * math.exp(draw.gauss(0, 0.03)) for own in exact.seconds)
        return Level(counts, seconds, (0.03,) * 4)

    before, after = noisy((8.0,) * 4), noisy((9.5, 9.5, 9.5, 3.5))
    slow = split([Change(before, after)], MEAN, after.counts, after.seconds)[3]
    assert slow.is_known
    assert (slow.fixed_s > 0.6 * slow.seconds(8)) == bool(fixed)


def test_delayed_rank_is_told_by_its_own_time_while_the_others_are_held_up_by_the_machine():
    delayed = (0.06, 0.0)
    before = level((8.0,) * 4, ((0.01, 0.0), delayed, (0.01, 0.0), (0.01, 0.0)), errors=(0.3, 0.02, 0.3, 0.3))
    after = level((10.0, 1.0, 10.0, 11.0), ((0.02, 0.0), delayed, (0.03, 0.0), (0.025, 0.0)), errors=before.errors)
    slow = split([Change(before, after)], MEAN, after.counts, after.seconds)[1]
    assert slow.is_known
    assert slow.fixed_s == pytest.approx(0.06, rel=0.03)
