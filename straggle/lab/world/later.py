"""What is to happen later in a world: at a time, or after some turns of a rank's threads."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Later:
    """Calls that are to be made between two threads' turns; by whichever thread chooses the next one."""

    def __init__(self) -> None:
        self._timed: list[tuple[float, int, Callable[[], None]]] = []  # a heap, numbered: equal times keep their order
        self._num_timed = 0
        self._counted: list[tuple[int, int, Callable[[], None]]] = []  # ranks, how many of their turns, and what then

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call it at this time."""
        self._num_timed += 1
        heapq.heappush(self._timed, (when, self._num_timed, call))

    def after_turns(self, rank: int, number: int, call: Callable[[], None]) -> None:
        """Call it after so many turns of this rank's threads; with 0 at once."""
        if number:
            self._counted.append((rank, number, call))
        else:
            call()

    @property
    def next_at(self) -> float | None:
        """When the next one is due by the time; ``None``: there is none."""
        return self._timed[0][0] if self._timed else None

    def let_come(self, now: float) -> None:
        """Make the calls that are due."""
        while self._timed and self._timed[0][0] <= now:
            heapq.heappop(self._timed)[2]()

    def turn_is_over(self, rank: int) -> None:
        """One of this rank's threads had its turn; -1: of none."""
        if not self._counted:
            return
        counted, self._counted = [(own, left - (own == rank), call) for own, left, call in self._counted], []
        for own, left, call in counted:
            self.after_turns(own, left, call)
