"""A leaf's telemetry: its parents put it into the merge, with what came of its gradients in time.

The parent of the last bucket has the leaf's row, if that came. Which buckets came in time, and with what weight, each
parent knows for its own ones: it adds a mark to the shares of their stages, and writes their weights. So the sum over
the ranks says both, and no message is added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from straggle.merge.telemetry import CAUSE, COLUMN, LEAF_SINCE, STANDING, Row, stage_columns
from straggle.report import CAUSES, PHASES

_MARK = 2.0  # more than any share
_LINK = CAUSES.index("link")
_WEIGHT = COLUMN["weight"]


def missing_row(num_stages: int, last: Tensor | None) -> Tensor:
    """What stands for the row of a leaf that did not come in time, without a weight. ``last``: the last that came."""
    nothing = (0.0,) * num_stages
    row = Row(
        dict.fromkeys(PHASES, 0.0),
        compute_s=math.nan,
        busy_s=0.0,
        cause=_LINK,
        weight=math.nan,
        computed=nothing,
        estimated=nothing,
        stage_s=(math.nan,) * num_stages,
    )
    encoded = row.encode()
    if last is not None:
        encoded[STANDING] = last[STANDING]
    return encoded


def put_row(rows: Tensor, leaf: int, row: Tensor | None, num_stages: int) -> None:
    """Before the merge of ``rows``: this parent's part of the leaf's row; ``None``: another parent has it."""
    rows[leaf].zero_()
    if row is not None:
        rows[leaf] = row
        rows[leaf, stage_columns(num_stages).weights] = 0.0  # which `mark` says


def mark(rows: Tensor, leaf: int, weights: Mapping[int, float], num_stages: int) -> None:
    """Before the merge: what the leaf gave of these stages came in time, with this weight in the merge."""
    columns = stage_columns(num_stages)
    for stage, weight in weights.items():
        rows[leaf, columns.computed.start + stage] += _MARK
        rows[leaf, columns.weights.start + stage] = weight


def read_marks(rows: Tensor, leaves: Mapping[int, int], num_stages: int) -> None:
    """After the merge, on all ranks: the leaves' rows without what did not come in time.

    ``leaves``: since which step each of them is one. Where a leaf's row did not come, what did is taken for complete
    where it has most weight.
    """
    computed, estimated, _, weights = stage_columns(num_stages)
    pool_weight = rows[:, COLUMN["pool_weight"]].max()
    unit = pool_weight / len(rows) if pool_weight else 1.0  # a pool counts as one step of all ranks
    for leaf, since in leaves.items():
        row = rows[leaf]
        row[LEAF_SINCE] = since
        came = row[computed] >= _MARK
        row[computed] = (row[computed] - _MARK) * came
        row[estimated] *= came
        row[weights] *= unit
        if math.isnan(row[_WEIGHT]):
            row[_WEIGHT] = row[weights].max() or 1.0
            row[computed] = row[weights] / row[_WEIGHT]
            row[COLUMN["pool_parts"]] = rows[:, COLUMN["pool_parts"]].max()
        if row[_WEIGHT] > 0:
            row[weights] /= row[_WEIGHT]
        if not bool(came.all()) and row[CAUSE] < 0:
            row[CAUSE] = _LINK
