"""Rows of telemetry, made from their numbers whoever declares them."""

from straggle.members import rows as of_members
from straggle.merge.rows.telemetry import Columns, Row
from straggle.pools import rows as of_pools
from straggle.report import PHASES, RankNumbers
from straggle.schema import numbers_of

TOLD = {own.name for own in numbers_of(RankNumbers)}
ALL_COLUMNS = Columns((*of_pools.COLUMNS, *of_members.COLUMNS))
_OF_WINGS = {column.name: column for column in ALL_COLUMNS.of_wings}


def row_of(*, compute_s=0.0, busy_s=0.0, times=None, **fields):
    """A row; what is not given has its default, and phases took no time."""
    told = {name: fields.pop(name) for name in TOLD & fields.keys()}
    times = dict.fromkeys(PHASES, 0.0) | (times or {})
    of_wings = {_OF_WINGS[name]: fields.pop(name) for name in _OF_WINGS.keys() & fields.keys()}
    return Row(times, RankNumbers(compute_s=compute_s, **told), busy_s, **fields, of_wings=of_wings)
