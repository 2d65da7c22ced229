"""Which members are put out because of their links, and when they may return: pure, from what all know of the links.

A merge is as slow as the slowest link of its ring. A member is put out only if its link is slow and the others are
expected to merge more gradients a second without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from straggle.policies.merge_time import merge_seconds
from straggle.policies.rank_links import RankLink, in_ring, others_links
from straggle.policies.slow_links import slow_in

LOOK_EVERY_S = 0.3  # between two looks at the links, and at least a step; a look costs a tenth of a millisecond
AFTER_LOOKS = 3  # looks in a row at which the others would be better off without a member
RETURN_LOOKS = 10  # looks in a row at which a link was good again; doubled after each return in vain,
_MAX_DOUBLED = 4  # at most so often
_GOOD = 1.4  # a link is good again if at most so many times as slow as the others'; pings differ by a third
_REMEMBERED_S = 300.0  # a rank that is put out again within these had returned in vain
_SMALLEST = 2  # the fewest members that are left
_INSTANT_S = 1e-9  # the shortest step
_MORE = 1.02  # the least gain that each further rank put out must bring


@dataclass(frozen=True)
class SeenLinks:
    """What all members know of the ranks' links after a merged step.

    ``num_bytes`` of gradients are merged in a step, in ``num_messages``; ``compute_s``: the rest of a step's seconds.
    ``absent``: ranks that are no members, and not because of their links. ``min_ranks``: the fewest members that may be
    left.
    """

    links: Sequence[RankLink]
    num_bytes: float
    num_messages: int = 1
    compute_s: float = 0.0
    absent: frozenset[int] = frozenset()
    min_ranks: int = 0


@dataclass(frozen=True)
class SlowMembers:
    """The ranks that are ``out`` because of their links, and what is remembered of all ranks; a state after each step.

    ``now_s``: the seconds of all steps so far, equal on all members; ``looked_s``: those at the last look.
    ``against``: by rank, at how many looks in a row it was better to put it out, or to let it return.
    ``returned_s``: by rank, when it last returned; ``flaps``: how often it returned in vain.
    """

    out: frozenset[int] = frozenset()
    step: int = 0
    now_s: float = 0.0
    looked_s: float = -LOOK_EVERY_S
    against: Mapping[int, int] = field(default_factory=dict)
    returned_s: Mapping[int, float] = field(default_factory=dict)
    flaps: Mapping[int, int] = field(default_factory=dict)

    def after_step(self, step: int, seconds: float, look: Callable[[], SeenLinks], min_gain: float) -> SlowMembers:
        """The ranks out from the next step on: a function of this and the arguments alone, so the same on all ranks."""
        after = replace(self, step=step + 1, now_s=self.now_s + seconds)
        if after.now_s - self.looked_s < LOOK_EVERY_S:
            return after
        return replace(after, looked_s=after.now_s).after_look(look(), min_gain)

    def after_look(self, seen: SeenLinks, min_gain: float) -> SlowMembers:
        """The state after a look at the links, as they are ``seen`` now."""
        leaving = leaving_ranks(self.out, seen, min_gain)
        better = leaving | {rank for rank in self.out if _may_return(rank, self.out, seen)}
        after = replace(self, against={rank: self.against.get(rank, 0) + 1 for rank in sorted(better)})
        if leaving and min(after.against[rank] for rank in leaving) >= AFTER_LOOKS:
            after = after.without(leaving)
        too_few = len(seen.links) - len(self.out | seen.absent) < seen.min_ranks
        return after._with({rank for rank in self.out if too_few or after._waited_enough(rank)})

    def without(self, ranks: Collection[int]) -> SlowMembers:
        """This state with these ranks put out, too."""
        flaps = dict(self.flaps)
        for rank in ranks:
            in_vain = self.now_s - self.returned_s.get(rank, -math.inf) < _REMEMBERED_S
            flaps[rank] = flaps.get(rank, 0) + 1 if in_vain else 0
        against = {rank: number for rank, number in self.against.items() if rank not in ranks}
        return replace(self, out=self.out.union(ranks), against=against, flaps=flaps)

    def _waited_enough(self, rank: int) -> bool:
        return self.against.get(rank, 0) >= RETURN_LOOKS << min(self.flaps.get(rank, 0), _MAX_DOUBLED)

    def _with(self, ranks: Collection[int]) -> SlowMembers:
        """This state with these ranks let in again."""
        against = {rank: number for rank, number in self.against.items() if rank not in ranks}
        returned_s = {**self.returned_s, **dict.fromkeys(ranks, self.now_s)}
        return replace(self, out=self.out.difference(ranks), against=against, returned_s=returned_s)


def leaving_ranks(out: frozenset[int], seen: SeenLinks, min_gain: float) -> frozenset[int]:
    """The members that had better be put out, too: the slowest one, or the slowest few together.

    During a merge that takes many times as long as usual one look is enough, as such a merge proves as much as many
    steps.
    """
    members, others = _members(out, seen), others_links(seen.links)
    slow = [rank for rank in members if slow_in(seen.links[rank], others[rank])]
    slow.sort(key=lambda rank: -_own_seconds(rank, seen))
    best, count = min_gain / _MORE, 0
    for number in range(1, min(len(slow), len(members) - max(_SMALLEST, seen.min_ranks)) + 1):
        gain = gradients_a_second(out.union(slow[:number]), seen) / gradients_a_second(out, seen)
        if gain >= _MORE * best:
            best, count = gain, number
    return frozenset(slow[:count])


def _may_return(rank: int, out: frozenset[int], seen: SeenLinks) -> bool:
    """Whether the rank's link is good again, or slow and worth its gradients; false if the link is unknown."""
    link = seen.links[rank]
    if not link.is_known:
        return False
    if not slow_in(link, others_links(seen.links)[rank], times=_GOOD):
        return True
    return gradients_a_second(out - {rank}, seen) >= gradients_a_second(out, seen)


def gradients_a_second(out: Collection[int], seen: SeenLinks) -> float:
    """The expected number of ranks' gradients merged in a second with these ranks put out."""
    return len(_members(out, seen)) / step_seconds(out, seen)


def step_seconds(out: Collection[int], seen: SeenLinks) -> float:
    """Expected seconds of a step with these ranks put out, if nothing is computed during the merge."""
    links = [in_ring(seen.links[rank]) for rank in _members(out, seen)]
    return max(_INSTANT_S, seen.compute_s + merge_seconds(seen.num_bytes, links, seen.num_messages))


def _members(out: Collection[int], seen: SeenLinks) -> list[int]:
    return [rank for rank in range(len(seen.links)) if rank not in out and rank not in seen.absent]


def _own_seconds(rank: int, seen: SeenLinks) -> float:
    """Seconds of a merge by two ranks with this rank's link, by which ranks are compared; 0 if it is unknown."""
    link = in_ring(seen.links[rank])
    return merge_seconds(2 * seen.num_bytes / len(seen.links), [link] * 2, seen.num_messages)
