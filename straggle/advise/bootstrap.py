"""How sure a mean over the steps of one run is: steps that follow one another are alike, so whole blocks are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


def _draw(steps: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Positions of resampled steps, shape (draws, steps): blocks of about the square root of their number."""
    length = max(1, round(steps**0.5))
    blocks = -(-steps // length)
    begin = np.random.default_rng(seed).integers(steps - length + 1, size=(_DRAWS, blocks, 1))
    positions: np.ndarray[tuple[int, int], np.dtype[np.int64]] = (begin + np.arange(length)).reshape(_DRAWS, -1)
    return positions[:, :steps]
