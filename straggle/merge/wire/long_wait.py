"""One rank's wait for a collective that is long: says for whom it waits, and when that is in vain."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from straggle import world
from straggle.merge.wire.patience import Awaited, Heard, Patience, judged
from straggle.merge.wire.store import StoreUnreachable

LONG_S = 2.0  # after so long in one thing a rank reports what it is doing, or which ranks it waits for
_LOOK_S = 0.5

_log = logging.getLogger(__name__)


class Peers(Protocol):
    """What a rank that waits asks of its peers. All raise `StoreUnreachable` if the store does not answer."""

    patience: Patience

    def note_waiting(self, key: str) -> int:
        """Note that this rank waits there; returns how many ranks have noted that, this one included."""

    def not_waiting(self, key: str, among: Sequence[int] | None) -> list[int]:
        """Those ranks ``among`` these, or of all that are needed, that have not noted that."""

    def places(self, ranks: Sequence[int], heard: Heard) -> list[Awaited]:
        """Where these are."""

    def waited_for(self, awaited: Sequence[Awaited]) -> str:
        """These in words, with what they report to be doing."""


class LongWait:
    """A wait at ``key`` for ``what``. Of all ranks that wait there, the first says for whom, now and then.

    Each of them finds by itself when to give up. The store is asked for that now and then, about those ranks only that
    have not come, and not long before it could be time.
    """

    def __init__(self, peers: Peers, key: str, what: str, clock: Callable[[], float] = world.clock) -> None:
        self._peers, self._key, self._what, self._clock = peers, key, what, clock
        self._heard = Heard(peers.patience.silent_s, clock)
        self._began_at = clock()
        self._next_s = min(LONG_S, peers.patience.give_up_s)
        self._names: bool | None = None  # whether this rank is the one that says it; `None`: not asked yet
        self._named_s = 0.0
        self._absent: list[int] | None = None

    def look(self) -> str:
        """Note that the collective is not over; why it is given up, if it is."""
        waited_s = self._clock() - self._began_at
        if waited_s < self._next_s:
            return ""
        self._next_s = waited_s + _LOOK_S
        patience = self._peers.patience
        try:
            return self._judge(waited_s)
        except StoreUnreachable:  # then the awaited ranks are unknown, and none is known to be alive
            return judged((), waited_s, patience)[1]

    def _judge(self, waited_s: float) -> str:
        peers, patience = self._peers, self._peers.patience
        if self._names is None:
            self._names = peers.note_waiting(self._key) == 1
        if not self._names and waited_s < patience.give_up_s - 2 * patience.silent_s:
            return ""
        self._absent = peers.not_waiting(self._key, self._absent)
        awaited = peers.places(self._absent, self._heard)
        then, why = judged(awaited, waited_s, patience, self._named_s)
        if then == "name" and self._names:
            self._named_s = waited_s
            _log.warning("%s: waiting for %s", self._what, peers.waited_for(awaited))
        return why
