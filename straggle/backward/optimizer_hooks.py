"""Hooks around the steps of a model's optimizer, without knowing which one that is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

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
