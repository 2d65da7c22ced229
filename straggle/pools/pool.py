"""The pool of a step's micro-batches: which rank has which of them, and what a rank requests from the store next.

The first part of the pool is dealt out: each rank's *sure share*, known to all ranks without a message. The rest is
drawn in chunks of decreasing size, by factoring (Hummel, Schonberg and Flynn 1992): with R micro-batches left and P
ranks, the next P chunks have ``ceil(R / (2 P))`` each. The number of a draw alone determines its micro-batches, so one
atomic counter is all that the ranks share. With costs, R and the shares are of these, and the longest come first: what
is drawn last is small, and so is what the ranks then wait for each other.

A sure share is not lost if its rank does not come: the owner claims it as it begins, and a rank that finds the rest of
the pool empty opens unclaimed shares. One compare-and-set decides between them, so no micro-batch has two owners. An
owner can put back micro-batches that it has not begun: its share is then open with these numbers, for the first rank
that comes, itself included. If members leave, a rank that still draws seizes their shares: while it draws nothing is
merged, so no gradients of theirs are either. All of this is pure: `Drawer` gives the next request and interprets its
answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from statistics import median
from typing import Literal

from straggle.policies.shares.cost import longest_first

# The owner of a sure share adds this to the counter of draws once, beside 1. A counter has 32 bits, one for its sign:
# it is for `MAX_RANKS`, and for 262143 draws, which is more than they make of a thousand million micro-batches.
SETTLED = 1 << 18
MAX_RANKS = (1 << 13) - 1
_NO_PARTS = range(0)
_ROUNDING = 1e-4  # relative error of sums of weights, or of costs

Owner = Literal["own", "open"] | tuple[int, ...]  # open: these numbers were put back


@dataclass(frozen=True)
class Pool:
    """``num_parts`` micro-batches, of which each rank has ``shares`` for sure.

    ``drawn``: the rest is drawn. Otherwise the shares are the entire pool, and no rank sends requests. ``order``: the
    micro-batches' numbers, first the shares of all ranks, then the rest as it is drawn; and their ``costs`` in this
    order (empty: by number, with equal costs). Raises ``ValueError`` if more ranks draw than a counter can tell apart.
    """

    num_parts: int
    shares: tuple[int, ...]
    drawn: bool = True
    order: tuple[int, ...] = ()
    costs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.drawn and len(self.shares) > MAX_RANKS:
            raise ValueError(
                f"step.pull() is for {MAX_RANKS} ranks at most, not {len(self.shares)}: use Rebalance there"
            )

    @classmethod
    def by_cost(
        cls, costs: Sequence[float], shares: Sequence[float], even: Sequence[float] = (), *, drawn: bool = True
    ) -> Pool:
        """The pool of micro-batches that cost so much, of which each rank has about the share ``shares`` for sure.

        ``even``: what each would compute in all. All are in mean micro-batches. The longest are dealt out until one is
        longer than what is left of each share. A rank that has none yet may have one as long as its even part: who
        would draw it has it as its first, too. If none is ``drawn``, all of them are, equally to the ranks that have a
        share.
        """
        by_length = sorted(range(len(costs)), key=lambda number: -costs[number])
        if drawn:
            own = _within(shares, even or shares, [costs[number] for number in by_length])
        else:
            own = longest_first([costs[number] for number in by_length], [float(share > 0) for share in shares])
        sure = [by_length[place] for places in own for place in places]
        order = (*sure, *by_length[len(sure) :])
        return cls(len(costs), tuple(map(len, own)), drawn, order, tuple(costs[number] for number in order))

    @cached_property
    def _numbers(self) -> Sequence[int]:
        return self.order or range(self.num_parts)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.shares))

    @property
    def num_shares(self) -> int:
        """How many ranks have a sure share."""
        return sum(share > 0 for share in self.shares)

    def share(self, rank: int) -> Sequence[int]:
        """The numbers of a rank's sure share."""
        return self._numbers[self._ends[rank] - self.shares[rank] : self._ends[rank]]

    @cached_property
    def _chunks(self) -> tuple[Sequence[int], ...]:
        """The chunks that are drawn, in order."""
        chunks, first = list[Sequence[int]](), self._ends[-1]
        costs = self.costs or (1.0,) * self.num_parts
        while first < self.num_parts:
            least = math.fsum(costs[first:]) / (2 * len(self.shares))
            for _ in range(len(self.shares)):
                last, cost = first, 0.0
                while last < self.num_parts and cost < least * (1 - _ROUNDING):
                    cost, last = cost + costs[last], last + 1
                chunks += [self._numbers[first:last]] if last > first else []
                first = last
        return tuple(chunks)

    def chunk(self, index: int) -> Sequence[int]:
        """The micro-batches of draw number ``index``; empty if all are drawn."""
        return self._chunks[index] if index < len(self._chunks) else _NO_PARTS


def _within(shares: Sequence[float], even: Sequence[float], costs: Sequence[float]) -> list[list[int]]:
    """For each rank the places in the descending ``costs`` that its share has room for, until one has none."""
    own: list[list[int]] = [[] for _ in shares]
    left = list(shares)
    for place, cost in enumerate(costs):
        room = [
            own_left if places or not share else most
            for own_left, places, share, most in zip(left, own, shares, even, strict=True)
        ]
        fits = [rank for rank, most in enumerate(room) if cost <= most * (1 + _ROUNDING)]
        if not fits:
            break
        rank = max(fits, key=lambda rank: left[rank])
        own[rank].append(place)
        left[rank] -= cost
    return own


@dataclass(frozen=True)
class Claim:
    """Set the owner of ``rank``'s sure share if it has none; the answer is its owner now."""

    rank: int
    owner: Literal["own", "open"]


@dataclass(frozen=True)
class Release:
    """Open ``rank``'s sure share with these numbers if the rank owns it; the answer is its owner now."""

    rank: int
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Seize:
    """Open all of ``rank``'s sure share, even if the rank owns it; the answer is its owner now."""

    rank: int


@dataclass(frozen=True)
class Count:
    """Add to a counter; the answer is its new value. ``rank``: the counter of its opened share; ``None``: of draws."""

    rank: int | None
    amount: int


Request = Claim | Release | Seize | Count


@dataclass(frozen=True)
class Drawer:
    """The progress of one rank's draws: it claims its share, draws from the rest, and then opens others' shares.

    ``target``: the rank whose share it tries, counted from its own; ``numbers``: those that it opened there, or puts
    back. ``gone``: ranks that have left.
    """

    rank: int
    phase: Literal["claim", "draw", "open", "take", "done", "release", "unsettle"] = "claim"
    owns: bool = False
    settles: bool = False  # its next draw reports that it owns its share
    target: int = 0
    numbers: tuple[int, ...] = ()
    gone: frozenset[int] = frozenset()

    @classmethod
    def begin(cls, pool: Pool, rank: int) -> Drawer:
        """The drawer of a rank in a step that begins."""
        return cls(rank, "claim" if pool.shares[rank] else "draw")

    @property
    def puts_back(self) -> bool:
        """Whether it is about to put back, or is doing so."""
        return self.phase in ("release", "unsettle")

    def put_back(self, numbers: tuple[int, ...]) -> Drawer:
        """Put these numbers back; at most once, and only if the rank owns its share."""
        assert self.owns
        return replace(self, phase="release", owns=False, numbers=numbers)

    def without(self, gone: frozenset[int]) -> Drawer:
        """These ranks have left: try all shares once more; for a drawer that is not at its end."""
        if gone <= self.gone or self.phase == "done":
            return self
        return replace(self, gone=self.gone | gone, phase="draw" if self.phase in ("open", "take") else self.phase)

    def request(self, pool: Pool) -> Request | None:
        """The next request; ``None`` if nothing is left."""
        other = (self.rank + self.target) % len(pool.shares)
        match self.phase:
            case "claim":
                return Claim(self.rank, "own")
            case "draw":
                return Count(None, 1 + SETTLED * self.settles)
            case "open":
                return Seize(other) if other in self.gone else Claim(other, "open")
            case "take":
                return Count(other, 1)
            case "release":
                return Release(self.rank, self.numbers)
            case "unsettle":  # ranks that find the rest empty from here on try the shares
                return Count(None, -SETTLED)
            case _:
                return None

    def answered(self, pool: Pool, answer: Owner | int) -> tuple[Drawer, Sequence[int]]:
        """The drawer after an answer, and the micro-batches that the answer gave."""
        match self.phase:
            case "claim":
                owns = answer == "own"
                # an opened share has no owner that would finish it: others must try it, too
                return replace(self, phase="draw", owns=owns, settles=owns), (
                    pool.share(self.rank) if owns else _NO_PARTS
                )
            case "draw":
                assert isinstance(answer, int)
                return self._drew(pool, answer % SETTLED - 1, num_settled=answer // SETTLED)
            case "open":
                if answer == "own":
                    return self._next(pool), _NO_PARTS
                other = (self.rank + self.target) % len(pool.shares)
                numbers = answer if isinstance(answer, tuple) else tuple(pool.share(other))
                return replace(self, phase="take", numbers=numbers), _NO_PARTS
            case "release":  # if it was seized instead, this rank has left
                return replace(self, phase="draw" if self.settles else "unsettle", settles=False), _NO_PARTS
            case "unsettle":
                return replace(self, phase="draw"), _NO_PARTS
            case _:
                assert isinstance(answer, int)
                taken = self.numbers[answer - 1 : answer]
                return (self, taken) if taken else (self._next(pool), _NO_PARTS)

    def _drew(self, pool: Pool, index: int, *, num_settled: int) -> tuple[Drawer, Sequence[int]]:
        chunk, settled = pool.chunk(index), replace(self, settles=False)
        if num_settled == pool.num_shares and not pool.chunk(index + 1) and not self.gone:
            return replace(settled, phase="done"), chunk
        return (settled, chunk) if chunk else (replace(settled, target=-1)._next(pool), _NO_PARTS)

    def _next(self, pool: Pool) -> Drawer:
        """Go on to the next share that this rank could open."""
        for target in range(self.target + 1, len(pool.shares)):
            if pool.shares[(self.rank + target) % len(pool.shares)] and not (target == 0 and self.owns):
                return replace(self, phase="open", target=target)
        return replace(self, phase="done")


# -- sure shares

WINDOW = 8  # steps from which sure shares follow
_HELD_UP = 1.5  # micro-batches fewer than usual; of equal ranks the first to draw has one more
_SLACK = 0.25  # of a micro-batch
MOST_ATTEMPTS = 16  # of a step: ranks that die in each are dying of something else


@dataclass(frozen=True)
class Did:
    """A rank's part of a pool: the ``share`` of it that it computed, and its seconds for a mean micro-batch.

    ``part_s`` is NaN if it computed none.
    """

    share: float
    part_s: float


def sure_shares(num_parts: int, done: Sequence[Sequence[Did | None]], present: Sequence[bool]) -> tuple[int, ...]:
    """Each rank's sure share: nearly the least that it did in the last steps, and that it is fast enough for.

    ``done``: what each rank did, for each of the last steps; ``None`` if that is unknown. ``present``: whether each
    rank took part in the last step; if not, its share is empty. ``m`` is the number that a rank did in three of four
    steps (the smallest would leave more to be drawn for eight steps after each hiccup) or, if that is less, its part of
    the pool by speed: otherwise a slow rank that always has a share would never get a smaller one. Then
    ``m - max(1, m // 8)`` are sure, so that a rank which becomes slower is noticed. A rank that was held up in one of
    these steps has one less. Another may be slower by a quarter of a micro-batch than its number requires: no two ranks
    are equally fast, and each micro-batch that is left to be drawn costs a request. A rank that was never seen has half
    of an equal share.
    """
    by_speed = _speeds(done, len(present))
    total_speed = sum(own for own, here in zip(by_speed, present, strict=True) if here)
    shares = []
    for rank, here in enumerate(present):
        seen = sorted(own.share for step in done[-WINDOW:] if (own := step[rank]) is not None)
        if seen:
            usual = num_parts * seen[(len(seen) - 1) // 4]
            held_up = usual - num_parts * seen[0] >= _HELD_UP
            fast_enough_for = num_parts * by_speed[rank] / total_speed if total_speed else num_parts
            least = int(min(usual, fast_enough_for + (0 if held_up else _SLACK)) + 1e-6)
            sure = max(0, least - max(1, least // 8) - held_up)
        else:
            sure = num_parts // (2 * max(1, sum(present)))
        shares.append(sure if here else 0)
    if (total := sum(shares)) > num_parts:
        shares = [share * num_parts // total for share in shares]
    return tuple(shares)


def even_parts(num_parts: int, done: Sequence[Sequence[Did | None]], present: Sequence[bool]) -> list[float]:
    """How many of the micro-batches each rank would compute, by its speed, if all finished together."""
    speeds = [own if here else 0.0 for own, here in zip(_speeds(done, len(present)), present, strict=True)]
    total = sum(speeds)
    return [num_parts * own / total if total else num_parts / len(speeds) for own in speeds]


def _speeds(done: Sequence[Sequence[Did | None]], num_ranks: int) -> list[float]:
    """Each rank's median speed, in micro-batches a second; a rank of unknown speed gets the fastest's."""
    speeds = []
    for rank in range(num_ranks):
        seen = [own.part_s for step in done[-WINDOW:] if (own := step[rank]) is not None and own.part_s > 0]
        speeds.append(1 / median(seen) if seen else 0.0)
    fastest = max(speeds, default=0.0)
    return [own or fastest for own in speeds]


def static_shares(num_parts: int, present: Sequence[bool]) -> tuple[int, ...]:
    """The entire pool, dealt equally to the ranks that are present."""
    ranks = [rank for rank, here in enumerate(present) if here] or list(range(len(present)))
    each, more = divmod(num_parts, len(ranks))
    return tuple(each + (ranks.index(rank) < more) if rank in ranks else 0 for rank in range(len(present)))


def is_made_again(attempt: int, weight: float, given: Sequence[float]) -> bool:
    """Whether all ranks make a merged step again, because micro-batches of its pool are not in it.

    ``attempt``: of this step, from 1 on; 0: what is lost is lost. ``weight``: of the pool; ``given``: what was merged
    of it in each stage. Nobody is late in an attempt but the first: in those, something is lost only if members leave.
    """
    lost = min(given, default=0.0) < weight * (1 - _ROUNDING)
    return lost and 0 < attempt < MOST_ATTEMPTS


_MIN_STEPS = 3  # needed to know what is usual
_LONGER = 1.2  # times the usual step: after that a rank that has not entered is not waited for
_STUCK = 2.5  # usual micro-batches: after so long in one, a rank puts back what it has not begun
_SHORTEST_S = 0.01


@dataclass(frozen=True)
class PoolTimes:
    """How long work from a pool usually takes: if it takes longer, the stand-in steps in, at no loss.

    ``step_s``: seconds after the last merge, from which on no rank waits for one that has not entered the step.
    Such a rank has claimed nothing, so the others compute all of the pool. ``put_back_after_s``: seconds in one
    micro-batch after which a rank puts back what it has not begun. Infinite: never.
    """

    step_s: float = math.inf
    put_back_after_s: float = math.inf

    @classmethod
    def usual(cls, step_s: Sequence[float], part_s: Sequence[float]) -> PoolTimes:
        """The times that follow from the last steps' seconds and from this rank's seconds for a micro-batch in them."""
        return cls(
            _LONGER * median(step_s) if len(step_s) >= _MIN_STEPS else math.inf,
            max(_SHORTEST_S, _STUCK * median(part_s)) if len(part_s) >= _MIN_STEPS else math.inf,
        )


NEVER = PoolTimes()
