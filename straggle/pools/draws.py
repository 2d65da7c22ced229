"""One rank's draws in one step: the store's thread requests them while the device computes.

Two steps share the key of a counter, one in its lower half and one in its upper half. The rank that began a key removes
it when its steps are long over. A sure share has one key for the entire job, whose value has the step.

If a rank's training thread is stuck, its stand-in puts back what the rank has drawn and not begun: both threads meet
here, and the lock of the merge guards what they share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from straggle import world
from straggle.merge.wire.store import Asked, JobStore, StoreUnreachable
from straggle.pools.pool import Claim, Count, Drawer, Owner, Pool, Release, Request, Seize

_NO_OWNER = "-"
_HALF = 32  # bits of a counter
_KEPT_STEPS = 32  # for so many steps a counter is kept for ranks that are behind
_log = logging.getLogger(__name__)


class StoreCounters:
    """The counters and owners of all steps; used by the thread of the store's connection.

    If the store was lost there may be two of them for a moment: an old request's answer comes beside a new one's.
    """

    def __init__(self, rank: int) -> None:
        self._begun: list[tuple[int, str]] = []  # counters that this rank began
        self._last = {rank: ""}  # by rank, the last seen value of its share's key
        self.num_requests = self.num_put_back = 0
        self._lock = world.Lock()  # never held while the store is asked

    def put_back(self, number: int) -> None:
        """So many micro-batches are back."""
        self.num_put_back += number

    def ask(self, store: Any, step: int, request: Request) -> Owner | int:
        """Send a request and return its answer, as if each step had keys of its own."""
        return self._count(store, step, request) if isinstance(request, Count) else self._owner(store, step, request)

    def _count(self, store: Any, step: int, request: Count) -> int:
        steps, place = divmod(step, 2)
        key = f"pool/{steps}/drawn" if request.rank is None else f"pool/{steps}/taken/{request.rank}"
        self.num_requests += 1
        amount = request.amount << _HALF * place
        value = int(store.add(key, amount))
        if value == amount:
            for old in self._begins(step, key):
                self.num_requests += 1
                store.delete_key(old)
        return value >> _HALF * place & ((1 << _HALF) - 1)

    def _begins(self, step: int, key: str) -> list[str]:
        """Note a counter that this rank began; those that are to be removed, each told to one thread only."""
        with self._lock:
            self._begun.append((step, key))
            old = [each for each in self._begun if each[0] <= step - _KEPT_STEPS]
            self._begun = [each for each in self._begun if each not in old]
            return [key for _, key in old]

    def _owner(self, store: Any, step: int, request: Claim | Release | Seize) -> Owner:
        """Claim, release or seize a share. An owner from a later step counts as none: this step is merged by then."""
        key = f"pool/owner/{request.rank}"
        found = f"{step} own" if isinstance(request, Release) else self._last.get(request.rank, "")
        while True:
            # no key has this expected value, so this only reads
            expected = found if _is_free(found, step, request) else _NO_OWNER
            self.num_requests += 1
            found = store.compare_set(key, expected, f"{step} {_word(request)}").decode()
            if expected and found == expected:  # there is no such key any more: the store was started again, empty
                found = ""
                continue
            of_step, _, word = found.partition(" ")
            if found and int(of_step) > step:
                self._last[request.rank] = found
                return "own" if not isinstance(request, Claim) or request.owner == "open" else "open"
            if not _is_free(found, step, request):
                self._last[request.rank] = found
                return _owner(word)


def _is_free(found: str, step: int, request: Claim | Release | Seize) -> bool:
    """Whether a share with this owner may be changed as requested."""
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

    ``exhausted``: no more can be drawn. ``num_put_back``: how many the rank has put back.
    ``waited_s``: seconds of waiting for answers.
    ``lock``: that of the merge; another thread calls `put_back` with it held.
    """

    def __init__(
        self, pool: Pool, rank: int, step: int, store: JobStore, counters: StoreCounters, lock: world.Lock
    ) -> None:
        self.numbers: list[int] = []
        self.exhausted = not pool.drawn
        self.num_put_back = 0
        self.waited_s = 0.0
        self._pool, self._rank, self._step = pool, rank, step
        self._store, self._counters, self._lock = store, counters, lock
        self._drawer = Drawer.begin(pool, rank)  # written by the store's thread
        self._asked: Asked[Sequence[int]] | None = None
        self._asked_before = False  # the last request was made before something was put back
        self._is_back = False  # something was put back, which happens at most once a step
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
        """Request more without waiting; one request at a time."""
        if self.exhausted or self._asked is not None:
            return
        try:
            with self._lock:  # so that the request is clearly before or after a `put_back`
                self._asked, self._asked_before = self._store.begin(self._refill), False
        except StoreUnreachable as error:
            self._give_up(error)

    def wait(self) -> None:
        """Wait until there are more, or until it is known that there are none."""
        self.ask()
        if self._asked is None:
            return
        began_at, asked, self._asked = world.monotonic(), self._asked, None
        try:
            more = asked.answer()
        except StoreUnreachable as error:
            self._give_up(error)
        else:
            with self._lock:  # `put_back` takes numbers away on another thread
                self.numbers += more
                # no thread writes it now, unless something was put back meanwhile, which can then be drawn
                nothing_left = not more or self._drawer.request(self._pool) is None
                self.exhausted = nothing_left and not self._asked_before
        self.waited_s += world.monotonic() - began_at

    def look(self) -> None:
        """Take the answer to the last request if it is there."""
        if self._asked is not None and self._asked.is_there:
            self.wait()

    def left(self, gone: frozenset[int]) -> None:
        """These members have left: open their sure shares, if this rank still draws."""
        if gone != self._gone and not self.exhausted:
            self._gone = gone
            self._store.post(partial(self._change, lambda drawer: drawer.without(gone)))

    def put_back(self, num_begun: int) -> None:
        """Put back all but the first ``num_begun``. Call it with the lock held, if `may_put_back`."""
        # more may have come since the training thread last looked
        numbers = tuple(self.numbers[num_begun:])
        del self.numbers[num_begun:]
        self.num_put_back += len(numbers)
        self._is_back = self._asked_before = True
        self.exhausted = False
        # queued with the lock held, so that later requests of the training thread come after it
        self._store.post(partial(self._change, lambda drawer: drawer.put_back(numbers)))

    def _give_up(self, error: StoreUnreachable) -> None:
        # a request in flight may still draw for this rank; no rank computes that, and it is counted
        self.exhausted = True
        _log.warning("rank %d, step %d: no more micro-batches are drawn: %s", self._rank, self._step, error)

    # -- on the store's thread

    def _refill(self, store: Any) -> Sequence[int]:
        """Send requests until one gives micro-batches, or nothing is left."""
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
                self._counters.put_back(len(self._drawer.numbers))
