"""Whether the members of a job merge more gradients a second without some of them: pure, from what all of them know.

A step takes as long as the work of its slowest member, and then the merge, which is as slow as the slowest link of its
ring. A member gives the weight of what it computed in time. Whatever makes it slow (its data, its layers, its link),
one rule tells what its absence brings:

    gain = (weights of the others / seconds of a step without it) / (all weights / seconds of a step)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import median

from straggle.policies.network.merge_time import merge_seconds
from straggle.policies.network.rank_links import RankLink, in_ring, others_links
from straggle.policies.network.slow_links import slow_in

SMALLEST = 2  # the fewest members that are left
HALF = 0.5  # of its gradients: a member that gave less was slow
_INSTANT_S = 1e-9  # the shortest step
_MORE = 1.02  # the least gain that each further rank put out must bring


@dataclass(frozen=True)
class Seen:
    """What all members know of the ranks after a merged step; by rank ``links``, ``work_s`` and ``weights``.

    ``work_s``: seconds from the merge before until it had submitted its own work, or was stood in for. ``weights``: of
    the gradients that it gave; ``due``: of those of its entire step. ``num_bytes`` are merged in a step, in
    ``num_messages``; ``overhead_s``: what a merge takes beside that. ``absent``: ranks that are no members, and were
    not put out. ``min_ranks``: the fewest members that may be left.
    """

    links: Sequence[RankLink]
    work_s: Sequence[float]
    weights: Sequence[float]
    due: Sequence[float]
    num_bytes: float
    num_messages: int = 1
    overhead_s: float = 0.0
    absent: frozenset[int] = frozenset()
    min_ranks: int = 0

    def members(self, out: Collection[int]) -> list[int]:
        """The ranks that are neither ``out`` nor absent."""
        return [rank for rank in range(len(self.links)) if rank not in out and rank not in self.absent]

    def all_alike(self, out: Collection[int]) -> Seen:
        """The same if nothing but links differed: all work takes the members' median, and gives as much."""
        times, number = [self.work_s[rank] for rank in self.members(out)], len(self.links)
        return self._alike([median(times) if times else 0.0] * number)

    def with_returned(self, rank: int, work_s: float, usual_s: float) -> Seen:
        """The same if the work of ``rank`` took ``work_s`` and that of all others ``usual_s``, and gave as much."""
        number = len(self.links)
        times = [work_s if own == rank else usual_s for own in range(number)]
        return self._alike(times)

    def _alike(self, work_s: Sequence[float]) -> Seen:
        ones = [1.0] * len(work_s)
        return replace(self, work_s=work_s, weights=ones, due=ones)


def gradients_a_second(out: Collection[int], seen: Seen) -> float:
    """The weight of the gradients merged in a second with these ranks put out."""
    return weight_of(out, seen) / step_seconds(out, seen)


def weight_of(out: Collection[int], seen: Seen) -> float:
    """The weight of the gradients merged in a step with these ranks put out."""
    return sum(seen.weights[rank] for rank in seen.members(out))


def step_seconds(out: Collection[int], seen: Seen) -> float:
    """Seconds of a step with these ranks put out, if nothing is computed during the merge."""
    slowest_s = max((seen.work_s[rank] for rank in seen.members(out)), default=0.0)
    return max(_INSTANT_S, slowest_s + seen.overhead_s + merge_s(out, seen))


def absence_gain(gone: Collection[int], out: frozenset[int], seen: Seen) -> float:
    """How many times as many gradients a second are merged if ``gone`` are put out, too; 0 if there are none now."""
    now = gradients_a_second(out, seen)
    return gradients_a_second(out.union(gone), seen) / now if now > 0 else 0.0


def slow_in_link(out: frozenset[int], seen: Seen, min_gain: float) -> frozenset[int]:
    """The members that had better be put out for their links alone, however long their work takes."""
    others = others_links(seen.links)
    slow = [rank for rank in seen.members(out) if slow_in(seen.links[rank], others[rank])]
    return _better_without(slow, out, seen.all_alike(out), min_gain) if slow else frozenset()


def slow_in_work(out: frozenset[int], seen: Seen, min_gain: float) -> frozenset[int]:
    """The members that were slow in the step: ``min_gain`` times as long as is usual, or they gave less than half."""
    members = seen.members(out)
    usual_s = usual_seconds([seen.work_s[rank] for rank in members])
    return frozenset(
        rank
        for rank in members
        if seen.work_s[rank] >= min_gain * usual_s > 0 or seen.weights[rank] < HALF * seen.due[rank]
    )


def better_without(slow: Collection[int], out: frozenset[int], seen: Seen, min_gain: float) -> frozenset[int]:
    """Of these members those that had better be put out: the slowest, or the slowest few together; may be none."""
    return _better_without(sorted(slow), out, seen, min_gain)


def slowest(slow: Collection[int], out: frozenset[int], seen: Seen) -> frozenset[int]:
    """The slowest of these members, as many as may be put out."""
    most = max(0, len(seen.members(out)) - max(SMALLEST, seen.min_ranks))
    return frozenset(sorted(slow, key=lambda rank: (-seen.work_s[rank], rank))[:most])


def usual_seconds(work_s: Sequence[float]) -> float:
    """The middle of the members' times, the lower one of two; 0 without a member."""
    return sorted(work_s)[(len(work_s) - 1) // 2] if work_s else 0.0


def _better_without(slow: Sequence[int], out: frozenset[int], seen: Seen, min_gain: float) -> frozenset[int]:
    """The slowest of these, or the slowest few together, as many as bring most."""
    slow = sorted(slow, key=lambda rank: -(seen.work_s[rank] + _own_merge_s(rank, seen)))
    members = seen.members(out)
    most = min(len(slow), len(members) - max(SMALLEST, seen.min_ranks))
    if most < 1:
        return frozenset()
    rates = _rates_without_first([*slow, *set(members).difference(slow)], most, seen)
    best, count = min_gain / _MORE, 0
    for number in range(1, most + 1):
        if rates[number] >= _MORE * best * rates[0] > 0:
            best, count = rates[number] / rates[0], number
    return frozenset(slow[:count])


def _rates_without_first(members: Sequence[int], most: int, seen: Seen) -> list[float]:
    """`gradients_a_second` without the first of these ranks, the first two, ..., the first ``most``; and with all."""
    slowest_s, weight = [0.0] * (len(members) + 1), [0.0] * (len(members) + 1)
    for place in reversed(range(len(members))):
        slowest_s[place] = max(slowest_s[place + 1], seen.work_s[members[place]])
        weight[place] = weight[place + 1] + seen.weights[members[place]]
    ring = [in_ring(seen.links[rank]) for rank in members]
    merges_s = (merge_seconds(seen.num_bytes, ring[number:], seen.num_messages) for number in range(most + 1))
    return [
        weight[number] / max(_INSTANT_S, slowest_s[number] + seen.overhead_s + own_s)
        for number, own_s in enumerate(merges_s)
    ]


def merge_s(out: Collection[int], seen: Seen) -> float:
    """Seconds of a merge over the links of the members, as far as they are known."""
    links = [in_ring(seen.links[rank]) for rank in seen.members(out)]
    return merge_seconds(seen.num_bytes, links, seen.num_messages)


def _own_merge_s(rank: int, seen: Seen) -> float:
    """Seconds of a merge by two ranks with this rank's link, by which ranks are compared; 0 if it is unknown."""
    link = in_ring(seen.links[rank])
    seconds = merge_seconds(2 * seen.num_bytes / len(seen.links), [link] * 2, seen.num_messages)
    return seconds if math.isfinite(seconds) else 0.0
