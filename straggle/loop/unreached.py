"""Zeros in the place of gradients that no rank has computed, from the end of a step until an optimizer looks at them.

An optimizer leaves a parameter without a gradient, and its state, alone, so that is what it is to find. But a
``GradScaler`` ends the loop of each rank if an optimizer has no gradient at all, as when what was on its way to a rank
that died is lost. With zeros it finds nothing infinite, the norm of what is clipped is 0, and nothing is missing.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


class Unreached:
    """The parameters that no rank has computed a gradient of in the last step; all on the training thread."""

    def __init__(self) -> None:
        self.there: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}  # what lies in ``p.grad``, and its memory

    def fill(self, parameter: nn.Parameter, gradient: Tensor, memory: Tensor) -> None:
        """Put zeros into ``p.grad`` if nothing is there: ``gradient``, which lies in ``memory``."""
        if parameter.grad is None:
            memory.zero_()
            parameter.grad = gradient
            self.there[parameter] = gradient, memory

    def clear(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Take the zeros of these parameters (default: all) out of ``p.grad``, but not what the loop has put there."""
        for parameter in [*self.there] if parameters is None else parameters:
            gradient, memory = self.there.pop(parameter, (None, None))
            if memory is not None and parameter.grad is gradient and not memory.any():
                parameter.grad = None
