"""Hooks into the loop around a model: where it loads data, waits in collectives of its own, and steps an optimizer.

torch has no hooks at loads and collectives. Brackets stand in its classes as long as somebody wants to know, and let
the calls of other threads and of forked processes through.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial, wraps
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch import distributed as dist
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as _dataloader
from torch.utils.hooks import RemovableHandle

Around: TypeAlias = Callable[[Callable[[], Any]], Any]
_OURS = __name__.partition(".")[0]


def around_loads(around: Around) -> list[CallBracket]:
    """Have a ``DataLoader`` of this thread begin an epoch, and fetch a batch, by ``around``, until they are removed."""
    places = (DataLoader, "__iter__"), (_dataloader._BaseDataLoaderIter, "__next__")
    return [CallBracket(owner, name, around) for owner, name in places]


def around_collectives(around: Around) -> list[CallBracket]:
    """Have this thread wait by ``around`` for collectives of others than straggle, until they are removed."""
    return [CallBracket(dist.Work, "wait", around, of_others=True)] if dist.is_available() else []


class CallBracket:
    """A class's method is called by ``around`` on this thread, unless inside of another such call.

    ``of_others``: unless by straggle. Its loaders, such as `LateLoader`, load for the loop.
    """

    def __init__(self, owner: type, name: str, around: Around, *, of_others: bool = False) -> None:
        self._owner, self._name, self._around, self._of_others = owner, name, around, of_others
        self._place, self._inside = _place(), False
        self.before: Any = getattr(owner, name)
        self.removed = False

        @wraps(self.before)
        def bracketed(own: Any, *args: Any, **words: Any) -> Any:
            call = partial(self.before, own, *args, **words)
            return self._call(call) if self._counts(sys._getframe().f_back) else call()

        bracketed.__dict__["bracket"] = self
        self.bracketed = bracketed
        setattr(owner, name, bracketed)

    def remove(self) -> None:
        """Put back what was there; if another bracket stands around this one, let this one do nothing."""
        self.removed = True
        if getattr(self._owner, self._name) is not self.bracketed:
            return
        before = self.before
        while (bracket := _bracket_of(before)) is not None and bracket.removed:
            before = bracket.before
        setattr(self._owner, self._name, before)

    def _counts(self, caller: FrameType | None) -> bool:
        """``caller``: ``None`` if C code calls, as it begins a thread."""
        if self.removed or self._inside or _place() != self._place:
            return False
        return caller is None or not self._of_others or not _is_for_straggle(caller)

    def _call(self, call: Callable[[], Any]) -> Any:
        self._inside = True
        try:
            return self._around(call)
        finally:
            self._inside = False


def _place() -> tuple[int, int]:
    """This process and thread; the only thread of a forked process has the number of the one that forked it."""
    return os.getpid(), threading.get_ident()


def _is_for_straggle(caller: FrameType) -> bool:
    """Whether straggle calls, and that not for the loop, as what another bracket calls does."""
    if caller.f_back is not None and caller.f_back.f_code is CallBracket._call.__code__:
        return False
    return str(caller.f_globals.get("__name__", "")).partition(".")[0] == _OURS


def _bracket_of(function: Any) -> CallBracket | None:
    """Not of another program's wrapper, to which ``functools.wraps`` has copied what was known of the bracket."""
    bracket: CallBracket | None = getattr(function, "bracket", None)
    return bracket if bracket is not None and bracket.bracketed is function else None


_FRAMES = 16  # frames between a hook and GradScaler.step: wrappers of torch, a scheduler, a framework


def around_steps(
    parameters: Iterable[Tensor], before: Callable[[Optimizer], None], after: Callable[[Optimizer], None]
) -> list[RemovableHandle]:
    """Call ``before(optimizer)`` and ``after(optimizer)`` around steps of optimizers that begin with one of these.

    This watches every optimizer of the process, including later ones; the parameters are not kept alive.
    """
    ids = {id(parameter) for parameter in parameters}

    def of_ours(call: Callable[[Optimizer], None]) -> Callable[[Optimizer, Any, Any], None]:
        def hook(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            first = next((p for group in optimizer.param_groups for p in group["params"]), None)
            if id(first) in ids:
                call(optimizer)

        return hook

    return [register_optimizer_step_pre_hook(of_ours(before)), register_optimizer_step_post_hook(of_ours(after))]


def begin_scalers(objects: Iterable[object], device: torch.device) -> None:
    """Give each `GradScaler` of these its scale now, as its first ``scale(loss)`` would, which a rank may skip."""
    for own in objects:
        if isinstance(own, GradScaler):
            own.scale(torch.zeros((), device=device))


def stepped_by_scaler() -> bool:
    """In a hook before an optimizer's step: whether a `GradScaler` makes it, which checks for infinite gradients.

    The optimizer does not show this in general; its caller, a few frames up, does.
    """
    frame, step = sys._getframe(), GradScaler.step.__code__
    for _ in range(_FRAMES):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code is step:
            return bool(frame.f_locals["self"].is_enabled())
    return False
