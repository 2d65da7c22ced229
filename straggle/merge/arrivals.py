"""Which ranks have not wrapped the model yet, while the others wait for them."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from straggle.merge.store import connect, default_store

LONG_ARRIVAL_S = 4.0  # after so long the wait is reported
_num_wrapped = Counter[tuple[int, ...]]()  # models that these ranks have wrapped together in this process

_log = logging.getLogger(__name__)


class LongArrival:
    """Rank ``own``'s wait for ``ranks``; if it is long, one rank logs once which of them have not come."""

    def __init__(self, own: int, ranks: Sequence[int]) -> None:
        self._own, self._ranks = own, ranks
        self._began_at, self._is_over = time.monotonic(), False

    def look(self, missing: Callable[[], Sequence[int]]) -> None:
        """Note that some have not come; ``missing()`` finds which ones, and is called once."""
        if self._is_over or time.monotonic() - self._began_at < LONG_ARRIVAL_S:
            return
        self._is_over, late = True, list(missing())
        if late and self._own == min({*self._ranks} - {*late}, default=-1):
            _log.warning("rank %d: waiting for ranks %s, which have not wrapped the model yet", self._own, late)


@contextlib.contextmanager
def reported(ranks: Sequence[int], own: int) -> Iterator[None]:
    """A block in which rank ``own`` waits for all ``ranks``: each announces that it has come, in the job's store."""
    _num_wrapped[of_ranks := tuple(ranks)] += 1
    corner = f"straggle/come/{hashlib.sha1(str(of_ranks).encode()).hexdigest()}/{_num_wrapped[of_ranks]}"
    store, over = default_store(), threading.Event()
    store.set(f"{corner}/{own}", "")
    threading.Thread(
        target=_report, args=(store, corner, ranks, own, over), name="straggle-arrivals", daemon=True
    ).start()
    try:
        yield
    finally:
        over.set()


def _report(store: Any, corner: str, ranks: Sequence[int], own: int, over: threading.Event) -> None:
    wait = LongArrival(own, ranks)
    if over.wait(LONG_ARRIVAL_S):
        return
    with contextlib.suppress(RuntimeError, OSError):
        connection = connect(store, corner)  # the caller's may be in a request that waits
        wait.look(lambda: [rank for rank in ranks if not connection.check([str(rank)])])
