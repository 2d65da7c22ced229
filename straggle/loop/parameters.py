"""The parameters that are merged: those that are trainable, or were at some time since the model was wrapped."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import nn

from straggle.backward.kept import mark_of
from straggle.backward.stages import Registered, trainable
from straggle.merge.checks import check_kinds

_kind = attrgetter("dtype", "device", "requires_grad")
_requires_grad = attrgetter("requires_grad")


class WrappedParameters:
    """Those of one module, with their names, which the merge knows by their numbers.

    A parameter that is frozen stays among them: it is one that the graph does not use, and may be trained again at any
    step. ``named`` and ``all`` are changed by `renew`, in place: who was given them has those that there are now.
    ``frozen``: a number for those that need no gradient.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.named: list[tuple[str, nn.Parameter]] = []
        self.all: list[nn.Parameter] = []
        self._others: list[nn.Parameter] = []  # which are frozen, and were all the time
        self.renew()

    def renew(self) -> list[nn.Parameter]:
        """Take those that the module has now; what of all its parameters is new, or was not merged before."""
        before, others = set(self.all), set(self._others)
        ours = {*before, *(parameter for _, parameter in trainable(self._module))}
        self.named[:] = [own for own in self._module.named_parameters() if own[1] in ours]
        self.all[:] = [parameter for _, parameter in self.named]
        self._others = [parameter for parameter in self._module.parameters() if parameter not in ours]
        self._stale = {parameter for parameter in self._others if parameter.grad is not None}
        self._registered = Registered(self._module)
        self._note_kinds()
        return [own for own in self.all if own not in before] + [own for own in self._others if own not in others]

    def check(self) -> str:
        """How the trainable parameters are others than when they were taken last; empty: they are the same.

        Raises ``RuntimeError`` where one of them has another dtype or device.
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

    def _note_kinds(self) -> None:
        self._kinds = [*map(_kind, self.all)]
        self._dtypes: list[tuple[torch.dtype, torch.device]] = [(dtype, device) for dtype, device, _ in self._kinds]
        self.frozen = mark_of(index for index, (_, _, needed) in enumerate(self._kinds) if not needed)
