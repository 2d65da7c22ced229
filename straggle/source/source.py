"""What the merge and an open step know of a model's gradients: slots, who reports them, and where merged ones go.

`replicated.py` is the source of a model of which each rank has a copy. Another one is a class with these methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from straggle.backward.hooks import UnitObserver
from straggle.source.kept import KeptGradients


@dataclass(frozen=True, eq=False)
class Slot:
    """The place of one gradient in the merge; all ranks that merge it have the same.

    ``tensor`` is what this rank has of ``parameter``: its gradient has the same shape, dtype, device and memory format.
    Both are one object if that is all of it. Estimators are asked about the ``parameter``.
    """

    name: str
    tensor: Tensor
    parameter: nn.Parameter

    @property
    def numel(self) -> int:
        """Elements of the gradient."""
        return self.tensor.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient."""
        return self.tensor.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """That of the gradient."""
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        """Where the gradient is."""
        return self.tensor.device


def named_tensors(slots: Iterable[Slot]) -> Iterator[tuple[str, Tensor]]:
    """What this rank has of each of these slots' parameters, with the name."""
    return ((slot.name, slot.tensor) for slot in slots)


class Attached(Protocol):
    """What reports gradients to an observer, until it is closed."""

    def keep_last(self) -> None:
        """A step is entered: report what hooks of the user make of a gradient."""

    def renew(self) -> None:
        """The source has other slots, or its parameters other hooks: report the gradients that there are now."""

    def check_at(self, modules: Sequence[str]) -> None:
        """Let the observer check before the forward pass of each of these modules whether the rank goes on."""

    def close(self) -> None:
        """Report nothing from here on."""


class GradientSource(Protocol):
    """The gradients of one model, by their numbers. A slot that is frozen stays, as one that the graph does not use.

    ``slots``, ``named`` and ``all`` (the parameters) are changed in place by `renew`: who was given them has those that
    there are now. ``frozen``: a number for the slots that need no gradient. ``between_units``: a pass may be left only
    where the source itself lets the observer check, and its gradients may come as late as the end of the pass.
    ``copied``: the slots of which other ranks of the replica have copies, and not other parts.
    """

    between_units: bool
    copied: Sequence[int]
    slots: list[Slot]
    named: list[tuple[str, nn.Parameter]]
    all: list[nn.Parameter]
    frozen: int

    def renew(self) -> list[nn.Parameter]:
        """Take the parameters that the module has now; those that are new, or were not merged before."""

    def check(self) -> str:
        """How the parameters are others than when they were taken last; empty: they are the same.

        Raises ``RuntimeError`` if one of them has another dtype or device.
        """

    def unfrozen(self) -> list[str]:
        """The names of parameters that are trainable and not merged."""

    def frozen_with_gradients(self) -> list[str]:
        """The names of parameters that are not merged and were given a gradient."""

    def attach(self, observer: UnitObserver) -> Attached:
        """Report each gradient of a backward pass to ``observer``."""

    def pass_over(self) -> None:
        """A backward pass has come to its end: report the gradients that were held back until then."""

    def step_over(self, *, left: bool) -> None:
        """A step ends, and is to be merged: forget all of its passes if it was ``left``, late or by an error.

        Raises ``RuntimeError`` if gradients of the step are where they cannot be merged.
        """

    def keep(self, merged: Sequence[Tensor | None]) -> KeptGradients:
        """A step is entered: the gradients that are there already; ``merged``: those of the step before."""

    def place(self, gradients: Sequence[Tensor | None]) -> None:
        """Give every parameter its merged gradient, one for each slot; ``None``: it has none in this step."""

    def module_state(self) -> dict[str, Any]:
        """The module's state for a rank that comes back, as `load_module` there takes it."""

    def load_module(self, state: Mapping[str, Any]) -> None:
        """Load what `module_state` was on another rank."""

    def given(self, state: Any) -> Any:
        """A state of model and optimizer as it is sent to the rank with the same slots in another replica."""

    def taken(self, state: Any) -> Any:
        """What `given` was called with there, as a state of this rank."""

    def of_parameters(self, gradients: Mapping[int, Tensor]) -> Sequence[tuple[nn.Parameter, Tensor]]:
        """Some parameters with their merged gradients, as an optimizer reads them."""
