"""What a step is expected to cost each rank: a long batch takes longer, and is not late for that.

With ``c`` a rank's cost and ``m`` the mean cost of the first step that has any, times are ``t * m / c`` in the history,
and a deadline of ``d`` seconds is ``d * c / m`` for that rank. If the user gives no cost, it is the number of the
step's micro-batches, unless work is dealt out by speed: a rank that has fewer because it is slow is to have the
deadline of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from straggle.policies.deadline import is_number


@dataclass(frozen=True)
class UsualCost:
    """What a step costs whose times are as they were measured: as the user gave it, and in micro-batches.

    NaN: not known, or, of micro-batches, not what a step costs.
    """

    given: float = math.nan
    microbatches: float = math.nan

    def relative(self, cost: float, num_microbatches: float) -> float:
        """How much longer a step with this cost takes (NaN: none was given), of so many micro-batches."""
        relative = cost / self.given
        return self.by_number(num_microbatches) if math.isnan(relative) else relative

    def by_number(self, num_microbatches: float) -> float:
        """The same of a step without a cost of its own."""
        relative = num_microbatches / self.microbatches
        return 1.0 if math.isnan(relative) else relative

    def relative_of(self, costs: Sequence[float], num_microbatches: Sequence[float]) -> list[float]:
        """The same for each rank; one that did not enter the step (NaN) has as many micro-batches as the others."""
        mean = mean_cost_of(num_microbatches)
        numbers = (mean if math.isnan(number) else number for number in num_microbatches)
        return [self.relative(cost, number) for cost, number in zip(costs, numbers, strict=True)]


def check_cost(cost: float) -> None:
    """Raise ``ValueError`` for what is no cost."""
    if not is_number(cost) or not 0 < cost < math.inf:
        raise ValueError(f"cost={cost}: must be a positive number, such as the tokens of this rank's step")


def mean_cost_of(costs: Sequence[float]) -> float:
    """The mean over the ranks of which it is known (not NaN); NaN if it is of none."""
    known = [cost for cost in costs if not math.isnan(cost)]
    return math.fsum(known) / len(known) if known else math.nan
