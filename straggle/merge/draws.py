"""One rank's draws in one step: asked for by the store's thread while the device computes.

A key for each counter and step is removed when its step is long over, by who began it. A sure share has one key for the
entire job, whose value says the step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from straggle.merge.pool import Claim, Count, Drawer, Owner, Pool
from straggle.merge.store import Asked, JobStore, StoreUnreachable

_KEPT_STEPS = 32  # a counter stays so long for ranks that are behind
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drawn:
    """What a rank has of its step's pool so far: ``numbers`` of micro-batches, each with its weight in ``weights``.

    ``is_open``: there may be more. ``num_parts`` and ``total_weight`` are those of the entire pool, and a micro-batch
    counts ``scale * weight`` in the merge, so that the sum over all ranks is the number of ranks.
    """

    numbers: tuple[int, ...]
    weights: tuple[float, ...]
    is_open: bool
    num_parts: int
    total_weight: float
    scale: float

    @cached_property
    def weight(self) -> float:
        """The sum of the weights."""
        return sum(self.weights)

    def share(self, num_passes: int) -> float:
        """Which share of its weight the first ``num_passes`` are."""
        return min(1.0, sum(self.weights[:num_passes]) / self.weight) if self.weight else 0.0


class StoreCounters:
    """The counters and owners of all steps, as the store's thread asks for them; it alone uses this."""

    def __init__(self, rank: int) -> None:
        self._begun: deque[tuple[int, str]] = deque()  # counters that this rank began
        self._last = {rank: ""}  # what the key of a share was when it was seen last
        self.num_requests = 0

    def ask(self, store: Any, step: int, request: Claim | Count) -> Owner | int:
        """The answer, as if each step had keys of its own."""
        return self._claim(store, step, request) if isinstance(request, Claim) else self._count(store, step, request)

    def _count(self, store: Any, step: int, request: Count) -> int:
        key = f"pool/{step}/drawn" if request.rank is None else f"pool/{step}/taken/{request.rank}"
        self.num_requests += 1
        value = int(store.add(key, request.amount))
        if value == request.amount:
            self._begun.append((step, key))
            while self._begun[0][0] <= step - _KEPT_STEPS:
                self.num_requests += 1
                store.delete_key(self._begun.popleft()[1])
        return value

    def _claim(self, store: Any, step: int, request: Claim) -> Owner:
        """A share's owner in a later step is none in this one, which is merged by then."""
        key, wanted = f"pool/owner/{request.rank}", f"{step} {request.owner}"
        expected = self._last.get(request.rank, "")
        while True:
            self.num_requests += 1
            found = store.compare_set(key, expected, wanted).decode()
            of_step, _, owner = found.partition(" ")
            if found and int(of_step) >= step:
                self._last[request.rank] = found
                return cast(Owner, owner) if int(of_step) == step else _other(request.owner)
            expected = found


def _other(owner: Owner) -> Owner:
    return "own" if owner == "open" else "open"


class Draws:
    """The numbers of the micro-batches that this rank computes in ``step``, on its training thread.

    ``exhausted``: there are no more than those that it has. ``waited_s``: seconds that it waited for answers.
    """

    def __init__(self, pool: Pool, rank: int, step: int, store: JobStore, counters: StoreCounters) -> None:
        self.numbers: list[int] = []
        self.exhausted = not pool.drawn
        self.waited_s = 0.0
        self._pool, self._rank, self._step = pool, rank, step
        self._store, self._counters = store, counters
        self._drawer = Drawer.begin(pool, rank)  # by the store's thread
        self._asked: Asked[Sequence[int]] | None = None
        if pool.drawn:
            self.ask()
        else:
            self.numbers += pool.share(rank)

    def ask(self) -> None:
        """Ask for more, and do not wait for it; once at a time."""
        if self.exhausted or self._asked is not None:
            return
        try:
            self._asked = self._store.begin(self._refill)
        except StoreUnreachable as error:
            self._give_up(error)

    def wait(self) -> None:
        """Until there are more, or it is known that there are none."""
        self.ask()
        if self._asked is None:
            return
        began_at, asked, self._asked = time.monotonic(), self._asked, None
        try:
            more = asked.answer()
        except StoreUnreachable as error:
            self._give_up(error)
        else:
            self.numbers += more
            self.exhausted = not more or self._drawer.request(self._pool) is None  # which no thread writes now
        self.waited_s += time.monotonic() - began_at

    def _give_up(self, error: StoreUnreachable) -> None:
        # what is on its way may be drawn for this rank, and is then computed by none: that is counted
        self.exhausted = True
        _log.warning("rank %d, step %d: no more micro-batches are drawn: %s", self._rank, self._step, error)

    def _refill(self, store: Any) -> Sequence[int]:
        """On the store's thread: ask until there is something, or nothing more."""
        while (request := self._drawer.request(self._pool)) is not None:
            self._drawer, parts = self._drawer.answered(self._pool, self._counters.ask(store, self._step, request))
            if parts:
                return parts
        return ()
