"""How long a parent waits for what a leaf sends, and what a leaf does not begin to send: pure, times are arguments.

A parent that waited in each step would take its own waiting for the usual time, and wait longer and longer. So now and
then comes a step in which it does not wait: that is what it compares with.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

_FIRST = 3  # steps without waiting
_EVERY = 16  # and one of so many later
_KEPT = 5  # of these steps


class Patience:
    """Of one parent; times in seconds from the end of the merge before. ``stretch``: as in `LinkPolicy`.

    ``waits``: whether it waits at all in the running step.
    """

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._num_steps = 0
        self.waits = False
        self._begins: list[dict[int, float]] = []  # of the steps without waiting: when each bucket could be launched
        self._ends: list[float] = []
        self._now: dict[int, float] = {}

    def begin(self) -> None:
        """A step begins."""
        self.waits = self._num_steps >= _FIRST and self._num_steps % _EVERY != 0
        self._num_steps += 1
        self._now = {}

    def until(self, bucket: int, now_s: float) -> float:
        """Until when to wait for what leaves have for this bucket, which could be launched now."""
        if not self.waits:
            self._now[bucket] = now_s
            return now_s
        usual = [begins[bucket] for begins in self._begins if bucket in begins]
        if not usual:
            return now_s
        return max(now_s, median(usual) + (self._stretch - 1) * median(self._ends))

    def end(self, now_s: float) -> None:
        """The step is merged."""
        if not self.waits:
            self._begins = [*self._begins, self._now][-_KEPT:]
            self._ends = [*self._ends, now_s][-_KEPT:]


class FirstSent:
    """The first bucket of a step that a leaf sends: those before it would come too late.

    Its peers are ahead of it by the time that it received the step before. So the first buckets come too late while
    later ones may not, and they are in their way.
    """

    def __init__(self) -> None:
        self.first = 0
        self._in_time = 0  # steps in a row in which all that was sent was merged

    def learn(self, merged: Sequence[bool]) -> None:
        """A step is over: which buckets, in order, had this leaf's part in them."""
        sent = merged[min(self.first, len(merged) - 1) :]
        if all(sent):
            self._in_time += 1
            if self._in_time >= _SURE:
                self._in_time, self.first = 0, max(0, self.first - 1)
        else:
            self._in_time = 0
            if not sent[0]:
                self.first = min(self.first + 1, len(merged) - 1)


_SURE = 4
