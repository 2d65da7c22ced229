"""The world in which ranks run, real or simulated: all that waits or tells time asks this module.

The real one hands on to `time`, `threading`, `queue`, `concurrent.futures` and `torch.distributed`. A simulated one
(`straggle.lab.world`) puts its own in the same places by `enter`: ranks are threads of one process then, of which one
runs at a time, in virtual time and in an order drawn from a seed. So nothing may keep one of these at import: write
``world.sleep(...)``, and ``clock=world.clock`` as a default.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from queue import SimpleQueue as SimpleQueue
from typing import Any, ClassVar, Generic, TypeVar

import torch.distributed as dist

monotonic = time.monotonic
sleep = time.sleep
Lock = threading.Lock
Condition = threading.Condition
Event = threading.Event
Thread = threading.Thread
Future = futures.Future
Executor = futures.ThreadPoolExecutor
finalize = weakref.finalize
has_sockets = True  # to measure links by

__all__ = [
    "Condition",
    "Event",
    "Executor",
    "Future",
    "Lock",
    "OfProcess",
    "SimpleQueue",
    "Thread",
    "dist",
    "finalize",
    "monotonic",
    "sleep",
]

Own = TypeVar("Own")


def clock() -> float:
    """Seconds, by the clock of the world as it is when this is called."""
    return monotonic()


def end_process(status: int) -> None:
    """End this process at once."""
    os._exit(status)


def pause(seconds: float) -> None:
    """Sleep so long, in the world as it is when this is called."""
    sleep(seconds)


def process() -> Hashable:
    """In which process the caller is: in a simulated world each rank is one."""
    return os.getpid()


def in_this_process(call: Callable[..., None]) -> Callable[..., None]:
    """``call``, which does nothing in a process forked from this one: a child that saves and ends is no rank."""
    own = process()

    def unless_forked(*args: Any) -> None:
        if process() == own:
            call(*args)

    return unless_forked


class OfProcess(Generic[Own]):
    """What there is once in a process, made by ``make()`` when it is first asked for."""

    all_of_them: ClassVar[list[OfProcess[Any]]] = []

    def __init__(self, make: Callable[[], Own]) -> None:
        self._make = make
        self._made: dict[Hashable, Own] = {}
        self.all_of_them.append(self)

    @property
    def here(self) -> Own:
        """That of the caller's process."""
        if (own := process()) not in self._made:
            self._made[own] = self._make()
        return self._made[own]

    def forget_others(self) -> None:
        """Keep that of the caller's process only."""
        self._made = {own: made for own, made in self._made.items() if own == process()}


@contextmanager
def enter(others: Mapping[str, Any]) -> Iterator[None]:
    """In this block, these stand in the places of the real ones of the same names, for all threads of the process."""
    places = globals()
    real = {name: places[name] for name in others}
    places.update(others)
    try:
        yield
    finally:
        places.update(real)
        for own in OfProcess.all_of_them:
            own.forget_others()
