"""How samples are dealt out to ranks of which is known what they take."""

import random

import pytest

from straggle.data.shares import deal, soonest
from straggle.policies.shares.sample_time import RankTime


def ways_of(total, ranks, least):
    if ranks == 1:
        return [(total,)] if total >= least else []
    ways = range(least, total - least * (ranks - 1) + 1)
    return [(own, *others) for own in ways for others in ways_of(total - own, ranks - 1, least)]


def slowest_s(times, counts):
    return max(of.seconds(count) for of, count in zip(times, counts, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_no_other_way_lets_the_slowest_rank_finish_sooner_and_none_as_soon_is_more_equal(ranks, seed):
    draw = random.Random(seed)
    times = [RankTime(draw.choice([0.0, 3.0]), draw.choice([0.0, draw.uniform(0.1, 3)])) for _ in range(ranks)]
    least, spare = draw.randrange(3), draw.choice([0.0, 0.1])
    ways = ways_of(13, ranks, least)
    best_s = min(slowest_s(times, way) for way in ways)
    assert slowest_s(times, soonest(13, times, least=least)) == pytest.approx(best_s)
    dealt = deal(13, times, least=least, spare=spare)
    admitted = [way for way in ways if slowest_s(times, way) <= (1 + spare) * best_s + 1e-6]
    assert tuple(dealt) in admitted
    assert sum(own**2 for own in dealt) == min(sum(own**2 for own in way) for way in admitted)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_fixed_delay_is_no_reason_for_a_smaller_share(ranks):
    delayed = [RankTime(0.0, 0.01)] * (ranks - 1) + [RankTime(0.4, 0.0)]
    assert deal(8 * ranks, delayed, least=1) == [8] * ranks


def test_rank_whose_samples_are_slow_has_fewer_beside_one_that_is_delayed():
    times = [RankTime(0.0, 0.01), RankTime(0.0, 0.01), RankTime(0.2, 0.0), RankTime(0.0, 0.04)]
    assert deal(40, times, least=1) == [12, 12, 11, 5]
