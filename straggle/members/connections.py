"""Connections to the job's store: one for each thread that keeps asking, and others that are lent for a while."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Connections:
    """``connect()`` makes one, which takes seconds where a name server does not answer: they are kept."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self.connect = connect
        self._own = threading.local()
        self._idle: list[Any] = []  # appending and popping are atomic

    def own(self) -> Any:
        """This thread's own."""
        if (store := getattr(self._own, "store", None)) is None:
            store = self._own.store = self.connect()
        return store

    def forget_own(self) -> None:
        """This thread's own is broken: it makes another when it needs one."""
        self._own.store = None

    @contextlib.contextmanager
    def lent(self) -> Iterator[Any]:
        """One that no other thread uses meanwhile, and that is not kept where an error ends this."""
        try:
            store = self._idle.pop()
        except IndexError:
            store = self.connect()
        yield store
        self._idle.append(store)

    def forget_idle(self) -> None:
        """Those that are not lent now are broken."""
        self._idle.clear()
