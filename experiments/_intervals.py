"""How sure the mean over runs with different seeds is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

from straggle.observe.intervals import Interval


def mean_interval(values: Sequence[float]) -> Interval:
    """The 95 % interval of the mean of independent values, by Student's t; unbounded for a single one."""
    mean = fmean(values)
    half = _t975(len(values) - 1) * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Interval(mean, mean - half, mean + half)


def difference_interval(values: Sequence[float], reference: Sequence[float]) -> Interval:
    """The interval of the mean difference between runs of the same seeds."""
    return mean_interval([value - other for value, other in zip(values, reference, strict=True)])


_FEW = (12.706, 4.303, 3.182, 2.776, 2.571)  # for 1 to 5 degrees of freedom


def _t975(degrees: int) -> float:
    """Student's t at 0.975; from 6 degrees of freedom on from the normal quantile (Abramowitz and Stegun, 26.7.5)."""
    if degrees <= len(_FEW):
        return _FEW[degrees - 1]
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
