"""The source of a model of which each rank has a copy: a gradient for each parameter, which is in its ``p.grad``.

Parameters are merged that are trainable, or were at some time since the model was wrapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from straggle.backward.device import device_of
from straggle.backward.hooks import ParameterHooks, UnitObserver, put_gradients
from straggle.backward.stages import Registered, trainable
from straggle.source.kept import KeptGradients, mark_of
from straggle.source.source import Slot

_kind = attrgetter("dtype", "device", "requires_grad")
_requires_grad = attrgetter("requires_grad")


class ReplicatedSource:
    """The parameters of one module, which the merge knows by their numbers (`GradientSource`)."""

    between_units = False
    copied: Sequence[int] = ()  # a replica is one rank

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.named: list[tuple[str, nn.Parameter]] = []
        self.all: list[nn.Parameter] = []
        self.slots: list[Slot] = []
        self._others: list[nn.Parameter] = []  # which are frozen, and were all the time
        self.renew()

    def renew(self) -> list[nn.Parameter]:
        """Take those that the module has now; what of all its parameters is new, or was not merged before."""
        before, others = set(self.all), set(self._others)
        ours = {*before, *(parameter for _, parameter in trainable(self._module))}
        self.named[:] = [own for own in self._module.named_parameters() if own[1] in ours]
        self.all[:] = [parameter for _, parameter in self.named]
        self.slots[:] = slots_of(self.named)
        self._others = [parameter for parameter in self._module.parameters() if parameter not in ours]
        self._stale = {parameter for parameter in self._others if parameter.grad is not None}
        self._registered = Registered(self._module)
        self._note_kinds()
        return [own for own in self.all if own not in before] + [own for own in self._others if own not in others]

    def check(self) -> str:
        """How the trainable parameters are others than when they were taken last; empty: they are the same.

        Raises ``RuntimeError`` if one of them has another dtype or device.
        """
        if not self._registered.unchanged():
            if differences := self._registered.differences():
                return differences
            self._registered = Registered(self._module)
        if names := self.unfrozen():
            return f"unfrozen: {', '.join(names)}"
        if [*map(_kind, self.all)] != self._kinds:
            check_kinds(self.named, self._dtypes)
            self._note_kinds()
        return ""

    def unfrozen(self) -> list[str]:
        """The names of those that are trainable and not merged, because they were frozen when these were taken."""
        if True not in map(_requires_grad, self._others):
            return []
        ours = set(self.all)
        return [name for name, parameter in trainable(self._module) if parameter not in ours]

    def frozen_with_gradients(self) -> list[str]:
        """The names of those that are not merged, and have a gradient that they had not when these were taken."""
        own = {parameter for parameter in self._others if parameter.grad is not None} - self._stale
        return [name for name, parameter in self._module.named_parameters() if parameter in own]

    def attach(self, observer: UnitObserver) -> ParameterHooks:
        """Report each gradient of a backward pass to ``observer``, by hooks on the parameters."""
        return ParameterHooks(self._module, self.all, observer)

    def pass_over(self) -> None:
        """None is held back."""

    def step_over(self, *, left: bool) -> None:
        """Nothing is left of its passes but their graphs."""

    def keep(self, merged: Sequence[Tensor | None]) -> KeptGradients:
        """A step is entered: what is in ``p.grad``."""
        return KeptGradients(self.all, merged, is_queued=device_of(self.all[0].device).is_queued)

    def place(self, gradients: Sequence[Tensor | None]) -> None:
        """Each merged gradient becomes its parameter's ``p.grad``."""
        put_gradients(zip(self.all, gradients, strict=True))

    def module_state(self) -> dict[str, Any]:
        """The module's ``state_dict``."""
        return dict(self._module.state_dict())

    def load_module(self, state: Mapping[str, Any]) -> None:
        """Load another rank's."""
        self._module.load_state_dict(state)

    def given(self, state: Any) -> Any:
        """As it is: each rank has all of it."""
        return state

    def taken(self, state: Any) -> Any:
        """As it came."""
        return state

    def of_parameters(self, gradients: Mapping[int, Tensor]) -> Sequence[tuple[nn.Parameter, Tensor]]:
        """Some parameters with their merged gradients."""
        return [(self.all[index], gradient) for index, gradient in gradients.items()]

    def _note_kinds(self) -> None:
        self._kinds = [*map(_kind, self.all)]
        self._dtypes: list[tuple[torch.dtype, torch.device]] = [(dtype, device) for dtype, device, _ in self._kinds]
        self.frozen = mark_of(index for index, (_, _, needed) in enumerate(self._kinds) if not needed)


def slots_of(named: Iterable[tuple[str, nn.Parameter]]) -> list[Slot]:
    """A slot for each of these parameters."""
    return [Slot(name, parameter, parameter) for name, parameter in named]


def check_kinds(named: Iterable[tuple[str, Tensor]], wrapped: Iterable[tuple[torch.dtype, torch.device]]) -> None:
    """Raise ``RuntimeError`` naming the first parameter that has another dtype or device than when it was wrapped."""
    for (name, parameter), (dtype, device) in zip(named, wrapped, strict=True):
        if (parameter.dtype, parameter.device) != (dtype, device):
            raise RuntimeError(
                f"parameter {name} was {dtype} on {device} when the model was wrapped and is {parameter.dtype} on "
                f"{parameter.device} now: convert or move the module before StagedDataParallel(model), or close() this "
                "one and wrap the module again with a new optimizer"
            )
