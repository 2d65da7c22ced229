"""The workers of one replica: if one ends with an error, all of them end, and are started again together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from straggle.members.agents import DO_NOT_RESTART, WRONG_CONFIGURATION, Exited

_KILLED_S = 5.0  # a process that SIGKILL has not ended by then hangs in the kernel


def deciding(ends: Sequence[Exited]) -> Exited:
    """The end by which it is decided whether the workers of a replica are started again; ``ends`` in their order."""
    for code in (DO_NOT_RESTART, WRONG_CONFIGURATION):
        if of_that := [own for own in ends if own.code == code]:
            return of_that[0]
    return next((own for own in ends if own.code != 0), ends[0])


class Together:
    """The place at which the agents of one replica wait for each other, each on its own thread.

    ``grace_s``: from the first end with an error to SIGKILL for those that still run.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._kills: dict[int, Callable[[], None]] = {}
        self._met = threading.Condition()
        self._ends: dict[int, Exited] = {}  # of the processes that were started together last, in their order
        self._decided: dict[int, Exited] = {}  # by the number of the start
        self._stopping = False
        self._numbering = threading.Lock()
        self._first: int | None = None  # the number of their first start; under that lock

    @property
    def ranks(self) -> list[int]:
        """Those of the replica."""
        return sorted(self._kills)

    def add(self, rank: int, kill: Callable[[], None]) -> None:
        """An agent; ``kill()`` ends its process."""
        self._kills[rank] = kill

    def first_count(self, find: Callable[[Sequence[int]], int]) -> int:
        """The number of the first start of all of them: ``find(ranks)`` of the agent that asks first.

        By the time that another agent asks, the first may have announced its start already.
        """
        with self._numbering:
            if self._first is None:
                self._first = find(self.ranks)
            return self._first

    def stop(self) -> None:
        """The launcher ends all workers: wait for nothing."""
        with self._met:
            self._stopping = True
            self._met.notify_all()

    def ended(self, rank: int, exited: Exited) -> Exited:
        """Wait until all workers of the replica have ended; the end that decides what follows for all of them."""
        with self._met:
            # an agent that comes after its own was killed finds the decision of that start, and waits for nobody
            if exited.count not in self._decided:
                self._ends[rank] = exited
                self._met.notify_all()
                self._await_others(exited)
            return self._decided.get(exited.count, exited)

    def _await_others(self, exited: Exited) -> None:
        count = exited.count
        if not self._wait(count, self._grace_s if exited.code != 0 else None):
            for rank in self._kills.keys() - self._ends.keys():
                self._kills[rank]()
            self._wait(count, _KILLED_S)
        if not self._stopping and count not in self._decided:
            # one of the waiting agents decides for all; ends that come after it are of the next start
            self._decided, self._ends = {count: deciding([*self._ends.values()])}, {}
            self._met.notify_all()

    def _wait(self, count: int, limit_s: float | None) -> bool:
        """Until all have ended, or one of the waiting agents has decided; false if the time is over before."""
        return self._met.wait_for(
            lambda: self._stopping or count in self._decided or len(self._ends) == len(self._kills), limit_s
        )
