"""What a rank that is out for its slow work takes for a step of its own, timed now and then while it walks along.

The blocks of a rank that is out end at once, so nobody knows whether its layers are fast again; and a loader that
passes missed steps by loads nothing. In a probe it goes through a few blocks in full, on batches of its own. Nothing of
that is merged: the state that it gets with the next view replaces what its passes changed. The first step of a probe
does not count, because what is loaded ahead was loaded while nothing was computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

NUM_STEPS = 5  # of a probe, with the first
NEAR = 16  # steps behind its peers at most, when a probe begins
AFTER_S = 5.0  # seconds until the first probe, and between two at least
_SHARE = 0.1  # of its time, which a rank spends in probes at most


class Probes:
    """The probes of one rank, on its training thread. ``now()`` gives seconds; ``tell(seconds)`` is given the mean."""

    def __init__(self, now: Callable[[], float], tell: Callable[[float], None]) -> None:
        self._now, self._tell = now, tell
        self._due_at = math.inf
        self._left_at: float | None = None  # when it had left its last step
        self.runs = False  # the step that it is in is one of a probe
        self._number = 0  # steps of this probe so far
        self._began_at = self._entered_at = self._own_s = self._sum_s = 0.0

    def came(self) -> float | None:
        """Its loop has come to a step: for how long it had worked since the last one, if that is known."""
        return None if self._left_at is None else self._now() - self._left_at

    def enter(self, own_s: float | None, lag: int) -> bool:
        """It enters a step without its peers; whether in full. ``own_s``: as `came` gave it.

        ``lag``: steps that its peers are known to be further. A loop that cannot even walk along loads as slowly as
        before: no probe is needed to know that, and it would have to walk on when it is let in.
        """
        now = self._now()
        if self._due_at == math.inf:  # it has just been put out
            self._due_at = now + AFTER_S
        if not self._number and (now < self._due_at or lag > NEAR):
            return False
        if not self._number:
            self._began_at, self._sum_s = now, 0.0
        self._number += 1
        self.runs, self._entered_at, self._own_s = True, now, own_s or 0.0
        return True

    def leave(self) -> None:
        """The work of the step is over."""
        if self.runs and self._number > 1:
            self._sum_s += self._own_s + self._now() - self._entered_at

    def left(self) -> None:
        """It has left the step, and waits for nobody any more."""
        self._left_at = self._now()
        if self.runs and self._number >= NUM_STEPS:
            self._tell(self._sum_s / (NUM_STEPS - 1))
            self._due_at = self._left_at + max(AFTER_S, (self._left_at - self._began_at) / _SHARE)
            self._number = 0
        self.runs = False

    def forget(self) -> None:
        """It is not out for its work, or no more."""
        self._due_at, self._number, self._left_at, self.runs = math.inf, 0, None, False
