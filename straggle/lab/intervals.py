"""Means over runs with different seeds, and how sure they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its 95 % interval: infinite for a single value, and not printed then."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half

    def __format__(self, spec: str) -> str:
        spec = spec or ".2f"
        return f"{self.mean:{spec}}" + (f" +- {self.half:{spec.lstrip('+')}}" if self.half < math.inf else "")

    def __str__(self) -> str:
        return format(self)


def interval(values: Sequence[float]) -> Interval:
    """The 95 % interval of the mean of independent values, by Student's t."""
    if len(values) < 2:
        return Interval(fmean(values), math.inf)
    return Interval(fmean(values), _t975(len(values) - 1) * stdev(values) / math.sqrt(len(values)))


def paired(values: Sequence[float], reference: Sequence[float]) -> Interval:
    """The interval of the mean difference between runs of the same seeds."""
    return interval([value - other for value, other in zip(values, reference, strict=True)])


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
