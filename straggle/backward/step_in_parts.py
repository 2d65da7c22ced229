"""An optimizer's step in parts: each parameter as soon as its gradient is merged, while others are in flight.

The optimizer's own code makes each part, because it skips a parameter whose ``p.grad`` is ``None``. The result is that
of one step, bit for bit, if the update of a parameter does not depend on other parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

from torch import Tensor, nn, optim
from torch.optim import Optimizer

from straggle.backward.hooks import put_gradients, take_gradient

# these classes, not their subclasses: one that overrides `step` may look at all gradients
PER_PARAMETER = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
)
_STEP_AFTER = "leave optimizer= out of step(), and call optimizer.step() after the block"


def check_steps_in_parts(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Raise ``ValueError`` for an optimizer whose step must see all gradients, or has none of these parameters."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer={optimizer!r}: give a torch.optim.Optimizer")
    if inspect.signature(type(optimizer).step).parameters["closure"].default is inspect.Parameter.empty:
        raise ValueError(f"{kind} computes the loss again in its step, which needs all gradients: {_STEP_AFTER}")
    if type(optimizer) not in PER_PARAMETER:
        names = ", ".join(one.__name__ for one in PER_PARAMETER)
        raise ValueError(
            f"{kind} may look at all gradients at once, so it cannot be stepped in parts (torch.optim's {names} can): "
            f"{_STEP_AFTER}"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ValueError(f"this {kind} has step hooks, which would be called for each part of a step: {_STEP_AFTER}")
    ours = {id(parameter) for parameter in parameters}
    if not any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(f"this {kind} has no parameter of the wrapped model")


class StepInParts:
    """One step of ``optimizer``: any number of parts, and then the rest; ``running`` during each of them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.running = False
        self._stepped: dict[nn.Parameter, Tensor] = {}  # their merged gradients
        self._others: dict[nn.Parameter, Tensor] | None = None  # gradients that are not in the merge

    def step(self, merged: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Step these parameters by their merged gradients, and no others."""
        self._set_others_aside()
        put_gradients(merged)
        self._step()
        for parameter, gradient in merged:
            take_gradient(parameter)
            self._stepped[parameter] = gradient

    def finish(self) -> None:
        """Step the parameters that were in no part; every ``p.grad`` is then as after one step."""
        put_gradients((self._others or {}).items())
        self._step()
        put_gradients(self._stepped.items())

    def _step(self) -> None:
        self.running = True
        try:
            self._optimizer.step()
        finally:
            self.running = False

    def _set_others_aside(self) -> None:
        if self._others is not None:
            return
        everything = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        there = ((parameter, take_gradient(parameter)) for parameter in everything)
        self._others = {parameter: gradient for parameter, gradient in there if gradient is not None}
