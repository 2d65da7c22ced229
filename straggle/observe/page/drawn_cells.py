"""The heat map of what each rank drew of a step's pool, as numbers and words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from straggle.observe.page.cells import cell_sizes, cell_words
from straggle.observe.page.series import mean_of_known
from straggle.observe.run import Array, Run


@dataclass(frozen=True)
class DrawnCells:
    """``drawn``: micro-batches that a rank computed in a step, and ``texts``; by row (ranks) and column (steps).

    ``num_ranks`` and ``num_steps``: those in one cell, which has their mean. NaN: the step had no pool.
    """

    drawn: Array
    texts: list[list[str]]
    num_ranks: int
    num_steps: int


def drawn_cells(run: Run) -> DrawnCells:
    """The cells of a run, as many as of its lateness."""
    num_ranks, num_steps = cell_sizes(run)
    with_pool = run.pool_parts > 0
    parts = np.where(with_pool[:, None], run.ranks["parts"], np.nan)
    back = np.where(with_pool[:, None], run.ranks["put_back"], 0.0)
    rows = [slice(at, min(at + num_ranks, run.num_ranks)) for at in range(0, run.num_ranks, num_ranks)]
    columns = [slice(at, at + num_steps) for at in range(0, run.num_steps, num_steps)]
    drawn = np.array([[float(mean_of_known(parts[x, y].ravel(), axis=0)) for x in columns] for y in rows])
    texts = [
        [_text(run, y, x, number, int(np.nansum(back[x, y]))) for x, number in zip(columns, of_row, strict=True)]
        for y, of_row in zip(rows, drawn.tolist(), strict=True)
    ]
    return DrawnCells(drawn, texts, num_ranks, num_steps)


def _text(run: Run, row: slice, column: slice, number: float, put_back: int) -> str:
    where = cell_words(run, row, column)
    pool = run.pool_parts[column]
    if np.isnan(number):
        return f"{where}: {'not known' if (pool > 0).any() else 'no pool'}"
    of_pool = float(pool[pool > 0].mean())
    single = run.step[column].size == 1 and row.stop - row.start == 1
    text = f"{where}: drew {number:.0f} of {of_pool:.0f}" if single else f"{where}: drew {number:.1f} of {of_pool:.1f}"
    return text + (f", {put_back} put back" if put_back else "")
