"""A leaf's telemetry: its parents put it into the merge, with what came of its gradients in time.

The parent of the last bucket has the leaf's row, if that came. Which buckets came in time each parent knows for its own
ones: it adds a mark to the shares of their stages. So the sum over the ranks says both, and no message is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from straggle.merge.telemetry import CAUSE, LEAF_SINCE, STANDING, Row, stage_columns
from straggle.report import CAUSES, PHASES

_MARK = 2.0  # more than any share
_LINK = CAUSES.index("link")


def missing_row(num_stages: int, last: Tensor | None) -> Tensor:
    """What stands for the row of a leaf that did not come in time: its buckets that did were complete.

    ``last``: the last one that came.
    """
    all_of_it = (1.0,) * num_stages
    row = Row(
        dict.fromkeys(PHASES, 0.0),
        compute_s=math.nan,
        busy_s=0.0,
        cause=_LINK,
        computed=all_of_it,
        estimated=(0.0,) * num_stages,
        stage_s=(math.nan,) * num_stages,
    )
    encoded = row.encode()
    if last is not None:
        encoded[STANDING] = last[STANDING]
    return encoded


def put_row(rows: Tensor, leaf: int, row: Tensor | None) -> None:
    """Before the merge of ``rows``: this parent's part of the leaf's row; ``None``: another parent has it."""
    rows[leaf].zero_()
    if row is not None:
        rows[leaf] = row


def mark(rows: Tensor, leaf: int, stages: Iterable[int], num_stages: int) -> None:
    """Before the merge: what the leaf gave of these stages came in time."""
    first = stage_columns(num_stages)[0].start
    for stage in stages:
        rows[leaf, first + stage] += _MARK


def read_marks(rows: Tensor, leaves: Mapping[int, int], num_stages: int) -> None:
    """After the merge, on all ranks: the leaves' rows without what did not come in time.

    ``leaves``: since which step each of them is one.
    """
    computed, estimated, _, weights = stage_columns(num_stages)
    for leaf, since in leaves.items():
        row = rows[leaf]
        row[LEAF_SINCE] = since
        came = row[computed] >= _MARK
        row[computed] = (row[computed] - _MARK) * came
        row[estimated] *= came
        row[weights] *= came
        if not bool(came.all()) and row[CAUSE] < 0:
            row[CAUSE] = _LINK
