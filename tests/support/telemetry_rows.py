"""Rows of telemetry, made from their numbers whoever declares them."""

from straggle.merge.rows.telemetry import Row
from straggle.report import PHASES, RankNumbers
from straggle.schema import numbers_of

TOLD = {own.name for own in numbers_of(RankNumbers)}


def row_of(*, compute_s=0.0, busy_s=0.0, times=None, **fields):
    """A row; what is not given has its default, and phases took no time."""
    told = {name: fields.pop(name) for name in TOLD & fields.keys()}
    times = dict.fromkeys(PHASES, 0.0) | (times or {})
    return Row(times, RankNumbers(compute_s=compute_s, **told), busy_s, **fields)
