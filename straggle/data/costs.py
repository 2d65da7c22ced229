"""What samples cost, and which of them each rank has in a step by that: the longest first.

The samples of a step are those of a deal by number, so that the merged gradient is the same to rounding; only who
computes which is another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from straggle.policies.shares.cost import longest_first

Cost = Callable[[int], float] | Sequence[float]


def costs_of(cost: Cost, number: int) -> Tensor:
    """float64 of shape (number,): of each sample, by the function of a sample's number, or by the sequence of numbers.

    Raises ``ValueError`` for a sequence of another length, and for a cost that is not positive and finite.
    """
    if not callable(cost) and len(cost) != number:
        raise ValueError(f"cost has {len(cost)} numbers for {number} samples: give one for each, or a function")
    given = (cost(sample) if callable(cost) else cost[sample] for sample in range(number))
    return torch.tensor([_checked(sample, own) for sample, own in enumerate(given)], dtype=torch.float64)


def _checked(sample: int, given: object) -> float:
    try:
        own = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        own = math.nan
    if not 0 < own < math.inf:
        raise ValueError(f"cost of sample {sample} is {given!r}: must be a positive number, such as its tokens")
    return own


@dataclass(frozen=True)
class Costs:
    """What each sample costs, ``of_samples``; ``unit`` samples of a similar cost are dealt together.

    ``of_samples``: float64 of shape (samples,).
    """

    of_samples: Tensor
    unit: int = 1

    @cached_property
    def _mean(self) -> float:
        """Of ``unit`` samples."""
        return self.unit * math.fsum(self.of_samples.tolist()) / len(self.of_samples)

    def of(self, samples: Tensor) -> float:
        """Of these samples together, in mean units."""
        return math.fsum(self.of_samples[samples].tolist()) / self._mean

    def deal(self, samples: Tensor, shares: Sequence[int]) -> list[Tensor]:
        """The samples of each rank, of which a rank with twice the share gets twice the cost, as nearly as may be.

        ``samples``: int64 numbers of a step. Each rank's come in order, the longest first.
        """
        order = samples[self.of_samples[samples].argsort(descending=True, stable=True)]
        units = torch.split(order, self.unit)
        own = longest_first([self.of(unit) for unit in units], shares)
        return [torch.cat([order[:0], *(units[place] for place in places)]) for places in own]
