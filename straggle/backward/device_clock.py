"""Where a device is in its rank's step, by marks in its queue, and a host that waits only if its rank may be late.

A step's marks divide it into segments: a forward pass, each stage of a backward pass, the rest of that pass. Their
seconds are learned. A rank is expected to be late if what is left of its step will end after ``late_at``; the host is
then kept one segment ahead of its device at most, because what is queued cannot be stopped. Nothing here knows of
other ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from straggle.backward.clocks import HostTimes, Limit
from straggle.backward.device import Device

_DRIFT = 1e-4  # by which the clocks of host and device may differ
_WINDOW = 3  # steps: a hiccup in one of them is no sign of a slow device, and a second one is


class DeviceTimes(NamedTuple):
    """The same by the device; ``busy_s``: from the merge before to the end of own work; NaN: not known.

    ``compute_s``: from entering the step to there; ``merge_s``: from there to the end of the step's merge.
    """

    compute_s: float
    busy_s: float
    merge_s: float
    stage_s: tuple[float, ...]
    microbatch_s: tuple[float, ...]
    num_passes: int
    cost: float = math.nan

    def expected(self, step: HostTimes) -> DeviceTimes:
        """What this step takes by these, which are of an earlier one: in proportion to its cost or micro-batches."""
        by_cost = step.cost / self.cost
        factor = step.num_passes / self.num_passes if math.isnan(by_cost) else by_cost
        compute_s = factor * self.compute_s
        return DeviceTimes(
            compute_s,
            self.busy_s + compute_s - self.compute_s,
            self.merge_s,
            _resized([factor * end for end in self.stage_s], len(step.stage_s), compute_s, even=False),
            _resized([factor * end for end in self.microbatch_s], len(step.microbatch_s), compute_s, even=True),
            step.num_passes,
            step.cost,
        )


def _resized(ends: Sequence[float], number: int, whole_s: float, *, even: bool) -> tuple[float, ...]:
    """These ends, if there are as many as the step has; otherwise evenly spaced ones, or all at its end."""
    if len(ends) == number:
        return tuple(ends)
    return tuple(whole_s * (end + 1) / number if even else whole_s for end in range(number))


def expected_end(now: float, reached_at: float, rest: Sequence[float]) -> float:
    """When a device ends its step that reached a mark at ``reached_at``; ``rest``: seconds of each segment after it.

    The running segment may be over at any moment, however long it took.
    """
    return max(reached_at + sum(rest), now + sum(rest[1:]))


class LearnedSeconds:
    """The seconds of each segment of a step: the median of the last steps in which the device came so far.

    A step is known by the kinds of its segments, one letter each, and by its number of passes.
    """

    def __init__(self) -> None:
        self._kinds, self._num_passes = "", 1
        self._recent: list[deque[float]] = []
        self._medians: list[float] = []

    def add(self, kinds: str, seconds: Sequence[float], num_passes: int, *, complete: bool) -> None:
        """Those of a step; if it is ``complete`` and of other kinds than before, all before it is forgotten."""
        if complete and (kinds, num_passes) != (self._kinds, self._num_passes):
            self._kinds, self._num_passes = kinds, num_passes
            self._recent = [deque(maxlen=_WINDOW) for _ in kinds]
        if self._is_alike(kinds, num_passes):
            for recent, own_s in zip(self._recent, seconds, strict=False):
                recent.append(own_s)
            self._medians = [median(recent) for recent in self._recent]

    def rest(self, kinds: str, num_passes: int, done: int, after_s: float) -> list[float]:
        """Seconds of each segment after the first ``done``, which took ``after_s``; for other kinds, all in one."""
        if self._is_alike(kinds, num_passes):
            return self._medians[done:]
        return [max(0.0, sum(self._medians) * num_passes / self._num_passes - after_s)]

    def _is_alike(self, kinds: str, num_passes: int) -> bool:
        return num_passes == self._num_passes and self._kinds.startswith(kinds)


class StepMarks:
    """Those of one step. The training thread makes them; either thread looks how far the device is.

    Without a lock: ``began_at`` is an upper bound that gets tighter, and ``done`` a lower one that grows, so that
    a look which the other thread overwrites costs a little accuracy until the next one.
    """

    def __init__(
        self, device: Device, now: float, *, previous: StepMarks | None = None, before: Any | None = None
    ) -> None:
        self._device = device
        self.previous = previous  # the step before
        self.before = before  # when that was merged
        self.entered_at, self.entry = now, device.mark()
        self.host_at: list[float] = []  # when the host made each mark
        self.marks: list[Any] = []
        self.kinds = ""  # of the segments that end with them
        self.num_over = 0  # passes that are queued to their end
        self.left: Any | None = None  # the end of own work
        self.placed: Any | None = None  # the end of the merge
        self.own: HostTimes | None = None  # if all of the step was computed
        self.num_passes = 1
        self.done, self.began_at = -1, math.inf  # -1: the device is still in the step before
        self.look(now)

    # -- what has happened

    def segment(self, kind: str, now: float) -> None:
        """A segment of this kind is queued."""
        self.kinds += kind
        self.host_at.append(now)
        self.marks.append(self._device.mark())

    def pass_over(self) -> None:
        """A pass is queued to its end."""
        self.num_over += 1

    def leave(self, num_passes: int) -> Any:
        """All of the rank's own work is queued, of so many passes; the mark behind it."""
        self.num_passes, self.left = num_passes, self._device.mark()
        return self.left

    def place(self) -> Any:
        """What merges the step is queued; the mark behind it."""
        self.placed = self._device.mark()
        return self.placed

    def is_whole(self, own: HostTimes) -> None:
        """All of the step was computed, and this is what the host noted of it."""
        self.own = own

    def next_begins(self) -> None:
        """Another step begins: let go of the one before this, or none of them would ever be freed."""
        self.previous = None

    # -- how far the device is

    def look(self, now: float) -> None:
        """See how far the device is: it reached its last mark before now, and began so much earlier."""
        # read once: the other thread may look at the same time, and only ever raises `done`
        done, marks, previous = self.done, self.marks, self.previous
        if done < 0 and not self._device.ready(self.entry):
            if previous is not None:
                previous.look(now)
            return
        done = max(done, 0)
        while done < len(marks) and self._device.ready(marks[done]):
            done += 1
        self.began_at = min(self.began_at, now - self.after_s(done))
        if previous is not None and previous.began_at < math.inf:  # it may be long ago
            since_s = self._device.seconds_between(previous.entry, self.entry)
            self.began_at = min(self.began_at, previous.began_at + (1 + _DRIFT) * since_s)
        self.done = done

    def after_s(self, done: int) -> float:
        """The seconds from its entry to the end of so many segments, which the device has done."""
        return self._device.seconds_between(self.entry, self.marks[done - 1]) if done else 0.0

    def reached_at(self, now: float) -> float:
        """When, at the latest, the device reached its last mark; now, if it has not begun."""
        return now if self.done < 0 else self.began_at + self.after_s(self.done)

    def seconds(self) -> list[float]:
        """Of each segment that is done."""
        moments = [self.entry, *self.marks[: max(self.done, 0)]]
        return [self._device.seconds_between(*pair) for pair in pairwise(moments)]

    def stage_ends(self, ends: Sequence[float], otherwise_s: float) -> tuple[float, ...]:
        """By the device, if the host was so far after so many seconds: a stage is over by the next mark."""
        return tuple(end if math.isnan(end) else self._end(bisect_left, end, 0, otherwise_s) for end in ends)

    def microbatch_ends(self, ends: Sequence[float], otherwise_s: float) -> tuple[float, ...]:
        """The same of micro-batches, whose ends the host notes later: they are over by the last mark before."""
        return tuple(self._end(bisect_right, end, -1, otherwise_s) for end in ends)

    def _end(self, bisect: Callable[[list[float], float], int], end: float, more: int, otherwise_s: float) -> float:
        place = bisect(self.host_at, self.entered_at + end) + more
        return self.after_s(place + 1) if 0 <= place < self.done else otherwise_s


class DeviceClock:
    """Of one rank; ``now`` is the host's clock, ``limit`` when the rank may be late, and in how many passes.

    ``between_passes``: the rank is stopped between two micro-batches only. Methods are called by the training thread,
    if nothing else is said.
    """

    def __init__(
        self, device: Device, now: Callable[[], float], limit: Callable[[], Limit], *, between_passes: bool
    ) -> None:
        self._device, self._now, self._limit = device, now, limit
        self._between_passes = between_passes
        self._learned = LearnedSeconds()
        self._times: DeviceTimes | None = None  # the newest
        self._computing: deque[StepMarks] = deque()  # steps that were left, and whose segments may not all be done
        self._merging: deque[StepMarks] = deque()  # those whose merges may not be
        self._placed: Any | None = None
        self._step = StepMarks(device, now())

    def entered(self) -> None:
        """A step begins."""
        self._collect()
        previous, before = self._step, self._placed
        previous.next_begins()
        self._placed = None
        self._step = StepMarks(self._device, self._now(), previous=previous, before=before)

    def forward_over(self) -> None:
        """A forward pass is queued."""
        self._mark("f", may_stop=not self._between_passes)

    def stage_over(self) -> None:
        """A stage of a backward pass is queued."""
        self._mark("s", may_stop=not self._between_passes)

    def pass_over(self) -> None:
        """A backward pass is queued to its end."""
        self._step.pass_over()
        self._mark("p", may_stop=True)

    def left(self) -> None:
        """All of the rank's own work is queued. Waits for it once, when the device's seconds of no step are known."""
        step = self._step
        left = step.leave(self._limit().num_passes)
        if self._times is None:
            self._device.wait(left)

    def placed(self) -> None:
        """What merges the step is queued, too."""
        self._placed = self._step.place()
        self._computing.append(self._step)
        self._merging.append(self._step)

    def begin_now(self) -> None:
        """The time between two steps begins now."""
        # what the device did in a pause is no part of the next step
        self._placed = self._device.mark()

    # -- either thread

    @property
    def is_done(self) -> bool:
        """Whether the device has done all of the rank's own work for the step."""
        return self._step.left is not None and self._device.ready(self._step.left)

    def began_at(self, now: float) -> float:
        """When the device began with the step, by the host's clock; now, if it has not."""
        self._step.look(now)
        return min(self._step.began_at, now)

    def submitted(self, host: HostTimes, *, complete: bool) -> DeviceTimes | None:
        """What this rank reports of its step: `None` where the device has not begun with it.

        If it was ``complete``, the newest complete step that the device is through with, because its own part of this
        one is queued only. Otherwise how far this one came.
        """
        if not complete:
            return self._so_far(host)
        self._step.is_whole(host)
        if self._times is None:
            self._step.look(self._now())
            self._times = self._of(self._step, host)
        return self._times.expected(host)

    def _so_far(self, host: HostTimes) -> DeviceTimes | None:
        step, now = self._step, self._now()
        step.look(now)
        if step.done < 0:
            return None
        compute_s = now - step.began_at
        busy_s = math.nan if step.before is None else compute_s + self._between(step.before, step.entry)
        ends = step.stage_ends(host.stage_s, compute_s), step.microbatch_ends(host.microbatch_s, compute_s)
        return DeviceTimes(compute_s, busy_s, math.nan, *ends, host.num_passes, host.cost)

    # -- the training thread

    def _mark(self, kind: str, *, may_stop: bool) -> None:
        """A segment is queued: wait for the one before, if the rank is expected to be late and can be stopped."""
        step, now = self._step, self._now()
        before = step.marks[-1] if step.marks else step.entry
        step.segment(kind, now)
        if may_stop and self._is_expected_late(step, now):
            self._device.wait(before)
            step.look(self._now())

    def _is_expected_late(self, step: StepMarks, now: float) -> bool:
        """Whether it is, and has segments left that are not queued."""
        late_at, num_passes = self._limit()
        self._collect()
        if late_at == math.inf or step.num_over >= num_passes:
            return False
        step.look(now)
        done = max(step.done, 0)
        rest = self._learned.rest(step.kinds, num_passes, done, step.after_s(done))
        return expected_end(now, step.reached_at(now), rest) > late_at

    def _collect(self) -> None:
        """Learn from the steps that the device is through with, and of their merges."""
        while self._computing and self._device.ready(self._computing[0].left):
            step = self._computing.popleft()
            step.look(self._now())
            self._learned.add(step.kinds, step.seconds(), step.num_passes, complete=step.own is not None)
        while self._merging and self._device.ready(self._merging[0].placed):
            step = self._merging.popleft()
            if step.own is not None:
                self._times = self._of(step, step.own)

    def _of(self, step: StepMarks, host: HostTimes) -> DeviceTimes:
        compute_s = self._between(step.entry, step.left)
        return DeviceTimes(
            compute_s,
            math.nan if step.before is None else self._between(step.before, step.left),
            math.nan if step.placed is None else self._between(step.left, step.placed),
            step.stage_ends(host.stage_s, compute_s),
            step.microbatch_ends(host.microbatch_s, compute_s),
            host.num_passes,
            host.cost,
        )

    def _between(self, before: Any, after: Any) -> float:
        return self._device.seconds_between(before, after)
