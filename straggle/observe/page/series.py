"""Series of numbers as a figure shows them: no more points than pixels, and unknown values left out."""

from __future__ import annotations

import math

import numpy as np

from straggle.observe.numbers.run import Array

MAX_POINTS = 600  # of a line


def cumulative(seconds: Array) -> tuple[Array, Array]:
    """The values in order, and the share of values that are at most each of them; thinned."""
    known = np.sort(seconds[np.isfinite(seconds)])
    share = np.arange(1, len(known) + 1) / max(1, len(known))
    kept = np.unique(np.linspace(0, len(known) - 1, min(len(known), MAX_POINTS)).round().astype(int))
    return known[kept], share[kept]


def thinned(x: Array, y: Array) -> tuple[Array, Array]:
    """At most `MAX_POINTS` points: means over equal numbers of neighbours, so that sums do not change."""
    size = math.ceil(len(x) / MAX_POINTS)
    if size == 1:
        return x, y
    starts = range(0, len(x), size)
    middle = np.array([x[at : at + size].mean() for at in starts])
    return middle, np.array([mean_of_known(y[at : at + size], axis=0) for at in starts])


def running_mean(values: Array, length: int) -> Array:
    """At each place, the mean of the last ``length`` known values."""
    known = np.isfinite(values)
    sums, counts = (np.concatenate([[0.0], np.cumsum(row)]) for row in (np.where(known, values, 0.0), known))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - length)
    count = counts[ends] - counts[starts]
    return np.asarray(np.divide(sums[ends] - sums[starts], count, out=np.full(len(values), np.nan), where=count > 0))


def mean_of_known(values: Array, axis: int) -> Array:
    """The mean of the known values; NaN if there are none."""
    known = np.isfinite(values)
    count = known.sum(axis=axis)
    total = np.where(known, values, 0.0).sum(axis=axis)
    return np.asarray(np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count > 0))
