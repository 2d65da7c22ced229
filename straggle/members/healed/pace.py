"""How fast a state is sent to a newcomer: gradients go first."""

from __future__ import annotations

from collections.abc import Callable

from straggle import world
from straggle.waits import until

_LET_PASS = 6.0  # if merges slow the state down, it is sent for at least a seventh of the time while they run
_IN_TURNS = 1.0  # if merges do not slow it: they use another link, or wait for a rank
_SLOWED = 0.8  # a chunk below this part of the best rate so far was slowed down
_LONGEST_S = 5.0  # the longest pause; the newcomer waits for a minute for a chunk
_REST = 4.0  # the state is sent for a fifth of the time, so that no step of the peers becomes much longer,
_RESTS_S = 0.1  # until the rests add up to so long: half a second costs the peers no less, and the newcomer 0.6 s


class Pace:
    """The pauses between the chunks of a state for one newcomer: it shares cores and the network with the steps.

    ``is_merging()``: whether gradients are in flight now; ``presses()``: whether as many steps have been merged as may
    wait in the newcomer's memory; ``rests_s``: the total seconds for which it may rest while no gradients are in
    flight.
    """

    def __init__(
        self,
        is_merging: Callable[[], bool],
        presses: Callable[[], bool],
        *,
        rests_s: float = _RESTS_S,
        now: Callable[[], float] = world.clock,
        sleep: Callable[[float], None] = world.pause,
    ) -> None:
        self._is_merging, self._presses, self._rests_s = is_merging, presses, rests_s
        self._now, self._sleep = now, sleep
        self._best = 0.0  # the best rate so far, in bytes a second

    def pause(self, num_bytes: int, sent_s: float) -> None:
        """After a chunk that took ``sent_s``, rest, and wait for a gap between gradients, but not for long.

        The rest is four times ``sent_s``, until ``rests_s`` is used up. The wait for a gap is at most six times
        ``sent_s``, and once ``sent_s`` if the chunk was not slowed down. If both share a link fairly, the chunk has
        delayed the gradients for half of its time: a merge takes up to a thirteenth longer.
        """
        rate = num_bytes / max(sent_s, 1e-6)
        self._best = max(self._best, rate)
        most = _LET_PASS if rate < _SLOWED * self._best else _IN_TURNS
        began_at = self._now()
        gap_until = began_at + min(most * sent_s, _LONGEST_S)
        rested_at = began_at + min(_REST * sent_s, self._rests_s)

        def may_go_on() -> bool:
            now = self._now()
            return self._presses() or (now >= rested_at and not (now < gap_until and self._is_merging()))

        until(may_go_on, every_s=0.001, clock=self._now, pause=self._sleep)
        self._rests_s -= min(self._now(), rested_at) - began_at
