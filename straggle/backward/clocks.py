"""Clocks for a rank's phases and for the stages of its backward passes, on the host or on a device's queue."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from straggle import world
from straggle.backward.device import Device
from straggle.report import PHASES, Phase


class Limit(NamedTuple):
    """``late_at``: by the host's clock, when this rank may be late in its step; ``num_passes``: of the step so far."""

    late_at: float
    num_passes: int


class HostTimes(NamedTuple):
    """A step by the host: seconds from entering it to each stage's end, and each micro-batch's; its cost."""

    stage_s: tuple[float, ...]
    microbatch_s: tuple[float, ...]
    num_passes: int
    cost: float = math.nan


class Stopwatch:
    """Splits a rank's time into phases; one runs at a time. ``now()`` gives seconds, by ``clock``.

    ``last_gradient_at``: when the last gradient of a pass was finished.
    """

    def __init__(self, clock: Callable[[], float] = world.clock) -> None:
        self.now = clock
        self._since = clock()
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self.last_gradient_at = self._since
        self.phase: Phase = "outside"
        self._loads = Loads()

    def enter(self, phase: Phase) -> None:
        """End the running phase and start another."""
        # one moment for both phases: what lies between them would be nobody's
        now = self.now()
        if phase in ("forward", "backward"):
            self._loads.pass_begins()
        if self.phase == "backward" and phase not in ("backward", "collective"):
            # the pass ended with its last gradient
            until = max(self._since, self.last_gradient_at)
            self._seconds["backward"] += until - self._since
            is_loading = phase == "forward" and not self._loads.are_known
            self._since, self.phase = until, "data" if is_loading else "outside"
        self._seconds[self.phase] += max(0.0, now - self._since)
        self._since, self.phase = max(self._since, now), phase

    def gradient(self) -> float:
        """A gradient is finished, and it is now."""
        self.last_gradient_at = at = self.now()
        return at

    def pass_over(self) -> None:
        """The step's passes are over, and what the loop does in its block after the last gradient is none of them."""
        if self.phase == "backward":
            self.enter("outside")

    def stepped(self) -> None:
        """The optimizer's step is over."""
        self.enter("loop_end" if self._loads.are_known else "data")

    def load(self, call: Callable[[], Any]) -> Any:
        """Load a batch by this call; after it the loop prepares that batch, if its passes come next."""
        return self._loads.load(call, self.phase, self.enter)

    def collective(self, call: Callable[[], Any]) -> Any:
        """Wait for a collective of the loop's own by this call."""
        before = self.phase
        self.enter("collective")
        try:
            return call()
        finally:
            self.enter(before)

    @property
    def moved_at(self) -> float:
        """When the running phase began, or its last gradient was finished; from any thread."""
        return max(self._since, self.last_gradient_at)

    def read(self) -> dict[Phase, float]:
        """Seconds in each phase so far, the running one included; safe from another thread."""
        seconds = dict(self._seconds)
        seconds[self.phase] += self.now() - self._since
        return seconds


class Loads:
    """Tells loading from the rest of a loop, by the calls that are seen to load.

    ``are_known``: such a call has loaded a batch for a pass. If not, all that comes before a pass counts as loading:
    the loop has its batches from what is no ``DataLoader``, and may have one for its evaluation.
    """

    def __init__(self) -> None:
        self.are_known = False
        self._has_batch = False  # that was loaded last

    def load(self, call: Callable[[], Any], before: str, enter: Callable[[Any], None]) -> Any:
        """Load by this call in phase ``before``, and enter what comes then."""
        enter("data")
        then, self._has_batch = "loop_end" if before == "data" and self.are_known else before, False
        try:
            batch = call()
            # after a pass, it is the batch of the step's next one
            then, self._has_batch = "data" if before in ("loop_end", "backward") else before, True
            return batch
        finally:
            enter(then)

    def pass_begins(self) -> None:
        """A pass of training begins, with what was loaded last."""
        self.are_known |= self._has_batch

    def evaluated(self) -> None:
        """What was loaded last was for an evaluation."""
        self._has_batch = False


class Timeline:
    """Moments in backward passes, by the host's clock or, on a CUDA device, by events on its queue.

    Kernels are queued, so the host's time is not the device's. Only `seconds` waits for the device.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = world.clock) -> None:
        self._now: Callable[[], Any] = partial(moment, device, clock)
        self._moments: list[tuple[int | None, Any]] = []

    def begin(self) -> None:
        """Start the time until the first mark."""
        self._moments.append((None, self._now()))

    def mark(self, key: int) -> None:
        """Assign the time since the last mark to ``key``, a small number."""
        self._moments.append((key, self._now()))

    def keys(self) -> list[int]:
        """The keys of all marks, in order."""
        return [key for key, _ in self._moments if key is not None]

    def seconds(self, num_keys: int) -> list[float]:
        """Seconds assigned to each key from 0 to ``num_keys - 1``."""
        total = [0.0] * num_keys
        for (_, before), (key, after) in pairwise(self._moments):
            if key is not None:
                total[key] += seconds_between(before, after)
        return total


def moment(device: torch.device, clock: Callable[[], float] = world.clock) -> Any:
    """The present moment: by the host's clock or, on a CUDA device, as an event on its queue."""
    if device.type != "cuda":
        return clock()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(before: Any, after: Any) -> float:
    """Seconds between two moments; waits for the device if they are events."""
    if isinstance(after, torch.cuda.Event):
        after.synchronize()
        return float(before.elapsed_time(after)) / 1000
    return float(after - before)


class FinishTimes:
    """The order in which a step's gradients are finished, and the seconds of each, to plan stages from."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = world.clock) -> None:
        self._timeline = Timeline(device, clock)

    def begin(self) -> None:
        """A backward pass begins."""
        self._timeline.begin()

    def finished(self, index: int) -> None:
        """Parameter ``index`` has its gradient."""
        self._timeline.mark(index)

    def order(self, num_parameters: int) -> list[int]:
        """All parameters, by the time when each was last finished; parameters that never were come last."""
        seen = list(dict.fromkeys(reversed(self._timeline.keys())))[::-1]
        return seen + sorted(set(range(num_parameters)) - set(seen), reverse=True)

    def seconds(self, num_parameters: int) -> list[float]:
        """For each parameter, the seconds since the one finished before it, summed over all passes."""
        return self._timeline.seconds(num_parameters)


class HostLimit:
    """Keeps the host at most one stage ahead of its device: stopping saves no kernel that is queued already."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._previous: Any | None = None

    def stage_finished(self) -> None:
        """The kernels of a stage are queued: wait until those of the stage before are done."""
        previous, self._previous = self._previous, self._device.mark()
        if previous is not None:
            self._device.wait(previous)
