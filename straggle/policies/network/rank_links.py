"""Each rank's link, from what the ranks measured of the ways between them.

A way from one rank to another is as slow as the slower of its two ends: the link on which the first sends, and the link
on which the second receives. So a link is as good as the best way over it, and a way as good as the best of its last
few measurements. One slow neighbour, or a moment in which a machine was busy, makes no link slow.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from straggle.policies.network.merge_time import Link, merge_seconds
from straggle.report import StepReport

ROUNDS = 3  # of measurements: the best of them is how a way is, so that a slow link was slow in all
MAX_AGE_S = 180.0  # of a measurement: one that is older shows nothing of today's link


@dataclass(frozen=True)
class Way:
    """One direction between two ranks as ``source`` measured it, ``age_s`` seconds before it reported it."""

    source: int
    target: int
    link: Link
    age_s: float = 0.0


@dataclass(frozen=True)
class RankLink:
    """A rank's link: seconds until a first byte is there, and bytes a second that it sends (``up``) and receives.

    NaN: not measured. A rate above what a ping can measure is given as that limit, which is the same for all ranks.
    """

    latency_s: float = math.nan
    up_bytes_per_s: float = math.nan
    down_bytes_per_s: float = math.nan

    @property
    def slower_bytes_per_s(self) -> float:
        """The rate of its slower direction; NaN if neither is known."""
        return min(_known((self.up_bytes_per_s, self.down_bytes_per_s)), default=math.nan)

    @property
    def is_known(self) -> bool:
        """Whether there is a latency, and the rate of a direction."""
        return not math.isnan(self.latency_s) and not math.isnan(self.slower_bytes_per_s)


def best_ways(rounds: Iterable[Iterable[tuple[float, Way]]]) -> tuple[tuple[float, Way], ...]:
    """Of each way the shortest latency and the highest rate of several rounds, and when it was measured last.

    ``rounds``: when each way was measured, and the way; the newest first.
    """
    best = dict[int, tuple[float, Way]]()
    for at, way in (own for one in rounds for own in one):
        newest, known = best.get(way.target, (at, way))
        link = Link(min(known.link.latency_s, way.link.latency_s), max(known.link.bytes_per_s, way.link.bytes_per_s))
        best[way.target] = newest, replace(way, link=link)
    return tuple(best.values())


def rank_links(ways: Iterable[Way], num_ranks: int) -> tuple[RankLink, ...]:
    """Each rank's link. Between two ranks alone it is not known which end of a way is slow: both have its rate."""
    sent, received = ([list[Link]() for _ in range(num_ranks)] for _ in range(2))
    for way in ways:
        if way.age_s <= MAX_AGE_S and 0 <= way.source < num_ranks and 0 <= way.target < num_ranks:
            sent[way.source].append(way.link)
            received[way.target].append(way.link)
    return tuple(map(_rank_link, sent, received))


def _rank_link(sent: Sequence[Link], received: Sequence[Link]) -> RankLink:
    return RankLink(
        min(_known(link.latency_s for link in (*sent, *received)), default=math.nan),
        max(_known(link.bytes_per_s for link in sent), default=math.nan),
        max(_known(link.bytes_per_s for link in received), default=math.nan),
    )


def links_of(report: StepReport) -> tuple[RankLink, ...]:
    """Each rank's link as a report has it."""
    return tuple(RankLink(rank.latency_s, rank.up_bytes_per_s, rank.down_bytes_per_s) for rank in report.ranks)


def others_links(links: Sequence[RankLink]) -> tuple[RankLink, ...]:
    """For each rank the middle of the other ranks' links; NaN if none is known."""
    latencies = _medians_of_others([link.latency_s for link in links])
    up = _medians_of_others([link.up_bytes_per_s for link in links])
    down = _medians_of_others([link.down_bytes_per_s for link in links])
    return tuple(map(RankLink, latencies, up, down))


def others_link(links: Sequence[RankLink], rank: int) -> RankLink:
    """Of `others_links` that of one rank."""
    return others_links(links)[rank]


def ring_cost_s(link: RankLink, others: RankLink, *, num_bytes: float, num_ranks: int) -> float:
    """By how much longer an allreduce takes as one rank has this link and not one as ``others``; 0: not known."""
    if num_ranks < 2 or not (link.is_known and others.is_known):
        return 0.0
    own, usual = in_ring(link), in_ring(others)
    return merge_seconds(num_bytes, [own, *[usual] * (num_ranks - 1)]) - merge_seconds(num_bytes, [usual] * num_ranks)


def in_ring(link: RankLink) -> Link:
    """In a ring a rank sends and receives at the same time: the slower direction counts. Not known: costs nothing."""
    rate = link.slower_bytes_per_s
    return Link(0.0 if math.isnan(link.latency_s) else link.latency_s, math.inf if math.isnan(rate) else rate)


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """For each value the median of the others that are known; they are sorted once, for jobs of many ranks."""
    known = sorted(_known(values))
    of_all = median(known) if known else math.nan
    half, is_odd = divmod(len(known) - 1, 2)

    def without(place: int) -> float:
        def at(number: int) -> float:
            return known[number + (number >= place)]

        return at(half) if is_odd else (at(half - 1) + at(half)) / 2

    if len(known) == 1:
        return [of_all if math.isnan(value) else math.nan for value in values]
    return [of_all if math.isnan(value) else without(bisect_left(known, value)) for value in values]
