"""What only a device knows of a step: numbers that are copied to the host behind the merge, and read when they arrive.

They go into this rank's row of a later step, so that all ranks know them at the same time.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from straggle.backward.device import Device
from straggle.merge.rows.telemetry import MAX_SCALARS


@dataclass(frozen=True)
class Counts:
    """``numbers`` on the device: for each bucket whether this rank left it out, and how many ranks had nothing usable.

    ``sizes``: the gradients of each bucket.
    """

    numbers: Tensor
    sizes: Sequence[int]
    num_ranks: int

    def read(self, numbers: Sequence[float]) -> tuple[int, bool]:
        """From the copied ``numbers``: how many gradients this rank left out, and whether the step changed nothing."""
        left_out = sum(size for size, found in zip(self.sizes, numbers, strict=False) if found)
        return left_out, numbers[-1] >= self.num_ranks


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrived:
    """Of the step that was ``behind`` steps before the one whose row they go in; 0: nothing has arrived since the last.

    ``nonfinite``: gradients of this rank that were left out. ``skipped``: no rank had a gradient that could be applied.
    If those of later steps have arrived, too, ``nonfinite`` is their sum, and each of ``scalars`` their mean.
    """

    behind: int = 0
    nonfinite: int = 0
    skipped: bool = False
    scalars: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


NOTHING_ARRIVED = Arrived()


@dataclass(frozen=True)
class _Copied:
    """``numbers`` are on the host when ``mark`` is ready: those of ``counts``, then scalars with these ``names``."""

    step: int
    mark: Any
    numbers: Tensor
    counts: Counts | None
    names: tuple[str, ...]


class DeviceNumbers:
    """Those of one rank. The training thread adds; whoever submits takes; each with the coordinator's lock held."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._copied: deque[_Copied] = deque()
        self._marks: list[Any] = []  # that are used again, because a new one takes longer than a kernel
        self._seen: dict[str, list[float]] = {}  # scalars that have arrived and are in no row
        self._first = sys.maxsize  # step of which something has arrived and is in no row

    def add(self, step: int, counts: Counts | None, scalars: Mapping[str, Tensor]) -> None:
        """Copy these of a merged step to the host, when the device comes to it; all on one device."""
        if counts is None and not scalars:
            return
        parts = [] if counts is None else [counts.numbers]
        parts += [value.reshape(1) for value in scalars.values()]
        copy = self._device.copy_to_host(parts[0] if len(parts) == 1 else torch.cat(parts))
        # behind the copy: when it is ready, so are the numbers
        mark = self._device.mark(self._marks.pop() if self._marks else None)
        self._copied.append(_Copied(step, mark, copy, counts, tuple(scalars)))

    def take(self, step: int, room: int = MAX_SCALARS) -> Arrived:
        """What has arrived since the last row, for the row of ``step``; does not wait.

        Scalars for which the row has no ``room`` go into a later one.
        """
        if not self._seen and not (self._copied and self._device.ready(self._copied[0].mark)):
            return NOTHING_ARRIVED
        nonfinite, skipped = 0, False
        while self._copied and self._device.ready(self._copied[0].mark):
            own = self._copied.popleft()
            numbers = own.numbers.tolist()
            self._marks.append(own.mark)
            self._first = min(self._first, own.step)
            if own.counts is not None:
                left_out, changed_nothing = own.counts.read(numbers[: len(numbers) - len(own.names)])
                nonfinite, skipped = nonfinite + left_out, skipped or changed_nothing
            for name, value in zip(reversed(own.names), reversed(numbers), strict=False):
                self._seen.setdefault(name, []).append(value)
        scalars = {name: fmean(self._seen.pop(name)) for name in list(self._seen)[:room]}
        behind = max(1, step - self._first)
        if not self._seen:
            self._first = sys.maxsize
        return Arrived(behind, nonfinite, skipped, scalars)

    def close(self, rank: int) -> None:
        """Name the gradients of the last steps that no later row has counted."""
        if not self._copied:
            return
        if not self._device.ready(self._copied[-1].mark):
            self._device.wait(self._copied[-1].mark)
        first = self._copied[0].step
        if (left := self.take(first + 1)).nonfinite:
            _log.warning(
                "rank %d, since step %d: %d gradients were not finite and left out; the last steps' are in no report",
                rank,
                first,
                left.nonfinite,
            )
