"""Whose gradients come in, and from how deep in the model: what truncating always the same rank does to its data.

`c[r, k]` is the weight that rank `r` contributed to stage `k`, summed over steps, and `w[r]` the sum of the rank's own
weights. Then stage `k` got the share `sum_r c[r, k] / sum_r w[r]`. Stages are in the order of backward: the last one is
next to the input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from straggle.report import StepReport


@dataclass(frozen=True)
class Fairness:
    """``stages``: the share of each stage that came in; ``ranks``: each rank's contribution over the mean of all.

    In ``ranks``, 1.0 is the mean contribution, and 0 is none. ``input_ranks`` is the same for only the last stage of
    backward, at the input. Only gradients that a rank computed count, not estimates. All values are NaN without a step.
    """

    stages: tuple[float, ...]
    ranks: tuple[float, ...]
    input_ranks: tuple[float, ...]

    @property
    def depth_bias(self) -> float:
        """Share of backward's first stage that came in, minus the last one's: 0.25 if one of 4 never gets there."""
        return self.stages[0] - self.stages[-1] if self.stages else math.nan

    @property
    def index(self) -> float:
        """Jain's index over the ranks' contributions."""
        return jain_index(self.ranks)

    @property
    def input_index(self) -> float:
        """Jain's index over the ranks' contributions to the stage at the input."""
        return jain_index(self.input_ranks)

    @property
    def least(self) -> float:
        """Contribution of the rank that gave least, relative to the mean."""
        return min(self.ranks, default=math.nan)

    @property
    def input_least(self) -> float:
        """The same in the stage at the input."""
        return min(self.input_ranks, default=math.nan)


def jain_index(values: Sequence[float]) -> float:
    """``sum(x)**2 / (n * sum(x**2))``: 1 where all are equal, ``1 / n`` where one has all; NaN where no rank has any.

    Source: Jain, Chiu, Hawe, "A quantitative measure of fairness and discrimination" (DEC-TR-301, 1984).
    """
    squares = math.fsum(value * value for value in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares > 0 else math.nan


class Contributions:
    """What each rank has contributed, step after step."""

    def __init__(self) -> None:
        self._stages: tuple[tuple[str, int], ...] | None = None
        self._ranks: list[float] = []
        self._given: list[list[float]] = []  # by rank and stage
        self._weight = 0.0  # weight that the ranks had to give to each stage

    def add(self, report: StepReport) -> None:
        """One more step."""
        self._begin(tuple((stage.name, stage.numel) for stage in report.stages), len(report.ranks))
        for number, rank in enumerate(report.ranks):
            known = len(rank.stages) == len(report.stages) and math.isfinite(rank.reach)  # a trace may lack them
            weight, reach = (rank.weight, rank.reach) if known and not (rank.idle or rank.absent) else (0.0, 0.0)
            shares = rank.stages if known else (0.0,) * len(report.stages)
            self._weight += weight
            self._ranks[number] += weight * reach
            given = zip(self._given[number], shares, strict=True)
            self._given[number] = [before + weight * share for before, share in given]

    def fairness(self) -> Fairness:
        """The fairness of all steps until now."""
        weight = self._weight or math.nan
        stages = tuple(math.fsum(column) / weight for column in zip(*self._given, strict=True))
        at_input = [given[-1] for given in self._given if given]
        return Fairness(stages, _relative(self._ranks), _relative(at_input))

    def _begin(self, stages: tuple[tuple[str, int], ...], num_ranks: int) -> None:
        """Start again with these stages and this number of ranks."""
        if num_ranks != len(self._ranks):
            self._ranks, self._stages = [0.0] * num_ranks, None
        if stages != self._stages:
            self._stages, self._weight = stages, 0.0
            self._given = [[0.0] * len(stages) for _ in range(num_ranks)]


def _relative(values: Sequence[float]) -> tuple[float, ...]:
    mean = math.fsum(values) / len(values) if values else 0.0
    return tuple(value / mean if mean else math.nan for value in values)
