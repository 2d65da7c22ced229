"""Connections to the job's store: one for each thread that asks often, and others that are lent for a while."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Connections:
    """Keeps connections: ``connect()`` makes one, which takes seconds if a name server does not answer."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self.connect = connect
        self._own = threading.local()
        self._idle: list[Any] = []  # appending and popping are atomic

    def own(self) -> Any:
        """The calling thread's own connection."""
        if (store := getattr(self._own, "store", None)) is None:
            store = self._own.store = self.connect()
        return store

    def forget_own(self) -> None:
        """Drop the calling thread's own connection, which is broken; `own` makes another one."""
        self._own.store = None

    @contextlib.contextmanager
    def lent(self) -> Iterator[Any]:
        """A connection that no other thread uses meanwhile; it is dropped if the block raises."""
        try:
            store = self._idle.pop()
        except IndexError:
            store = self.connect()
        yield store
        self._idle.append(store)  # not in a `finally`: what has raised may be broken, or still be waited for

    def forget_idle(self) -> None:
        """Drop the connections that are not lent now: they are broken."""
        self._idle.clear()
