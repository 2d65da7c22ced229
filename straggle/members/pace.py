"""How fast a state travels to a newcomer: gradients go first."""

from __future__ import annotations

import time
from collections.abc import Callable

_LET_PASS = 6.0  # while gradients are merged and slow the state down, it travels for at least a seventh of the time
_IN_TURNS = 1.0  # while they are merged, and do not: on another link, or waiting for a rank
_SLOWED = 0.8  # of the best rate so far
_LONGEST_S = 5.0  # the newcomer waits for a minute for a chunk
_REST = 4.0  # it travels for a fifth of the time, so that no step of its peers is much longer,
_RESTS_S = 0.5  # until it has rested for so long


class Pace:
    """The pauses between the chunks of a state for one newcomer: it shares cores and the network with the steps.

    ``is_merging()``: whether gradients are on their way now; ``presses()``: whether as many steps have been merged as
    are to wait in the newcomer's memory; ``rests_s``: the seconds in all for which it may rest though no gradients are
    on their way.
    """

    def __init__(
        self,
        is_merging: Callable[[], bool],
        presses: Callable[[], bool],
        *,
        rests_s: float = _RESTS_S,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._is_merging, self._presses, self._rests_s = is_merging, presses, rests_s
        self._now, self._sleep = now, sleep
        self._best = 0.0  # bytes a second

    def pause(self, num_bytes: int, sent_s: float) -> None:
        """After a chunk that took ``sent_s``: rest, and wait for a gap between gradients, but not for long.

        The rest is four times ``sent_s``, as long as there is any left. For a gap it waits at most six times
        ``sent_s``, and where the chunk was not slowed down, once. Where the two share a link fairly, the chunk has kept
        the gradients for half of its time: a merge takes up to a thirteenth longer.
        """
        rate = num_bytes / max(sent_s, 1e-6)
        self._best = max(self._best, rate)
        most = _LET_PASS if rate < _SLOWED * self._best else _IN_TURNS
        began_at = self._now()
        until = began_at + min(most * sent_s, _LONGEST_S)
        rested_at = began_at + min(_REST * sent_s, self._rests_s)
        while not self._presses() and (self._now() < rested_at or (self._is_merging() and self._now() < until)):
            self._sleep(0.001)
        self._rests_s -= min(self._now(), rested_at) - began_at
