"""Shared by all integrations: the options of `StagedDataParallel`, a framework's accumulation, and the last loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from straggle.parallel import StagedDataParallel
from straggle.step import Step

OPTIONS = ("stages", "deadline", "estimator", "late_handling", "merge", "links", "members")


def take_options(words: dict[str, Any]) -> dict[str, Any]:
    """Take the options of `StagedDataParallel` out of ``words``, a framework's keyword arguments, and return them.

    ``members`` that are ``None`` are no option.
    """
    taken = {name: words.pop(name) for name in OPTIONS if name in words}
    return {name: option for name, option in taken.items() if name != "members" or option is not None}


def wrapped(module: nn.Module, options: Mapping[str, Any]) -> StagedDataParallel:
    """The module as a replica of the job; a wrapped one is closed and wrapped again, as before a run."""
    if isinstance(module, StagedDataParallel):
        module.close()
        module = module.module
    return StagedDataParallel(module, **options)


class Accumulation:
    """The step that a framework accumulates into; its loop knows before each micro-batch whether it is the last.

    The loop may leave a step open, such as when it leaves its loader early: the next micro-batch then belongs to that
    step.
    """

    def __init__(self) -> None:
        self._num_begun: WeakKeyDictionary[Step, int] = WeakKeyDictionary()  # micro-batches begun, by open step

    def step_of(self, model: StagedDataParallel, num_expected: int, *, is_last: bool) -> Step:
        """The step of the micro-batch that begins; it has ``num_expected`` of them if the loop goes on as usual."""
        step = model.open_step or model.step(max(1, num_expected)).begin()
        self._num_begun[step] = number = self._num_begun.get(step, 0) + 1
        step.num_microbatches = number if is_last else max(step.num_microbatches, number + 1)
        return step

    def give_up(self, model: StagedDataParallel) -> None:
        """End an open step, on all ranks alike, and drop its gradients."""
        if (step := model.open_step) is None:
            return
        step.num_microbatches = self._num_begun[step]
        step.end()
        model.zero_grad()


class LastLoss:
    """The last loss that this rank computed: what a late rank's own code has for a loss."""

    def __init__(self) -> None:
        self._loss: Tensor | None = None

    def note(self, loss: object) -> None:
        """This is the last one now, if it is a tensor."""
        if isinstance(loss, Tensor):
            self._loss = loss.detach().clone()  # code may go on to change it in place

    def again(self, device: torch.device) -> Tensor:
        """Its value (0 before the first), with a backward pass that comes to no parameter."""
        value = torch.zeros((), device=device) if self._loss is None else self._loss.clone()
        return value.requires_grad_().clone()  # no leaf, which nothing may change in place
