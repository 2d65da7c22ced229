"""How sure a mean over the steps of one run is: steps that follow one another are alike, so whole blocks are drawn.

And how sure what a comparison will say, whose two runs are yet to come.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from straggle.advise.timings import Array

LEVEL = 0.9  # of the intervals
_DRAWS = 1000


@dataclass(frozen=True)
class Interval:
    """A number, and between which it lies in nine of ten runs like this one."""

    value: float
    low: float
    high: float


def interval(statistic: Callable[..., Array], *columns: Array, seed: int = 0) -> Interval:
    """A function of the means of columns over the same steps, by the moving block bootstrap (Künsch 1989)."""
    draws = _draw(len(columns[0]), seed)
    drawn = statistic(*(column[draws].mean(axis=1) for column in columns))
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(statistic(*(column.mean() for column in columns))), float(low), float(high))


def predicted(statistic: Callable[..., Array], *columns: Array, seed: int = 0) -> Interval:
    """What a comparison of two runs to come, of as many steps each, will say: the last column is the second run's.

    Three things are drawn apart from one another, so that the interval is wider than `interval`: where the means lie,
    of which these steps are all that is known, and how far either run strays from them. Few blocks stray less than
    what they are drawn from: the interval is stretched for that (`_stretch`).
    """
    means, first, second = (_draw(len(columns[0]), seed + part) for part in range(3))
    drawn = [column[means].mean(axis=1) * column[first].mean(axis=1) / column.mean() for column in columns[:-1]]
    last = columns[-1][means].mean(axis=1) * columns[-1][second].mean(axis=1) / columns[-1].mean()
    low, high = np.quantile(statistic(*drawn, last), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    value, stretch = float(statistic(*(column.mean() for column in columns))), _stretch(len(columns[0]))
    return Interval(value, value - stretch * (value - float(low)), value + stretch * (float(high) - value))


def _stretch(steps: int) -> float:
    """How much wider than its draws an interval is: Student's quantile over the normal one (the first term of its
    expansion in 1 / freedom), and the root of the variance that means of ``length`` steps out of ``steps`` lack.
    """
    length = _length(steps)
    freedom, z = max(1, steps // length - 1), NormalDist().inv_cdf((1 + LEVEL) / 2)
    return (1 + (z * z + 1) / (4 * freedom)) * math.sqrt(steps / max(1, steps - length))


def span(one: Interval, other: Interval) -> Interval:
    """From the lower low to the higher high; the value is the first one's."""
    return Interval(one.value, min(one.low, other.low), max(one.high, other.high))


def _length(steps: int) -> int:
    return max(1, round(math.sqrt(steps)))


def _draw(steps: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Positions of resampled steps, shape (draws, steps): blocks of about the square root of their number."""
    length = _length(steps)
    blocks = -(-steps // length)
    begin = np.random.default_rng(seed).integers(steps - length + 1, size=(_DRAWS, blocks, 1))
    positions: np.ndarray[tuple[int, int], np.dtype[np.int64]] = (begin + np.arange(length)).reshape(_DRAWS, -1)
    return positions[:, :steps]
