"""What the optimizers of a wrapped model do: how often they step, which are refused, and what the loop does then."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from straggle.backward.loop_hooks import CallBracket, around_collectives, around_loads, around_steps, stepped_by_scaler
from straggle.loop.open_step import OpenStep
from straggle.merge.checks import STEPPED_ALREADY


class OptimizerSteps:
    """Counts the steps of a model's optimizers, and tells their time from data time; on the training thread.

    ``number``: steps since the last merge. ``stepped``: the optimizer that the last step has stepped itself.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], opened: OpenStep, *, drops_nonfinite: bool) -> None:
        self.number = 0
        self.stepped: weakref.ref[Optimizer] | None = None
        self._parameters, self._opened, self._drops_nonfinite = parameters, opened, drops_nonfinite
        self._told: weakref.ref[Optimizer] | None = None  # which optimizer has that number, by `skip`
        self.handles: list[RemovableHandle | CallBracket] = []
        self.watch()

    def watch(self) -> None:
        """Follow the optimizers of the parameters that there are now."""
        for handle in self.handles:
            handle.remove()
        self.handles[:] = _watch(self._parameters, weakref.ref(self), self._opened)

    def entered(self) -> None:
        """A step begins."""
        self.number, self.stepped = 0, None

    def stepped_in_block(self, optimizer: Optimizer) -> None:
        """The step that was left has stepped this one itself."""
        self.number, self.stepped = 1, weakref.ref(optimizer)

    def before(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step. Raises ``RuntimeError`` if it would find no gradients, or others."""
        if self._opened.optimizing:
            return
        if self.stepped is not None and self.stepped() is optimizer:
            raise RuntimeError(STEPPED_ALREADY)
        if self._opened.step is not None:
            raise RuntimeError(
                "optimizer.step() inside of `with model.step()`: gradients are merged when it ends; step after it"
            )
        if self._drops_nonfinite and stepped_by_scaler():
            raise RuntimeError(
                'a GradScaler steps this optimizer, and Merge(nonfinite="drop") leaves out the infinite gradients that '
                'it looks for, so that its scale would only grow: write merge=straggle.Merge(nonfinite="keep")'
            )
        if self._opened.unreached.there:  # of which the optimizer is to find none
            self._opened.unreached.clear(parameter for group in optimizer.param_groups for parameter in group["params"])

    def skip(self, optimizer: Optimizer) -> None:
        """If only the device knows whether the last step is to change nothing, let its kernels leave all as it is.

        Only fused optimizers can, by the number that a ``GradScaler`` gives them; others step with zeros.
        """
        if self._told is not None:  # in a step that failed
            self._forget()
        usable = self._opened.last.usable
        if usable is not None and all(group.get("fused") for group in optimizer.param_groups):
            optimizer.found_inf = 1.0 - usable.float()  # type: ignore[attr-defined]
            self._told = weakref.ref(optimizer)

    def stepped_by_loop(self) -> None:
        """An optimizer has stepped."""
        self.number += 1
        if self._told is not None:
            self._forget()

    def _forget(self) -> None:
        told, self._told = self._told() if self._told is not None else None, None
        if told is not None:
            vars(told).pop("found_inf", None)


def _watch(
    parameters: Sequence[nn.Parameter], reference: weakref.ref[OptimizerSteps], opened: OpenStep
) -> list[RemovableHandle | CallBracket]:
    """Hooks that keep neither the model nor what counts for it."""
    watched, stopwatch = weakref.ref(opened), opened.stopwatch

    def before(optimizer: Optimizer) -> None:
        if (steps := reference()) is not None:
            steps.before(optimizer)
            steps.skip(optimizer)
        if (current := watched()) is None or not current.optimizing:
            stopwatch.enter("optimizer")

    def after(_optimizer: Optimizer) -> None:
        if (current := watched()) is not None and current.optimizing:
            return  # a part of a step
        stopwatch.stepped()
        if (steps := reference()) is not None:
            steps.stepped_by_loop()

    return [
        *around_steps(parameters, before, after),
        *around_loads(stopwatch.load),
        *around_collectives(stopwatch.collective),
    ]
