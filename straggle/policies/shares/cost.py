"""The expected cost of each rank's step: a long batch takes longer, and does not make its rank late.

With ``c`` a rank's cost and ``m`` the mean cost of the first step that has any, times are ``t * m / c`` in the history,
and a deadline of ``d`` seconds is ``d * c / m`` for that rank. If the user gives no cost, it is the number of the
step's micro-batches, unless work is dealt out by speed: a rank that has fewer because it is slow must have the same
deadline as the others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from straggle.policies.deadline import is_number


@dataclass(frozen=True)
class UsualCost:
    """The cost of a step whose times need no scaling: as the user gave it, and in micro-batches.

    NaN: unknown, or, for micro-batches, not used as the cost.
    """

    given: float = math.nan
    microbatches: float = math.nan

    def relative(self, cost: float, num_microbatches: float) -> float:
        """How many times as long a step with this cost (NaN: none given) and so many micro-batches takes."""
        relative = cost / self.given
        return self.by_number(num_microbatches) if math.isnan(relative) else relative

    def by_number(self, num_microbatches: float) -> float:
        """How many times as long a step of so many micro-batches without a cost takes."""
        relative = num_microbatches / self.microbatches
        return 1.0 if math.isnan(relative) else relative

    def relative_of(self, costs: Sequence[float], num_microbatches: Sequence[float]) -> list[float]:
        """`relative` for each rank; one that did not enter the step (NaN) gets as many micro-batches as the others."""
        mean = mean_cost_of(num_microbatches)
        numbers = (mean if math.isnan(number) else number for number in num_microbatches)
        return [self.relative(cost, number) for cost, number in zip(costs, numbers, strict=True)]


def check_cost(cost: float) -> None:
    """Raise ``ValueError`` unless this is a cost."""
    if not is_number(cost) or not 0 < cost < math.inf:
        raise ValueError(f"cost={cost}: must be a positive number, such as the tokens of this rank's step")


def relative_costs(costs: Sequence[float], number: int) -> tuple[float, ...]:
    """Of ``number`` micro-batches, over their mean. Raises ``ValueError`` for others than so many positive numbers."""
    own = [float(cost) for cost in costs]
    if len(own) != number or not all(0 < cost < math.inf for cost in own):
        raise ValueError(
            f"step.pull(costs=...): {number} micro-batches need as many positive costs, such as tokens, not {own}"
        )
    mean = math.fsum(own) / number
    return tuple(cost / mean for cost in own)


def mean_cost_of(costs: Sequence[float]) -> float:
    """The mean over the ranks whose cost is known (not NaN); NaN if none is."""
    known = [cost for cost in costs if not math.isnan(cost)]
    return math.fsum(known) / len(known) if known else math.nan


def longest_first(costs: Sequence[float], speeds: Sequence[float]) -> list[list[int]]:
    """The places in ``costs``, in descending order, that each rank gets so that all end together; at speed 0 none.

    Longest processing time first: Graham, "Bounds on multiprocessing timing anomalies" (1969, section 4), and for
    unequal speeds Gonzalez, Ibarra and Sahni, "Bounds for LPT schedules on uniform processors" (1977).
    None of the others is left without any as long as there are enough. The same on every machine: it takes sums,
    quotients and comparisons only.
    """
    # of ranks that are equally fast, the one with the least is done first: one heap for each speed
    heaps: dict[float, list[tuple[float, int]]] = {}
    for rank, speed in enumerate(speeds):
        if speed > 0:
            heaps.setdefault(speed, []).append((0.0, rank))
    own: list[list[int]] = [[] for _ in speeds]
    num_empty = sum(map(len, heaps.values()))
    for place, cost in enumerate(costs):
        only_empty = len(costs) - place <= num_empty
        among = [speed for speed in heaps if not (only_empty and heaps[speed][0][0])]
        speed = min(among or heaps, key=lambda speed: ((heaps[speed][0][0] + cost) / speed, heaps[speed][0][1]))
        load, rank = heaps[speed][0]
        heapq.heapreplace(heaps[speed], (load + cost, rank))
        num_empty -= not own[rank]
        own[rank].append(place)
    return own
