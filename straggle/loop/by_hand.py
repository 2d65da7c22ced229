"""What lies in ``p.grad`` beside merged gradients: a loop's own work, and zeros where no rank has computed any.

Gradients that a loop puts there in the block are merged, as those of a backward pass are. A parameter that is written
to before the merge would become this rank's own, and is refused.

Zeros stay until an optimizer looks. It leaves a parameter without a gradient, and its state, alone, so that is what it
is to find. But a ``GradScaler`` ends the loop of each rank if an optimizer has no gradient at all, as when what was on
its way to a rank that died is lost. With zeros it finds nothing infinite, the norm of what is clipped is 0, and nothing
is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from straggle.backward.hooks import put_gradients, take_gradient
from straggle.merge.round.step_passes import Passes
from straggle.merge.wire.contents import fingerprint
from straggle.source.kept import KeptGradients
from straggle.source.source import GradientSource, named_tensors

_FIRST_STEPS = 3  # in which all elements are looked at: a write to parameter.data leaves no other trace
_STRIDED = torch.strided
_num_writes = attrgetter("_version")
_gradient, _NO_GRADIENT = attrgetter("grad"), {type(None)}


class ByHand:
    """The parameters of a model while a block is open.

    ``beside``: gradients that the loop has put there before the backward pass that began.
    """

    def __init__(self, source: GradientSource) -> None:
        self._source, self._slots, self._parameters = source, source.slots, source.all
        self._versions: list[int] = []
        self._sums: Sequence[int] | None = None  # of the bits of each, in a step that looks at them
        self._num_steps = 0
        self.beside: dict[int, Tensor] = {}

    def enter(self, *, checked: bool) -> None:
        """The block begins; ``checked``: the ranks compare what they hold in this step."""
        self._versions = [*map(_num_writes, self._parameters)]
        self.beside = {}
        self._num_steps += 1
        looks = checked or self._num_steps <= _FIRST_STEPS
        self._sums = fingerprint(named_tensors(self._slots)).sums if looks else None

    def take_beside(self, kept: KeptGradients, passes: Passes) -> None:
        """What the loop has put into ``p.grad`` is part of the entire step, not of the pass that would add to it.

        In a step of one pass it may stay there: what that gives is the entire step's. Raises if it cannot be weighed.
        """
        if passes.number == 1 and passes.follow_loop:
            return
        if set(map(type, map(_gradient, self._parameters))) == _NO_GRADIENT:
            return
        if beside := kept.take_put():
            passes.check_none_by_hand()
            self.check_gradients(beside, {})
        self.beside = beside

    def hand_on(self) -> dict[int, Tensor]:
        """These are given to the merge, or put back."""
        beside, self.beside = self.beside, {}
        return beside

    def check_parameters(self) -> None:
        """At its end, before the merge: raise ``RuntimeError`` naming the first parameter that was written to.

        Or that was unfrozen: its gradient would be this rank's own.
        """
        if names := self._source.unfrozen():
            raise RuntimeError(
                f"parameter {names[0]} was frozen when the step was entered, and unfrozen inside of `with "
                "model.step()`: its gradient cannot be merged in this step, so unfreeze parameters before the block"
            )
        if not (written := self._written()):
            return
        name, *more = written
        others = f" (and {len(more)} more)" if more else ""
        raise RuntimeError(
            f"parameter {name}{others} was written to inside of `with model.step()`, before the gradients of all ranks "
            "were merged: each rank writes its own there, or a late one nothing, and replicas would differ. Clamp, "
            "average or update parameters after optimizer.step(), outside of the block, and give them first values of "
            "data before wrapping (nn.Embedding(max_norm=...) and hooks that step an optimizer in backward write in it)"
        )

    def _written(self) -> list[str]:
        """The names of trainable parameters that are others than when the block began."""
        now, sums = [*map(_num_writes, self._parameters)], self._sums
        if now == self._versions and sums is None:
            return []
        changed = [then != own for then, own in zip(self._versions, now, strict=True)]
        if sums is not None:
            looked = zip(sums, fingerprint(named_tensors(self._slots)).sums, strict=True)
            changed = [was or then != own for was, (then, own) in zip(changed, looked, strict=True)]
        # one that is frozen is other state of the module, such as a momentum encoder that the forward pass moves
        slots = zip(self._slots, changed, strict=True)
        return [slot.name for slot, is_other in slots if is_other and slot.parameter.requires_grad]

    def check_gradients(self, gradients: Mapping[int, Tensor], kept: Mapping[int, Tensor]) -> None:
        """Raise ``ValueError`` naming the first of these gradients that cannot be merged.

        ``kept``: gradients of before the block that are to be added to the merged ones.
        """
        if names := self._source.frozen_with_gradients():
            raise ValueError(
                f"a gradient was put into p.grad of parameter {names[0]}, which is frozen, and so is not merged: "
                "unfreeze it before the block, or leave it out"
            )
        for index, gradient in gradients.items():
            name, tensor = self._slots[index].name, self._slots[index].tensor
            check_dense(name, gradient)
            for what in ("shape", "dtype", "device"):
                if (own := getattr(gradient, what)) != (theirs := getattr(tensor, what)):
                    raise ValueError(
                        f"the gradient that was put into p.grad of parameter {name} has the {what} {own}, and the "
                        f"parameter has {theirs}: give it that of the parameter"
                    )
            if index in kept:
                raise ValueError(
                    f"parameter {name} has a gradient of before the block, and another was put into its p.grad after a "
                    "backward pass: zero_grad() before the block"
                )

    def refuse_twice(self, twice: Sequence[int]) -> None:
        """Raise ``RuntimeError`` for parameters to which a backward pass of the step gave gradients, too."""
        name = self._slots[twice[0]].name
        raise RuntimeError(
            f"parameter {name} has a gradient of a backward pass in this step, and another was put "
            "into its p.grad by hand: the first is on its way already, and p.grad is None until all are merged. Change "
            "gradients by a hook (parameter.register_hook), compute them all by torch.autograd.grad, or change the "
            "merged ones after the block"
        )


def check_dense(name: str, gradient: Tensor) -> None:
    """Raise ``ValueError`` for a gradient that has no place in flat buffers."""
    if gradient.layout is not _STRIDED:
        raise ValueError(f"parameter {name} has a gradient of layout {gradient.layout}: use dense gradients")


class Unreached:
    """The parameters that no rank has computed a gradient of in the last step; all on the training thread."""

    def __init__(self) -> None:
        self.there: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}  # what lies in ``p.grad``, and its memory

    def fill(self, parameter: nn.Parameter, gradient: Tensor, memory: Tensor) -> None:
        """Put zeros into ``p.grad`` if nothing is there: ``gradient``, which lies in ``memory``."""
        if parameter.grad is None:
            memory.zero_()
            put_gradients([(parameter, gradient)])
            self.there[parameter] = gradient, memory

    def clear(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Take the zeros of these parameters (default: all) out of ``p.grad``, but not what the loop has put there."""
        for parameter in [*self.there] if parameters is None else parameters:
            gradient, memory = self.there.pop(parameter, (None, None))
            if memory is not None and parameter.grad is gradient and not memory.any():
                take_gradient(parameter)
