"""A number and how sure it is: from turns of two jobs, and from the steps of one run.

Adjacent steps are alike, so steps are resampled in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
LEVEL = 0.9  # of the intervals over steps; those over turns have 0.95
_DRAWS = 1000
_TURN_DRAWS = 2000


@dataclass(frozen=True)
class Interval:
    """A number, and the interval in which it lies; an end that is not finite is unknown or unbounded."""

    value: float
    low: float
    high: float


def span(one: Interval, other: Interval) -> Interval:
    """From the lower low to the higher high; the value is the first one's."""
    return Interval(one.value, min(one.low, other.low), max(one.high, other.high))


# -- turns


def ratio_interval(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Our sum divided by theirs, from turns that alternate, with a 95 % bootstrap interval.

    The interval is over pairs of turns: it shows the noise within this run, not between runs.
    """
    turns = np.random.default_rng(0).integers(len(ours), size=(_TURN_DRAWS, len(ours)))
    ratios = np.sort(np.asarray(ours)[turns].sum(axis=1) / np.asarray(theirs)[turns].sum(axis=1))
    low, high = float(ratios[_TURN_DRAWS // 40]), float(ratios[-_TURN_DRAWS // 40 - 1])
    return Interval(sum(ours) / sum(theirs), low, high)


# -- steps


def steps_interval(statistic: Callable[..., Array], *columns: Array, seed: int = 0) -> Interval:
    """A function of the means of columns over the same steps, by the moving block bootstrap (Künsch 1989)."""
    begins = _draw(len(columns[0]), seed)
    drawn = statistic(*(_means(column, begins) for column in columns))
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(statistic(*(column.mean() for column in columns))), float(low), float(high))


def prediction_interval(statistic: Callable[..., Array], *columns: Array, seed: int = 0) -> Interval:
    """What a comparison of two future runs with as many steps each will show; the last column is the second run's.

    Three things are resampled independently, so the interval is wider than `steps_interval`: the true means, which are
    known from these steps only, and each run's deviation from them. Means of few blocks vary less than what the blocks
    are drawn from, and the interval is stretched for that (`_stretch`).
    """
    means, first, second = (_draw(len(columns[0]), seed + part) for part in range(3))
    drawn = [_means(column, means) * _means(column, first) / column.mean() for column in columns[:-1]]
    last = _means(columns[-1], means) * _means(columns[-1], second) / columns[-1].mean()
    low, high = np.quantile(statistic(*drawn, last), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    value, stretch = float(statistic(*(column.mean() for column in columns))), _stretch(len(columns[0]))
    low, high = value - stretch * (value - float(low)), value + stretch * (float(high) - value)
    return Interval(value, min(value, low), max(value, high))  # the first steps, and the last, are in few of the blocks


def _stretch(steps: int) -> float:
    """How much wider than its draws an interval is: Student's quantile over the normal one (the first term of its
    expansion in 1 / freedom), and the root of the variance that means of ``length`` steps out of ``steps`` lack.
    """
    length = _length(steps)
    freedom, z = max(1, steps // length - 1), NormalDist().inv_cdf((1 + LEVEL) / 2)
    return (1 + (z * z + 1) / (4 * freedom)) * math.sqrt(steps / max(1, steps - length))


def _length(steps: int) -> int:
    return max(1, round(math.sqrt(steps)))


@lru_cache(maxsize=64)
def _draw(steps: int, seed: int) -> NDArray[np.int64]:
    """Where blocks of resampled steps begin, shape (draws, blocks): of about the square root of their number."""
    length = _length(steps)
    return np.random.default_rng(seed).integers(steps - length + 1, size=(_DRAWS, -(-steps // length)))


def _means(column: Array, begins: NDArray[np.int64]) -> Array:
    """The column's mean over each draw's steps; the last block has those that are left, so that each has as many."""
    steps, whole = len(column), begins.shape[1] - 1
    length = _length(steps)
    blocks, lasts = (sliding_window_view(column, size).sum(axis=1) for size in (length, steps - whole * length))
    means: Array = (blocks[begins[:, :-1]].sum(axis=1) + lasts[begins[:, -1]]) / steps
    return means
