"""Hooks that see each gradient as backward finishes it, stop a late pass, and free what it did not compute.

Stopping is exact for any graph: autograd accumulates into a parameter only after every path into it has been summed, so
a gradient that has arrived is exact, and one that has not is untouched.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class DeadlineReached(BaseException):
    """Leaves the forward or backward pass of a late rank.

    A ``BaseException``, as ``asyncio.CancelledError`` is, so that a loop's ``except Exception`` does not catch it.
    """


class HasGradient(Protocol):
    """A parameter, or what has this rank's part of it."""

    grad: Tensor | None


def take_gradient(parameter: HasGradient) -> Tensor | None:
    """What lies in ``p.grad``; nothing does from here on."""
    gradient = parameter.grad
    parameter.grad = None
    return gradient


def put_gradients(gradients: Iterable[tuple[HasGradient, Tensor | None]]) -> None:
    """Each becomes its parameter's ``p.grad``."""
    for parameter, gradient in gradients:
        parameter.grad = gradient


class PassObserver(Protocol):
    """The receiver of a pass's gradients and checks."""

    def gradient_ready(self, index: int, parameter: HasGradient) -> None:
        """Parameter ``index`` has its gradient of this backward pass in ``p.grad``; may raise `DeadlineReached`.

        It is also called for an undefined gradient: ``p.grad`` is then unchanged.
        """

    def check(self, at: int = 0) -> None:
        """Between two stages: raise `DeadlineReached` to stop here. ``at``: a number for this place in the model."""


class UnitObserver(PassObserver, Protocol):
    """One that is also told when a backward pass has come to the model, by the first of its units."""

    def backward_begins(self) -> None:
        """It has not come to a gradient so far."""


class ModuleHook:
    """A hook on a module that is not copied with the module.

    In a copy or a pickle of the module, a function of the standard library that does nothing takes its place: the copy
    is a plain module without a reference to the observer, and can be loaded without straggle installed.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")


class ParameterHooks:
    """Hooks on a module that report each finished gradient and check between stages whether to go on."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], observer: PassObserver) -> None:
        self._module, self._parameters = module, parameters
        self._observer = observer
        self._entries: list[RemovableHandle] = []
        self._hooks: list[RemovableHandle] = []
        self._register()

    def _register(self) -> None:
        self._hooks = [self._registered(index, parameter) for index, parameter in enumerate(self._parameters)]
        self._registers = [parameter._post_accumulate_grad_hooks for parameter in self._parameters]
        self._num_hooks = sum(map(len, self._registers))

    def _registered(self, index: int, parameter: nn.Parameter) -> RemovableHandle:
        needed = parameter.requires_grad
        parameter.requires_grad_(True)  # torch registers no hook on a frozen parameter, which may be trained later
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(needed)
        return handle

    def keep_last(self) -> None:
        """Move behind hooks that others have registered since, so that the gradient is reported as they leave it."""
        if sum(map(len, self._registers)) != self._num_hooks:
            self.renew()

    def renew(self) -> None:
        """Register again, after all other hooks: parameters were replaced, or got other hooks."""
        for handle in self._hooks:
            handle.remove()
        self._register()

    def check_at(self, modules: Sequence[str]) -> None:
        """Check before the forward pass of each of these modules; replaces the modules given before."""
        for handle in self._entries:
            handle.remove()
        found = dict(self._module.named_modules())
        hook = ModuleHook(self._before_forward)
        self._entries = [found[name].register_forward_pre_hook(hook) for name in dict.fromkeys(modules)]

    def close(self) -> None:
        """Remove all hooks."""
        for handle in (*self._hooks, *self._entries):
            handle.remove()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        return partial(self._observer.gradient_ready, index)

    def _before_forward(self, _module: nn.Module, _args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._observer.check()


def observers_of(parameter: Tensor) -> list[object]:
    """The observers of this parameter's gradients, such as those of `ParameterHooks` that are not closed."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    owners = [getattr(hook.func, "__self__", None) for hook in hooks.values() if isinstance(hook, partial)]
    return [owner._observer if isinstance(owner, ParameterHooks) else owner for owner in owners]


def release_graph(error: BaseException, outputs: Iterable[weakref.ref[Tensor]]) -> None:
    """Release the graph of the backward pass that ``error`` left, so that its activations are freed at once.

    Otherwise the loop's own ``loss`` would hold the rest of the graph until the next forward pass is over. The roots
    are found in the frame of ``torch.autograd.backward``; they and the ``outputs`` of the model that the pass went
    through are detached in place, unless the pass was to retain its graph.
    """
    held = [tensor for output in outputs if (tensor := output()) is not None]
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is torch.autograd.backward.__code__:
            if frame.f_locals.get("retain_graph") or frame.f_locals.get("create_graph"):
                return
            held += tensors_in(frame.f_locals.get("tensors"))
    for tensor in held:
        if tensor.grad_fn is not None and not tensor._is_view():
            tensor.detach_()
    # this thread's autograd queue holds the next node of the pass that was left until its next pass: this one
    with torch.enable_grad():
        root = torch.zeros((), requires_grad=True)
        torch.autograd.grad(root.clone(), root)


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
