"""What a step costs each rank by right: a long batch takes longer, and is not late for that.

With ``c`` a rank's cost and ``m`` the mean cost of the first step that has any, times are ``t * m / c`` in the history,
and a deadline of ``d`` seconds is ``d * c / m`` for that rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from straggle.policies.deadline import is_number


def check_cost(cost: float) -> None:
    """Raise ``ValueError`` for what is no cost."""
    if not is_number(cost) or not 0 < cost < math.inf:
        raise ValueError(f"cost={cost}: must be a positive number, such as the tokens of this rank's step")


def mean_cost_of(costs: Sequence[float]) -> float:
    """The mean over the ranks that gave one (NaN: it did not); NaN where none did."""
    known = [cost for cost in costs if not math.isnan(cost)]
    return math.fsum(known) / len(known) if known else math.nan


def relative_cost(cost: float, mean_cost: float) -> float:
    """How much longer than usual a step of this cost takes; 1 where one of the two is not known."""
    relative = cost / mean_cost
    return 1.0 if math.isnan(relative) else relative
