"""A rank's signs of life, which wait for no answer; and those of others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from straggle.members.view import View
from straggle.merge.store import peek

BEAT_S = 0.1
UNANSWERED_S = 5.0  # after which a rank that hears nothing from the store says nothing either: it could not be led
_NO_SIGN = "0 -1"  # of a member that has not been heard since the store was restarted


class Heartbeat:
    """Of one incarnation of a rank: a sign ten times a second, from `start` to `stop`; ``step()`` is told with it.

    On a thread and a connection of its own. A sign of life is a word that is written, and the store says nothing to it.
    So signs come as often on a link that is full or far, where an answer takes seconds, and a lost packet delays only
    what comes before it is sent again. Who asks the store something calls `answered`: without answers for 5 s a rank is
    silent, as its link is cut in one direction.
    """

    def __init__(
        self,
        rank: int,
        incarnation: str,
        connect: Callable[[], Any],
        step: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key = _key(rank, incarnation)
        self._connect, self._step, self._clock = connect, step, clock
        self._answered_at = clock()
        self._stopping = threading.Event()
        self._life = 0  # which of the threads beats: one that is stuck has a successor
        self.threads: list[threading.Thread] = []  # that may still be there

    def beat(self, store: Any) -> None:
        """Give a sign now, by this connection."""
        store.set(self._key, f"{time.monotonic()} {self._step()}")

    def start(self) -> None:
        """Begin."""
        self.answered()
        self._start()

    def answered(self) -> None:
        """The store has answered a request just now."""
        self._answered_at = self._clock()

    def connect_anew(self) -> None:
        """Go on with a new connection: the old one may be dead, which nothing tells who only writes."""
        self._life += 1
        self._start()

    def stop(self) -> None:
        """End the threads, and wait for none of them."""
        self._stopping.set()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, args=(self._life,), name="straggle-heartbeat", daemon=True)
        self.threads = [*(old for old in self.threads if old.is_alive()), thread]
        thread.start()

    def _run(self, life: int) -> None:
        store = None
        while not self._stopping.wait(BEAT_S) and self._life == life:
            if self._clock() - self._answered_at > UNANSWERED_S:
                continue
            try:
                store = store or self._connect()
                self.beat(store)
            except (RuntimeError, OSError):  # who watches says that the store is lost
                store = None
                self._stopping.wait(1.0)


def signs_of(store: Any, view: View, ranks: Sequence[int]) -> dict[int, str]:
    """The last signs of life of these members of a view."""
    return {rank: peek(store, _key(rank, view.members[rank])) or _NO_SIGN for rank in ranks}


def step_in(sign: str) -> int:
    """The step that its rank was in."""
    return int(sign.split(" ")[1])


def _key(rank: int, incarnation: str) -> str:
    return f"beat/{rank}/{incarnation}"
