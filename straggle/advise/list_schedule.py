"""Steps whose micro-batches the ranks draw from one pool, by list scheduling: who computes how many, and until when.

What a rank asks, and what an answer gives it, is that of training: the pure functions of `straggle.pools.pool`. A
rank has an answer before it begins the last micro-batch that it knows of, as in `straggle.pools.pulling.Pulling`. One
that is in a micro-batch for too long puts back what it has not begun.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from straggle.pools.pool import (
    WINDOW,
    Claim,
    Count,
    Did,
    Drawer,
    Owner,
    Pool,
    PoolTimes,
    Release,
    Request,
    even_parts,
    static_shares,
    sure_shares,
)
from straggle.pools.pulling import AHEAD

REQUEST_S = 0.0008  # that a rank waits for the store in a step, as measured with four ranks on one machine


@dataclass(frozen=True)
class DrawnStep:
    """``ends_s``: for each rank, when each of its micro-batches ended; ``over_s``: when it had nothing left to do.

    Both in seconds from the step's begin.
    """

    ends_s: tuple[tuple[float, ...], ...]
    over_s: tuple[float, ...]

    @property
    def parts(self) -> tuple[int, ...]:
        """How many micro-batches each rank computed."""
        return tuple(map(len, self.ends_s))


def draw_step(
    pool: Pool,
    ahead: Sequence[float],
    entered_s: Sequence[float],
    part_s: Sequence[Sequence[float]],
    request_s: float = 0.0,
    put_back_after_s: Sequence[float] = (),
) -> DrawnStep:
    """The step of ranks that enter at ``entered_s``; ``part_s``: seconds of the micro-batches that a rank computes.

    A rank that computes more of them than it has times begins with these again. It asks for up to ``ahead``
    micro-batches while it computes, and waits for the answer to later ones, which takes ``request_s``. One that is in a
    micro-batch for longer than its ``put_back_after_s`` puts back what it has not begun, once; without these none does.
    """
    limits_s = put_back_after_s or [math.inf] * len(entered_s)
    each = zip(range(len(entered_s)), ahead, entered_s, part_s, limits_s, strict=True)
    ranks = [_Rank(pool, *own) for own in each]
    asking = [(rank.asks_at(request_s), rank.number) for rank in ranks if not rank.is_over]
    heapify(asking)
    store = _Store()
    while asking:
        at_s, number = heappop(asking)
        rank = ranks[number]
        if rank.ask(store):
            rank.go_on(at_s + request_s)
            at_s = rank.asks_at(request_s)
        else:
            at_s += request_s
        if not rank.is_over:
            heappush(asking, (at_s, number))
    return DrawnStep(tuple(tuple(rank.ends_s) for rank in ranks), tuple(rank.at_s for rank in ranks))


class _Store:
    """One step's counters, and who has which sure share."""

    def __init__(self) -> None:
        self._counts = Counter[int | None]()
        self._owners: dict[int, Owner] = {}

    def answer(self, request: Request) -> Owner | int:
        if isinstance(request, Count):
            self._counts[request.rank] += request.amount
            return self._counts[request.rank]
        if isinstance(request, Release):  # by who owns it
            self._owners[request.rank] = request.numbers
            return request.numbers
        assert isinstance(request, Claim)  # no rank leaves here
        return self._owners.setdefault(request.rank, request.owner)


class _Rank:
    """One rank's way through a step: it computes what it knows of but the last, and then needs an answer."""

    def __init__(
        self,
        pool: Pool,
        number: int,
        ahead: float,
        entered_s: float,
        part_s: Sequence[float],
        put_back_after_s: float = math.inf,
    ) -> None:
        self.number, self.at_s = number, entered_s
        self.ends_s: list[float] = []
        self.exhausted = not pool.drawn
        self._pool, self._ahead, self._part_s = pool, ahead, part_s
        self._put_back_after_s = put_back_after_s
        self._is_stuck = False
        self._drawer = Drawer.begin(pool, number)
        self._known = 0 if pool.drawn else len(pool.share(number))
        self._compute()

    @property
    def is_over(self) -> bool:
        """Whether it asks nothing more."""
        return self.exhausted and not self._is_stuck

    def asks_at(self, request_s: float) -> float:
        """When it asks: near the end of a pass, so that it does not wait, but beyond ``ahead`` not before that."""
        if self._is_stuck:
            return self.at_s + self._put_back_after_s
        is_computing = bool(self.ends_s) and self._known + 1 <= self._ahead
        return self.at_s - request_s * is_computing

    def ask(self, store: _Store) -> bool:
        """One request; whether the answer is one to go on with."""
        if self._is_stuck:
            return self._put_back(store)
        if (request := self._drawer.request(self._pool)) is None:
            self.exhausted = True
            return True
        self._drawer, parts = self._drawer.answered(self._pool, store.answer(request))
        self._known += len(parts)
        self.exhausted = self._drawer.request(self._pool) is None
        return bool(parts) or self.exhausted

    def go_on(self, answered_s: float) -> None:
        """With the answer, which came at ``answered_s``."""
        self.at_s = max(self.at_s, answered_s)
        self._compute()

    def _compute(self) -> None:
        while len(self.ends_s) < self._known - (not self.exhausted):
            part_s = self._part_s[len(self.ends_s) % len(self._part_s)]
            has_more = self._drawer.owns and self._known - len(self.ends_s) > 1
            if has_more and part_s > self._put_back_after_s:
                self._is_stuck = True
                return
            self._end(part_s)

    def _end(self, part_s: float) -> None:
        self.at_s += part_s
        self.ends_s.append(self.at_s)

    def _put_back(self, store: _Store) -> bool:
        """All but the micro-batch that it is in, to whose end it goes on."""
        unbegun = self._known - len(self.ends_s) - 1
        self._drawer = self._drawer.put_back(tuple(range(unbegun)))
        while self._drawer.puts_back and (request := self._drawer.request(self._pool)) is not None:
            self._drawer, _ = self._drawer.answered(self._pool, store.answer(request))
        self._end(self._part_s[len(self.ends_s) % len(self._part_s)])
        self._known, self.exhausted, self._is_stuck = len(self.ends_s), False, False
        return True


class Drawing:
    """Step after step, what the ranks draw: their sure shares follow from the steps before, as in training.

    ``num_parts``: micro-batches in the pool of a step. The first pool is dealt out equally.
    """

    def __init__(self, num_parts: int, num_ranks: int, request_s: float = REQUEST_S) -> None:
        self._num_parts, self._request_s = num_parts, request_s
        self._done: deque[tuple[Did | None, ...]] = deque(maxlen=WINDOW)
        self._present = (True,) * num_ranks

    def step(self, entered_s: Sequence[float], part_s: Sequence[Sequence[float]]) -> DrawnStep:
        """The next step (`draw_step`); `learn` what came of it before the one after it."""
        done = tuple(self._done)
        pool = Pool(self._num_parts, static_shares(self._num_parts, self._present), drawn=False)
        if done:
            pool = Pool(self._num_parts, sure_shares(self._num_parts, done, self._present))
        ahead = [own + AHEAD for own in even_parts(self._num_parts, done, self._present)]
        limits_s = [_put_back_after_s(own) for own in zip(*done, strict=True)]
        return draw_step(pool, ahead, entered_s, part_s, self._request_s, limits_s)

    def follow(self, entered_s: Sequence[float], part_s: Sequence[Sequence[float]]) -> DrawnStep:
        """The next step, in which all ranks are waited for."""
        drawn = self.step(entered_s, part_s)
        self.learn(drawn.parts, [end - begin for end, begin in zip(drawn.over_s, entered_s, strict=True)])
        return drawn

    def learn(self, parts: Sequence[int], own_s: Sequence[float], stood_in: Sequence[bool] = ()) -> None:
        """How many micro-batches each rank finished in how many seconds; of one that was stood in for, nothing."""
        away = stood_in or (False,) * len(parts)
        if not all(away):
            self._present = tuple(not own for own in away)
        did = zip(parts, own_s, self._present, strict=True)
        self._done.append(tuple(_did(num, s, self._num_parts) if here else None for num, s, here in did))


def _did(num_done: int, own_s: float, num_parts: int) -> Did:
    return Did(num_done / num_parts, own_s / num_done if num_done else math.nan)


def _put_back_after_s(done: Sequence[Did | None]) -> float:
    """Of one rank, from what it did in the last steps."""
    return PoolTimes.usual((), [did.part_s for did in done if did is not None and did.share]).put_back_after_s
