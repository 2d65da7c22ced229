"""Which ranks have not wrapped the model yet, while the others wait for them."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence

from straggle import world
from straggle.merge.wire.groups import job_size
from straggle.merge.wire.launcher_words import down, post_needs_all, will_not_come
from straggle.merge.wire.store import default_store
from straggle.waits import NowAndThen, until

LONG_ARRIVAL_S = 4.0  # after so long the wait is reported
_LOOK_S = 0.5  # between two questions whether all may come
_SHORTEST_S, _LONGEST_S = 0.001, 0.05  # between two whether they have
_ALL = "all"
_num_wrapped = world.OfProcess(Counter[tuple[int, ...]])  # models that these ranks have wrapped together

_log = logging.getLogger(__name__)


class LongArrival:
    """Rank ``own``'s wait for ``ranks``; if it is long, one rank logs once which of them have not come."""

    def __init__(self, own: int, ranks: Sequence[int]) -> None:
        self._own, self._ranks = own, ranks
        self._began_at, self._is_over = world.monotonic(), False

    def look(self, missing: Callable[[], Sequence[int]]) -> None:
        """Note that some have not come; ``missing()`` finds which ones, and is called once."""
        if self._is_over or world.monotonic() - self._began_at < LONG_ARRIVAL_S:
            return
        self._is_over, late = True, list(missing())
        if late and self._own == min({*self._ranks} - {*late}, default=-1):
            _log.warning("rank %d: waiting for ranks %s, which have not wrapped the model yet", self._own, late)


def why_not_all(ranks: Sequence[int], own: int, limit_s: float) -> str:
    """Announce in the job's store that rank ``own`` has come, and wait for all ``ranks``; nothing once they are there.

    Else which have not come, and why they will not, if a launcher says so, or that the limit is over.
    """
    _num_wrapped.here[of_ranks := tuple(ranks)] += 1
    digest = hashlib.sha1(str(of_ranks).encode()).hexdigest()
    store = world.dist.PrefixStore(f"straggle/come/{digest}/{_start()}{_num_wrapped.here[of_ranks]}", default_store())  # type: ignore[attr-defined]
    if len(ranks) == job_size():
        post_needs_all(store)
    store.set(str(own), "")
    store.add("number", 1)
    wait, looks = LongArrival(own, ranks), NowAndThen(_LOOK_S)

    def missing() -> list[int]:
        return [rank for rank in ranks if not store.check([str(rank)])]

    def known() -> str:
        if store.add("number", 0) >= len(ranks) and not down(store, ranks):
            return _ALL
        wait.look(missing)
        return will_not_come(store, ranks, missing(), own_start()) if looks.is_due() else ""

    why = until(known, every_s=_SHORTEST_S, most_s=_LONGEST_S, limit_s=limit_s)
    return "" if why == _ALL else why or f"ranks {missing()} have not come"


def _start() -> str:
    """Under `straggle launch`, whose store outlives a process: that an earlier one of this rank has come is no word."""
    return f"start {own_start()}/" if "STRAGGLE_ELASTIC" in os.environ else ""


def own_start() -> int:
    """The number of this process among those of its rank, as its launcher counts them."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
