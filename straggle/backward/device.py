"""The device that has the gradients: a queue that the host fills, and does not wait for if it can help it.

On the CPU there is no queue: what the host has called is done. This file knows nothing of gradients and ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from straggle import world


class Device(Protocol):
    """What is asked of it. A mark stands for all that the calling thread has queued so far.

    ``is_queued``: the host runs ahead of it, and must not read its tensors back in a step.
    """

    is_queued: bool

    def mark(self, again: Any = None) -> Any:
        """A new mark, which can be timed; or, since making one takes time, one that is ``again`` to be used."""

    def ready(self, mark: Any) -> bool:
        """Whether the device has done all that a mark stands for; does not wait."""

    def wait(self, mark: Any) -> None:
        """Let the host wait until it has."""

    def after_queue(self, queue: object) -> None:
        """What this thread queues from here on comes after what is in another queue; the host does not wait."""

    def wait_for_all(self) -> None:
        """Let the host wait until it has done all that any thread has queued."""

    def seconds_between(self, before: Any, after: Any) -> float:
        """Seconds between two marks that are ready."""

    def copy_to_host(self, numbers: Tensor) -> Tensor:
        """A copy on the CPU, whose elements are there when a mark that is made next is ready."""

    def own_queue(self) -> contextlib.AbstractContextManager[object]:
        """In this block, what the thread queues does not come after what others have queued."""

    def queue(self) -> object:
        """The queue of the calling thread; ``None`` if there is none."""


class Host:
    """The CPU; marks are moments by ``clock``."""

    is_queued = False

    def __init__(self, clock: Callable[[], float] = world.clock) -> None:
        self._clock = clock

    def mark(self, again: Any = None) -> Any:  # noqa: ARG002
        return self._clock()

    def ready(self, mark: Any) -> bool:  # noqa: ARG002
        return True

    def wait(self, mark: Any) -> None:
        """Nothing to wait for."""

    def after_queue(self, queue: object) -> None:
        """It does."""

    def wait_for_all(self) -> None:
        """Nothing to wait for."""

    def seconds_between(self, before: Any, after: Any) -> float:
        return float(after - before)

    def copy_to_host(self, numbers: Tensor) -> Tensor:
        return numbers.clone()

    def own_queue(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def queue(self) -> object:
        return None


class Cuda:
    """A CUDA device; marks are events on the calling thread's current stream."""

    is_queued = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self, again: torch.cuda.Event | None = None) -> torch.cuda.Event:
        event = again or torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def ready(self, mark: Any) -> bool:
        return bool(mark.query())

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def after_queue(self, queue: Any) -> None:
        torch.cuda.current_stream(self._device).wait_stream(queue)

    def wait_for_all(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds_between(self, before: Any, after: Any) -> float:
        return float(before.elapsed_time(after)) / 1000

    def copy_to_host(self, numbers: Tensor) -> Tensor:
        return numbers.to("cpu", non_blocking=True)  # into pinned memory, by torch

    def own_queue(self) -> contextlib.AbstractContextManager[object]:
        torch.cuda.set_device(self._device)
        return torch.cuda.stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def queue(self) -> object:
        return torch.cuda.current_stream(self._device)


def device_of(device: torch.device) -> Device:
    """What is asked of a tensor's device."""
    return Cuda(device) if device.type == "cuda" else Host()
