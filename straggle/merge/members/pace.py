"""How fast a state travels to a newcomer: gradients go first."""

from __future__ import annotations

import time
from collections.abc import Callable

_LET_PASS = 6.0  # while gradients are merged and slow the state down, it travels for at least a seventh of the time
_IN_TURNS = 1.0  # while they are merged, and do not: on another link, or waiting for a rank
_SLOWED = 0.8  # of the best rate so far
_LONGEST_S = 5.0  # the newcomer waits for a minute for a chunk


class Pace:
    """The pauses between the chunks of a state for one newcomer: it shares the network with the gradients of steps.

    ``is_merging()``: whether gradients are on their way now; ``presses()``: whether as many steps have been merged as
    are to wait in the newcomer's memory.
    """

    def __init__(
        self,
        is_merging: Callable[[], bool],
        presses: Callable[[], bool],
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._is_merging, self._presses = is_merging, presses
        self._now, self._sleep = now, sleep
        self._best = 0.0  # bytes a second

    def pause(self, num_bytes: int, sent_s: float) -> None:
        """After a chunk that took ``sent_s``: wait for a gap between gradients, but not for long.

        At most six times ``sent_s``, and where the chunk was not slowed down, once. Where the two share a link fairly,
        the chunk has kept the gradients for half of its time: a merge takes up to a thirteenth longer.
        """
        rate = num_bytes / max(sent_s, 1e-6)
        self._best = max(self._best, rate)
        most = _LET_PASS if rate < _SLOWED * self._best else _IN_TURNS
        until = self._now() + min(most * sent_s, _LONGEST_S)
        while self._is_merging() and not self._presses() and self._now() < until:
            self._sleep(0.001)
