"""Each rank's link, from the ways that were measured."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median

import pytest

from straggle.policies.network.merge_time import Link, merge_seconds
from straggle.policies.network.rank_links import (
    MAX_AGE_S,
    RankLink,
    Way,
    best_ways,
    others_link,
    others_links,
    rank_links,
    ring_cost_s,
)

FAST, SLOW = 20e6, 1e6


def ways_between(up: Sequence[float], down: Sequence[float], latency_s: Sequence[float]) -> list[Way]:
    """What each rank measures of the ways to its two neighbours, where each rank's link is so."""
    count = len(up)
    pairs = {(source, (source + by) % count) for source in range(count) for by in (1, count - 1)}
    return [
        Way(source, target, Link(latency_s[source] + latency_s[target], min(up[source], down[target])))
        for source, target in sorted(pairs)
    ]


@pytest.mark.parametrize("count", [3, 4, 5])
@pytest.mark.parametrize("direction", ["up", "down", "both"])
def test_the_rank_whose_link_is_narrow_has_its_rate_and_its_neighbours_have_theirs(count: int, direction: str) -> None:
    up, down = [FAST] * count, [FAST] * count
    if direction != "down":
        up[2] = SLOW
    if direction != "up":
        down[2] = SLOW
    links = rank_links(ways_between(up, down, [0.001] * count), count)
    assert [link.up_bytes_per_s for link in links] == up
    assert [link.down_bytes_per_s for link in links] == down


def test_latency_is_of_the_rank_that_all_its_ways_have() -> None:
    links = rank_links(ways_between([FAST] * 4, [FAST] * 4, [0.0, 0.0, 0.05, 0.0]), 4)
    assert [link.latency_s for link in links] == [0.0, 0.0, 0.05, 0.0]


def test_one_measurement_on_a_busy_machine_makes_no_link_slow() -> None:
    ways = ways_between([FAST] * 4, [FAST] * 4, [0.0] * 4)
    noisy = [Way(0, 1, Link(0.02, SLOW)), *[way for way in ways if (way.source, way.target) != (0, 1)]]
    assert rank_links(noisy, 4) == rank_links(ways, 4)


@pytest.mark.parametrize("good", range(3))
def test_a_way_is_slow_only_where_all_of_its_last_measurements_are(good: int) -> None:
    slow, usual = Link(0.02, SLOW), Link(0.001, FAST)
    rounds = [[(30.0 - number, Way(0, 1, usual if number == good else slow))] for number in range(3)]
    assert best_ways(rounds) == ((30.0, Way(0, 1, usual)),)
    assert best_ways(own for number, own in enumerate(rounds) if number != good)[0][1].link == slow


def test_of_ways_that_are_measured_in_turn_each_has_its_own_best() -> None:
    first, second = [(9.0, Way(0, 1, Link(0.2, 5.0))), (8.0, Way(0, 3, Link(0.2, 4.0)))], [(4.0, Way(0, 2, Link(1, 1)))]
    third = [(2.0, Way(0, 1, Link(0.1, 3.0)))]
    assert best_ways([first, second, third]) == (
        (9.0, Way(0, 1, Link(0.1, 5.0))),
        (8.0, Way(0, 3, Link(0.2, 4.0))),
        (4.0, Way(0, 2, Link(1, 1))),
    )
    assert best_ways([[], second, []]) == tuple(second)  # peers that did not answer in two of three rounds


def test_of_two_ranks_both_have_the_rate_of_the_way_between_them() -> None:
    links = rank_links([Way(0, 1, Link(0.0, SLOW)), Way(1, 0, Link(0.0, FAST))], 2)
    assert links == (RankLink(0.0, SLOW, FAST), RankLink(0.0, FAST, SLOW))


def test_what_is_old_or_was_not_measured_is_not_known() -> None:
    old = Way(0, 1, Link(0.0, SLOW), age_s=2 * MAX_AGE_S)
    unknown = Way(1, 2, Link(0.001, math.nan))
    links = rank_links([old, unknown, Way(7, 0, Link(0.0, 1.0))], 3)
    assert math.isnan(links[0].up_bytes_per_s)
    assert math.isnan(links[1].down_bytes_per_s)
    assert links[1].latency_s == 0.001
    assert math.isnan(others_link(links, 1).up_bytes_per_s)
    assert ring_cost_s(links[1], links[2], num_bytes=1e6, num_ranks=3) == 0


@pytest.mark.parametrize("num_ranks", range(8))
def test_links_of_the_others_are_the_medians_without_a_rank_s_own(num_ranks: int) -> None:
    draw = random.Random(num_ranks)
    for _ in range(200):
        links = [RankLink(*draw.choices([math.nan, 1.0, 2.0, 2.5, 7.0, math.inf], k=3)) for _ in range(num_ranks)]
        for rank, found in enumerate(others_links(links)):
            for name, value in asdict(found).items():
                others = [getattr(link, name) for number, link in enumerate(links) if number != rank]
                known = [other for other in others if not math.isnan(other)]
                assert value == median(known) if known else math.isnan(value)


def test_what_a_link_costs_is_the_ring_with_it_less_the_ring_without() -> None:
    links = rank_links(ways_between([FAST, FAST, SLOW, FAST], [FAST] * 4, [0.001] * 4), 4)
    cost_s = ring_cost_s(links[2], others_link(links, 2), num_bytes=5.1e6, num_ranks=4)
    usual = Link(0.002, FAST)
    assert cost_s == pytest.approx(
        merge_seconds(5.1e6, [usual, usual, Link(0.002, SLOW), usual]) - merge_seconds(5.1e6, [usual] * 4)
    )
    assert ring_cost_s(links[0], others_link(links, 0), num_bytes=5.1e6, num_ranks=4) == 0
