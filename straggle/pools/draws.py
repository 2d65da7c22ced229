"""One rank's draws in one step: asked for by the store's thread while the device computes.

Two steps share the key of a counter, one in its lower half and one in its upper half. A key is removed when its steps
are long over, by who began it. A sure share has one key for the entire job, whose value says the step.

What a rank has drawn and not begun is put back by its stand-in, where its training thread is stuck: both threads meet
here, and the lock of the merge guards what they share.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from straggle.merge.store import Asked, JobStore, StoreUnreachable
from straggle.pools.pool import Claim, Count, Drawer, Owner, Pool, Release, Request, Seize

_NO_OWNER = "-"
_HALF = 32  # bits of a counter
_KEPT_STEPS = 32  # a counter stays so long for ranks that are behind
_log = logging.getLogger(__name__)


class StoreCounters:
    """The counters and owners of all steps, as the store's thread asks for them; it alone uses this."""

    def __init__(self, rank: int) -> None:
        self._begun: deque[tuple[int, str]] = deque()  # counters that this rank began
        self._last = {rank: ""}  # what the key of a share was when it was seen last
        self.num_requests = self.num_put_back = 0

    def ask(self, store: Any, step: int, request: Request) -> Owner | int:
        """The answer, as if each step had keys of its own."""
        return self._count(store, step, request) if isinstance(request, Count) else self._owner(store, step, request)

    def _count(self, store: Any, step: int, request: Count) -> int:
        steps, place = divmod(step, 2)
        key = f"pool/{steps}/drawn" if request.rank is None else f"pool/{steps}/taken/{request.rank}"
        self.num_requests += 1
        amount = request.amount << _HALF * place
        value = int(store.add(key, amount))
        if value == amount:
            self._begun.append((step, key))
            while self._begun[0][0] <= step - _KEPT_STEPS:
                self.num_requests += 1
                store.delete_key(self._begun.popleft()[1])
        return value >> _HALF * place & ((1 << _HALF) - 1)

    def _owner(self, store: Any, step: int, request: Claim | Release | Seize) -> Owner:
        """A share's owner in a later step is none in this one, which is merged by then."""
        key = f"pool/owner/{request.rank}"
        found = f"{step} own" if isinstance(request, Release) else self._last.get(request.rank, "")
        while True:
            # nothing equals an expected value that none has: then it is only read
            expected = found if _is_free(found, step, request) else _NO_OWNER
            self.num_requests += 1
            found = store.compare_set(key, expected, f"{step} {_word(request)}").decode()
            of_step, _, word = found.partition(" ")
            if found and int(of_step) > step:
                self._last[request.rank] = found
                return "own" if not isinstance(request, Claim) or request.owner == "open" else "open"
            if not _is_free(found, step, request):
                self._last[request.rank] = found
                return _owner(word)


def _is_free(found: str, step: int, request: Claim | Release | Seize) -> bool:
    """Whether this owner gives way to what is requested."""
    of_step, _, word = found.partition(" ")
    if not found or int(of_step) < step:
        return True
    return int(of_step) == step and word == "own" and not isinstance(request, Claim)


def _word(request: Claim | Release | Seize) -> str:
    match request:
        case Claim(_, owner):
            return owner
        case Release(_, numbers):
            return ",".join(map(str, numbers))
        case Seize():
            return "open"


def _owner(word: str) -> Owner:
    return cast(Owner, word) if word in ("own", "open") else tuple(map(int, word.split(",")))


class Draws:
    """The numbers of the micro-batches that this rank computes in ``step``, on its training thread.

    ``exhausted``: there are no more than those that it has. ``num_put_back`` of them it has put back.
    ``waited_s``: seconds that it waited for answers.
    ``lock``: that of the merge, with which `put_back` is called by another thread.
    """

    def __init__(
        self, pool: Pool, rank: int, step: int, store: JobStore, counters: StoreCounters, lock: threading.Lock
    ) -> None:
        self.numbers: list[int] = []
        self.exhausted = not pool.drawn
        self.num_put_back = 0
        self.waited_s = 0.0
        self._pool, self._rank, self._step = pool, rank, step
        self._store, self._counters, self._lock = store, counters, lock
        self._drawer = Drawer.begin(pool, rank)  # by the store's thread
        self._asked: Asked[Sequence[int]] | None = None
        self._asked_before = False  # the last question is older than what was put back
        self._is_back = False  # something was put back, and that is once a step
        self._gone = frozenset[int]()
        if pool.drawn:
            self.ask()
        else:
            self.numbers += pool.share(rank)

    @property
    def may_put_back(self) -> bool:
        """Whether `put_back` can be called."""
        return self._drawer.owns and not self._is_back and self._store.reachable

    def ask(self) -> None:
        """Ask for more, and do not wait for it; once at a time."""
        if self.exhausted or self._asked is not None:
            return
        try:
            with self._lock:  # before or after what is put back, and it is known which
                self._asked, self._asked_before = self._store.begin(self._refill), False
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
            with self._lock:
                self.numbers += more
                # which no thread writes now, if nothing was put back meanwhile; if so, that is there to be drawn
                nothing_left = not more or self._drawer.request(self._pool) is None
                self.exhausted = nothing_left and not self._asked_before
        self.waited_s += time.monotonic() - began_at

    def left(self, gone: frozenset[int]) -> None:
        """These members have left: draw what they had for sure, if this rank still draws."""
        if gone != self._gone and not self.exhausted:
            self._gone = gone
            self._store.post(partial(self._change, lambda drawer: drawer.without(gone)))

    def put_back(self, num_begun: int) -> None:
        """Give all but the first ones to whoever draws them. With the lock held, where `may_put_back`."""
        # more may have come since the training thread looked last
        numbers = tuple(self.numbers[num_begun:])
        del self.numbers[num_begun:]
        self.num_put_back += len(numbers)
        self._is_back = self._asked_before = True
        self.exhausted = False
        # queued with the lock held: what the training thread asks from here on comes after it
        self._store.post(partial(self._change, lambda drawer: drawer.put_back(numbers)))

    def _give_up(self, error: StoreUnreachable) -> None:
        # what is on its way may be drawn for this rank, and is then computed by none: that is counted
        self.exhausted = True
        _log.warning("rank %d, step %d: no more micro-batches are drawn: %s", self._rank, self._step, error)

    # -- on the store's thread

    def _refill(self, store: Any) -> Sequence[int]:
        """Ask until there is something, or nothing more."""
        while (request := self._drawer.request(self._pool)) is not None:
            self._drawer, parts = self._drawer.answered(self._pool, self._counters.ask(store, self._step, request))
            if parts:
                return parts
        return ()

    def _change(self, changed: Callable[[Drawer], Drawer], store: Any) -> None:
        self._drawer = changed(self._drawer)
        while self._drawer.puts_back and (request := self._drawer.request(self._pool)) is not None:
            self._drawer, _ = self._drawer.answered(self._pool, self._counters.ask(store, self._step, request))
            if not self._drawer.puts_back:
                self._counters.num_put_back += len(self._drawer.numbers)
