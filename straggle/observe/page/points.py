"""What figures draw, as numbers and words: the heat map of ranks by steps, which says what is missing, and series."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from straggle.observe.numbers.run import Array, Run
from straggle.report import CAUSES, PHASES

MAX_POINTS = 600  # of a line
MAX_ROWS = 96
NO_DATA, ABSENT = -1.0, -2.0
_MAX_CELLS = 16_000


_NOTHING = {NO_DATA: "no data", ABSENT: "absent"}


@dataclass(frozen=True)
class Cells:
    """``missing`` and ``texts``, by row (ranks) and column (steps), and where gradients were not finite.

    ``missing``: the share of the gradients that did not come in; -1: no data; -2: absent; NaN: no such rank or step.
    ``num_ranks`` and ``num_steps``: those in one cell, which has their mean. ``nonfinite``: pairs of step and rank.
    """

    missing: Array
    texts: list[list[str]]
    nonfinite: list[tuple[float, float]]
    num_ranks: int
    num_steps: int


def cells_of(run: Run) -> Cells:
    """The cells of a run, at most `MAX_ROWS` by `MAX_POINTS` of them."""
    num_ranks = math.ceil(run.num_ranks / MAX_ROWS)
    num_columns = min(MAX_POINTS, max(60, _MAX_CELLS // math.ceil(run.num_ranks / num_ranks)))
    num_steps = math.ceil(run.num_steps / num_columns)
    of_rank = np.where(run.ranks["idle"] == 1, NO_DATA, 1 - run.ranks["reach"])
    of_rank = np.where(run.ranks["absent"] == 1, ABSENT, of_rank)
    rows = [slice(at, at + num_ranks) for at in range(0, run.num_ranks, num_ranks)]
    columns = [slice(at, at + num_steps) for at in range(0, run.num_steps, num_steps)]
    missing = np.full((len(rows), len(columns)), np.nan)
    texts, nonfinite = list[list[str]](), list[tuple[float, float]]()
    for y, row in enumerate(rows):
        texts.append([])
        for x, column in enumerate(columns):
            missing[y, x] = _missing(of_rank[column, row])
            texts[-1].append(_text(run, row, column, missing[y, x]))
            if (run.ranks["nonfinite"][column, row] > 0).any():
                middle = run.step[0] + x * num_steps + (num_steps - 1) / 2
                nonfinite.append((float(middle), y * num_ranks + (num_ranks - 1) / 2))
    return Cells(missing, texts, nonfinite, num_ranks, num_steps)


def _missing(of_rank: Array) -> float:
    with_data = of_rank[of_rank >= 0]
    if with_data.size:
        return float(with_data.mean())
    return next((why for why in (ABSENT, NO_DATA) if (of_rank == why).any()), math.nan)


def _cell_words(run: Run, row: slice, column: slice) -> str:
    """Which ranks in which steps."""
    steps = run.step[column]
    where = run.replicas.from_to(row.start, min(row.stop, run.num_ranks) - 1)
    when = f"step {steps[0]:.0f}" if len(steps) == 1 else f"steps {steps[0]:.0f} to {steps[-1]:.0f}"
    return f"{where}, {when}"


def _text(run: Run, row: slice, column: slice, value: float) -> str:
    where = _cell_words(run, row, column)
    if math.isnan(value) or value < 0:
        return f"{where}: {_NOTHING.get(value, 'not known')}"
    of = {name: run.ranks[name][column, row] for name in ("late", "stood_in", "cause", "nonfinite")}
    late = of["late"] == 1
    others = [CAUSES[int(cause)] for cause in of["cause"][~late].tolist() if not math.isnan(cause)]
    if others and not late.any():
        return f"{where}: {_missing_text(others)}<br>{1 - value:.0%} of its gradients came in"
    if not late.any():
        return f"{where}: in time" + _nonfinite_text(of["nonfinite"])
    causes = [PHASES[int(cause)] for cause in of["cause"][late].tolist() if not math.isnan(cause)]
    stood_in = int((of["stood_in"] == 1).sum())
    if late.size == 1:
        what = f"late in {causes[0]}" if causes else "late"
        what += ", stood in for" if stood_in else ""
    else:
        counts = ", ".join(f"{cause} {causes.count(cause)}" for cause in PHASES if cause in causes)
        what = f"late {late.sum()} of {late.size} times ({counts})" + (f", stood in for {stood_in}" if stood_in else "")
    return f"{where}: {what}<br>{1 - value:.0%} of its gradients came in" + _nonfinite_text(of["nonfinite"])


def _missing_text(causes: Sequence[str]) -> str:
    """What is missing from ranks that were not late."""
    words = {
        "error": "after an error in backward",
        "skipped": "without a backward pass",
        "members": "as the members changed",
    }
    return ", ".join(f"{words[cause]}: {causes.count(cause)}" for cause in words if cause in causes)


def _nonfinite_text(nonfinite: Array) -> str:
    number = int(np.nansum(nonfinite))
    return f"<br>gradients that were not finite: {number}" if number else ""


# -- series: no more points than pixels, and unknown values left out


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
