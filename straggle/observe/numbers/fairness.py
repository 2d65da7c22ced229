"""Whose gradients come in, and from how deep in the model: what truncating always the same rank does to its data.

`c[r, k]` is the weight that rank `r` contributed to stage `k`, summed over steps, and `w[r]` the sum of the rank's own
weights. Then stage `k` got the share `sum_r c[r, k] / sum_r w[r]`. Stages are in the order of backward: the last one is
next to the input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]


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
    """``sum(x)**2 / (n * sum(x**2))``: 1 if all are equal, ``1 / n`` if one has all; NaN if no rank has any.

    Source: Jain, Chiu, Hawe, "A quantitative measure of fairness and discrimination" (DEC-TR-301, 1984).
    """
    squares = math.fsum(value * value for value in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares > 0 else math.nan


def fairness_of(weight: Array, reach: Array, stage_share: Array) -> Fairness:
    """Of ranks whose steps had this ``weight`` and ``reach``, both (steps, ranks), with weight 0 if there was no data.

    ``stage_share``, (stages, ranks): the mean share of each stage that each rank computed.
    """
    own = weight.sum(axis=0)
    given = np.nan_to_num(stage_share) * own
    total = float(own.sum()) or math.nan
    return Fairness(
        tuple((given.sum(axis=1) / total).tolist()),
        _relative((weight * np.nan_to_num(reach)).sum(axis=0).tolist()),
        _relative(given[-1].tolist() if len(given) else []),
    )


def _relative(values: Sequence[float]) -> tuple[float, ...]:
    mean = math.fsum(values) / len(values) if values else 0.0
    return tuple(value / mean if mean else math.nan for value in values)
