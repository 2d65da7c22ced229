"""A rank's signs of life, which wait for no answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

BEAT_S = 0.1
UNANSWERED_S = 5.0  # after which a rank that hears nothing from the store says nothing either: it could not be led


class Heartbeat:
    """Calls ``beat(store)`` ten times a second, on a thread and a connection of its own, from `start` to `stop`.

    A sign of life is a word that is written, and the store says nothing to it. So signs come as often on a link that is
    full or far, where an answer takes seconds, and a lost packet delays only what comes before it is sent again.
    Who asks the store something calls `answered`: without answers for 5 s a rank is silent, as its link is cut in one
    direction.
    """

    def __init__(self, connect: Callable[[], Any], beat: Callable[[Any], None]) -> None:
        self._connect, self._beat = connect, beat
        self._answered_at = time.monotonic()
        self._stopping = threading.Event()
        self._life = 0  # which of the threads beats: one that is stuck has a successor
        self.threads: list[threading.Thread] = []  # that may still be there

    def start(self) -> None:
        """Begin."""
        self.answered()
        self._start()

    def answered(self) -> None:
        """The store has answered a request just now."""
        self._answered_at = time.monotonic()

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
            if time.monotonic() - self._answered_at > UNANSWERED_S:
                continue
            try:
                store = store or self._connect()
                self._beat(store)
            except (RuntimeError, OSError):  # who watches says that the store is lost
                store = None
                self._stopping.wait(1.0)
