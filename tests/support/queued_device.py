"""A fake device that is a queue, on CPU tensors, for straggle and for tests that count waits (`host_reads.py`)."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from straggle import world
from straggle.backward import device as of_straggle


class RecordingDevice:
    """A device that is a queue, on CPU tensors. ``waits``: how often the host has waited for it.

    ``copies``: how often it was asked to copy something to the host.
    ``behind``: for so many questions it has not come to a mark. What it copies to the host is NaN, a large number or
    true until the host has seen a mark behind that ready, or has waited for it.
    """

    is_queued = True

    def __init__(self, behind: int = 0) -> None:
        self.behind, self.waits, self.copies = behind, 0, 0
        self._copies: list[tuple[Tensor, Tensor]] = []

    def mark(self, again: Any = None) -> tuple[float, list[tuple[Tensor, Tensor]]]:  # noqa: ARG002
        copies, self._copies = self._copies, []
        return time.monotonic(), copies

    def ready(self, mark: Any) -> bool:
        if self.behind > 0:
            self.behind -= 1
            return False
        with _disable_current_modes():
            for to, copy in mark[1]:
                to.copy_(copy)
        mark[1].clear()
        return True

    def wait(self, mark: Any) -> None:
        self.waits += 1
        self.behind = 0
        self.ready(mark)

    def wait_for_all(self) -> None:
        self.waits += 1
        self.behind = 0

    def after_queue(self, queue: Any) -> None:
        """All are done in the order of their calls."""

    def seconds_between(self, before: Any, after: Any) -> float:
        return float(after[0] - before[0])

    def copy_to_host(self, numbers: Tensor) -> Tensor:
        self.copies += 1
        with _disable_current_modes():
            copy = numbers.detach().clone()
            flags = copy.is_floating_point() or copy.dtype is torch.bool
            unknown = torch.nan if flags else torch.iinfo(copy.dtype).max
            self._copies.append((to := torch.full_like(copy, unknown), copy))
        return to

    def own_queue(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def queue(self) -> object:
        return None


_used: dict[Hashable, RecordingDevice] = {}  # by process, as ranks of a simulated world are threads of one
_real = of_straggle.device_of


def _device_of(device: torch.device) -> Any:
    return _used.get(world.process()) or _real(device)


@contextlib.contextmanager
def queued_device(device: RecordingDevice | None = None) -> Iterator[RecordingDevice]:
    """In the block, all that straggle makes in this process asks this device, whatever tensors it has."""
    own = world.process()
    before, _used[own] = _used.get(own), device or RecordingDevice()
    for name, module in tuple(sys.modules.items()):
        if name.startswith("straggle") and getattr(module, "device_of", None) is _real:
            module.device_of = _device_of  # type: ignore[attr-defined]
    try:
        yield _used[own]
    finally:
        if before is None:
            del _used[own]
        else:
            _used[own] = before
