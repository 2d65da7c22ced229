"""Ranks that are slow in some steps: what a rank does not finish by the deadline costs it time later, or nothing.

Times are relative to an undisturbed rank's step. A rank that takes ``f`` times as long as others, with work of ``b``
left from the step before, has done ``(DEADLINE - b) / f`` of its step when its deadline is over. The first `FORWARD` of
that is the forward pass.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Generator, Tensor

from straggle.lab.learning.lateness import LatePattern

DEADLINE = 1.1
FORWARD = 1 / 3


@final
class Paced(LatePattern):
    """In each step ``late`` ranks complete a share of the backward pass that is drawn uniformly from 0 to 1.

    They are drawn again for each step, or ``always`` the last ones. Where late ranks stop, the step is over for them.
    With ``finishes_late`` (`Carry`) one that has come into its backward pass goes on with it in its peers' next steps;
    it begins its own next step later, or misses it.
    """

    def __init__(self, late: int, *, always: bool, finishes_late: bool) -> None:
        self.late = late
        self.always = always
        self.finishes_late = finishes_late
        self._left: Tensor | None = None  # what each rank still has to do of a step that is merged

    def reached(self, num_ranks: int, num_units: int, generator: Generator) -> Tensor:
        return self.finished(self._factors(num_ranks, generator), num_units)

    def finished(self, factor: Tensor, num_units: int) -> Tensor:
        """The units that each rank finishes in the next step, where it takes ``factor`` times as long as usual."""
        left = torch.zeros(len(factor)) if self._left is None else self._left
        done = ((DEADLINE - left) / factor).clamp(0, 1)
        if self.finishes_late:
            goes_on = (done > FORWARD) & (done < 1)
            self._left = torch.where(done > 0, goes_on * factor * (1 - done), left - DEADLINE)
        backward = ((done - FORWARD) / (1 - FORWARD)).clamp(min=0)
        backward = torch.where(done == 1, 1.0, backward)  # whatever the rounding
        return torch.arange(num_units) < (backward * num_units).floor().unsqueeze(1)

    def _factors(self, num_ranks: int, generator: Generator) -> Tensor:
        """How much longer than usual each rank takes."""
        order = torch.randperm(num_ranks, generator=generator)
        ranks = torch.arange(num_ranks - self.late, num_ranks) if self.always else order[: self.late]
        share = torch.rand(self.late, generator=generator)
        factor = torch.ones(num_ranks)
        factor[ranks] = DEADLINE / (FORWARD + (1 - FORWARD) * share)
        return factor
