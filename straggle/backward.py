"""The hooks: see each gradient as backward finishes it, stop when late, and tell which phase takes the time.

Stopping is exact for any graph: autograd accumulates into a parameter only after every path into it has been summed, so
what has arrived is the true gradient and what has not is untouched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from straggle.report import PHASES, Phase


class DeadlineReached(BaseException):
    """Leaves the forward or backward pass of a late rank.

    A ``BaseException``, as ``asyncio.CancelledError`` is, so that a loop's ``except Exception`` cannot eat it.
    """


class Stopwatch:
    """Splits a rank's time into phases, of which one runs at a time. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._last_gradient_at = self._since
        self.phase: Phase = "outside"

    def enter(self, phase: Phase) -> None:
        """End the running phase and start another."""
        now = self._clock()
        if self.phase == "backward" and phase != "backward":
            # the pass ended with its last gradient; what came after it was the loop fetching data
            self._credit("backward", self._last_gradient_at)
            self._credit("data", now)
        else:
            self._credit(self.phase, now)
        self.phase = phase

    def gradient_finished(self) -> None:
        """A gradient was finished just now."""
        self._last_gradient_at = self._clock()
        if self.phase != "backward":
            self.enter("backward")

    def read(self) -> dict[Phase, float]:
        """Seconds in each phase so far, the running one included; safe from another thread."""
        seconds = dict(self._seconds)
        seconds[self.phase] += self._clock() - self._since
        return seconds

    def _credit(self, phase: Phase, until: float) -> None:
        self._seconds[phase] += max(0.0, until - self._since)
        self._since = max(self._since, until)


class PassObserver(Protocol):
    """Who is told about a pass."""

    def gradient(self, index: int, gradient: Tensor) -> None:
        """Parameter ``index`` has its finished gradient for this backward pass; may raise `DeadlineReached`."""

    def check(self) -> None:
        """Between two stages: raise `DeadlineReached` to stop here."""


class StagedBackward:
    """Hooks on a module that report each finished gradient and check between stages whether to go on.

    Each gradient is taken from ``p.grad`` as soon as it is there, which leaves ``p.grad`` as ``None``.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], observer: PassObserver) -> None:
        self._module = module
        self._observer = observer
        self._entries: list[RemovableHandle] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
        ]

    def check_at(self, modules: Sequence[str]) -> None:
        """Check before the forward pass of each of these modules, in place of those given before."""
        for handle in self._entries:
            handle.remove()
        found = dict(self._module.named_modules())
        self._entries = [found[name].register_forward_pre_hook(self._before_forward) for name in dict.fromkeys(modules)]

    def close(self) -> None:
        """Remove all hooks."""
        for handle in (*self._hooks, *self._entries):
            handle.remove()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        observer = self._observer

        def finished(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is None:  # the hook fires for an undefined gradient too
                return
            parameter.grad = None
            observer.gradient(index, gradient)

        return finished

    def _before_forward(self, _module: nn.Module, _args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._observer.check()


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses, such as the output of a model."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if hasattr(value, "__dataclass_fields__"):
        return [tensor for name in value.__dataclass_fields__ for tensor in tensors_in(getattr(value, name))]
    return []
