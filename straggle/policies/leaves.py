"""Who merges in the ring, who is a leaf, and who is put out: from what all ranks know of their links.

A merge is as slow as the slowest link of its ring. A leaf is outside of it: it is sent what was merged, and sends of
its own gradients what its link carries meanwhile. A rank is one only where the others gain more than it can lose.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from straggle.policies.deadline import check_count, is_number
from straggle.policies.merge_time import merge_seconds
from straggle.policies.rank_links import RankLink, in_ring


@dataclass(frozen=True)
class SeenLinks:
    """What all ranks know after a merged step: each rank's link.

    ``num_bytes`` of gradients are merged in a step, in ``num_messages``; ``compute_s``: what a step takes beside that.
    ``absent``: ranks that are no members, and not because of their links. ``members``: who is to be put
    out is asked, and not who is a leaf; as long as ``min_ranks`` are left.
    """

    links: Sequence[RankLink]
    num_bytes: float
    num_messages: int = 1
    compute_s: float = 0.0
    absent: Collection[int] = ()
    members: bool = False
    min_ranks: int = 0


@dataclass(frozen=True)
class Places:
    """Where the ranks are from the next step on: ``leaves``, those that are put ``out``, and the others in the ring.

    The rest is the policy's memory. ``against``: for how many steps in a row each rank has been better off
    elsewhere. ``returned_at``: the step in which it came back last, and ``flaps``: how often it did so in vain.
    """

    leaves: frozenset[int] = frozenset()
    out: frozenset[int] = frozenset()
    step: int = 0
    against: Mapping[int, int] = field(default_factory=dict)
    returned_at: Mapping[int, int] = field(default_factory=dict)
    flaps: Mapping[int, int] = field(default_factory=dict)

    def with_outside(self, ranks: Collection[int], *, members: bool) -> Places:
        """The same, with these ranks outside of the ring from here on; ``members``: they are put out, and no leaves."""
        flaps = dict(self.flaps)
        for rank in ranks:
            in_vain = self.step - self.returned_at.get(rank, -_REMEMBERED) < _REMEMBERED
            flaps[rank] = flaps.get(rank, 0) + 1 if in_vain else 0
        against = {rank: number for rank, number in self.against.items() if rank not in ranks}
        if members:
            return replace(self, out=self.out.union(ranks), against=against, flaps=flaps)
        return replace(self, leaves=self.leaves.union(ranks), against=against, flaps=flaps)


@dataclass(frozen=True)
class LinkPolicy:
    """When a rank leaves the ring because of its link, and when it comes back.

    It leaves where the group is expected to get ``min_gain`` times as many gradients a second then, in ``after_steps``
    steps in a row. It comes back where they are that many more with it, in ``return_steps`` steps in a row. That many
    are doubled each time that it came back in vain, up to 16 times as many. ``stretch``: how much longer a step may
    become while the others wait for what a leaf sends. With members (`Elastic`) a rank that needs more than
    ``receives`` steps of the others to receive, or to send, one step's gradients is put out. It comes back at once
    where fewer members than `Elastic.min_ranks` are left.
    """

    min_gain: float = 1.05
    after_steps: int = 3
    return_steps: int = 10
    stretch: float = 1.2
    receives: float = 1.5

    def __post_init__(self) -> None:
        check_count("after_steps", self.after_steps, least=1)
        check_count("return_steps", self.return_steps, least=1)
        for name in ("min_gain", "stretch", "receives"):
            value = getattr(self, name)
            if not is_number(value) or not 1 <= value < math.inf:
                raise ValueError(f"{name}={value}: must be a finite number, at least 1")

    def next_places(self, now: Places, seen: SeenLinks) -> Places:
        """Where the ranks are after one more step: a function of these arguments alone."""
        outside = now.leaves | now.out
        wanted = {rank: self._belongs_outside(rank, outside, seen) for rank in outside}
        entering = self._entering(outside, seen)
        missed = len(seen.links) - len(outside | set(seen.absent)) < seen.min_ranks
        against = {
            rank: now.against.get(rank, 0) + 1
            for rank in range(len(seen.links))
            if (rank in entering if rank not in outside else not wanted[rank])
        }
        places = replace(now, against=against)
        if entering and min(against[rank] for rank in entering) >= self.after_steps:
            places = places.with_outside(entering, members=seen.members)
        returning = {
            rank
            for rank in outside
            if missed or against.get(rank, 0) >= self.return_steps * 2 ** min(now.flaps.get(rank, 0), _MAX_DOUBLED)
        }
        return replace(
            places,
            leaves=places.leaves - returning,
            out=places.out - returning,
            step=now.step + 1,
            against={rank: number for rank, number in places.against.items() if rank not in returning},
            returned_at={**now.returned_at, **dict.fromkeys(returning, now.step)},
        )

    def leaving_now(self, now: Places, seen: SeenLinks) -> frozenset[int]:
        """The members to put out in the middle of a merge that takes many times as long as usual, by these links.

        The same question as after a merged step, and it is asked once: such a merge is itself the proof of many steps.
        """
        return self._entering(now.leaves | now.out, seen) if seen.members else frozenset()

    def _entering(self, outside: Collection[int], seen: SeenLinks) -> frozenset[int]:
        """The ranks of the ring that are better outside: the slowest one, or the slowest few together."""
        inside = [rank for rank in range(len(seen.links)) if rank not in outside and rank not in seen.absent]
        inside.sort(key=lambda rank: -_own_seconds(rank, seen))
        now_rate = gradients_a_second(outside, seen)
        there = len(seen.links) - len(seen.absent)
        best: tuple[float, int] = (self.min_gain / _MORE, 0)
        most = min(there // 2 - len(outside), len(inside) - max(_SMALLEST, seen.min_ranks))
        for count in range(1, most + 1):
            slowest = inside[count - 1]
            if not _own_seconds(slowest, seen):
                break  # its link is not known
            if seen.members and not self._cannot_keep_up(slowest, {*outside, *inside[:count]}, seen):
                continue
            gain = gradients_a_second({*outside, *inside[:count]}, seen) / now_rate
            if gain >= _MORE * best[0]:
                best = gain, count
        return frozenset(inside[: best[1]])

    def _belongs_outside(self, rank: int, outside: Collection[int], seen: SeenLinks) -> bool:
        """Whether a rank that is outside of the ring stays there; also where nothing is known of its link."""
        if not seen.links[rank].is_known:
            return True
        with_it = gradients_a_second(set(outside) - {rank}, seen)
        return with_it < self.min_gain * gradients_a_second(outside, seen)

    def _cannot_keep_up(self, rank: int, outside: Collection[int], seen: SeenLinks) -> bool:
        others_s = step_seconds(outside, seen, leaves_too=False)
        link = seen.links[rank]
        return _known(link.latency_s) + _known(seen.num_bytes / link.slower_bytes_per_s) > self.receives * others_s


_SMALLEST = 2  # ranks in the ring
_MORE = 1.02  # what each further leaf has to bring at least
_KEEPS_UP = 1.5  # times the others' step, in which a leaf has received one
_REMEMBERED = 500  # steps: a rank that leaves the ring again within these came back in vain
_MAX_DOUBLED = 4


def gradients_a_second(outside: Collection[int], seen: SeenLinks) -> float:
    """Ranks' gradients that are merged in a second, as expected with these ranks outside of the ring.

    A leaf that receives in a step of the others gives half of what its link carries in that time: it computes before
    it sends, and late buckets are of no use. One that is slower falls behind, and gives nothing. With members the ranks
    outside are put out: no rank waits for them.
    """
    inside = sum(rank not in outside and rank not in seen.absent for rank in range(len(seen.links)))
    if seen.members:
        return inside / step_seconds(outside, seen, leaves_too=False)
    step_s, given = step_seconds(outside, seen), 0.0
    if step_s <= _KEEPS_UP * (seen.compute_s + _ring_seconds(outside, seen)):
        ups = (seen.links[rank].up_bytes_per_s for rank in outside if rank not in seen.absent)
        given = sum(0.5 * min(1.0, _known(step_s * up / seen.num_bytes)) for up in ups)
    return (inside + given) / step_s


def step_seconds(outside: Collection[int], seen: SeenLinks, *, leaves_too: bool = True) -> float:
    """What a step takes with these ranks outside of the ring.

    The ring of the other p takes `merge_seconds`. Each of its ranks sends its part of what was merged to each leaf, and
    so ``N / p`` of N bytes for each. Meanwhile a leaf receives N bytes, and its messages need its latency in both
    directions. ``leaves_too``: whether the leaves are waited for.
    """
    ring_s = _ring_seconds(outside if leaves_too else (), seen, without=outside)
    leaf_s = [_known(seen.links[r].latency_s) + _receive_seconds(seen.links[r], seen.num_bytes) for r in outside]
    return seen.compute_s + max([ring_s, *leaf_s] if leaves_too else [ring_s])


def _ring_seconds(leaves: Collection[int], seen: SeenLinks, without: Collection[int] = ()) -> float:
    """What the ring takes, and what its ranks send to these leaves."""
    ranks = [rank for rank in range(len(seen.links)) if rank not in {*leaves, *without, *seen.absent}]
    if len(ranks) < 2:
        return 0.0
    ring_s = merge_seconds(seen.num_bytes, [in_ring(seen.links[rank]) for rank in ranks], seen.num_messages)
    known = [rate for rank in ranks if not math.isnan(rate := seen.links[rank].up_bytes_per_s)]
    return ring_s + len(leaves) * seen.num_bytes / len(ranks) / min(known, default=math.inf)


def _own_seconds(rank: int, seen: SeenLinks) -> float:
    """By what ranks are compared: a merge by two ranks that have this link; 0 where it is not known."""
    return merge_seconds(2 * seen.num_bytes / len(seen.links), [in_ring(seen.links[rank])] * 2, seen.num_messages)


def _receive_seconds(link: RankLink, num_bytes: float) -> float:
    return _known(link.latency_s) + _known(num_bytes / link.down_bytes_per_s)


def _known(seconds: float) -> float:
    """What is not known costs nothing."""
    return 0.0 if math.isnan(seconds) else seconds
