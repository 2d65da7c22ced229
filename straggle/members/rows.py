"""What the rows of a merged step say of members that leave after it, or let others in: the same on all ranks."""

from __future__ import annotations

from straggle.merge.rows.table import Table
from straggle.merge.rows.telemetry import Column

ADMITS = Column("admits", unusual=True)  # it lets others in after this step
# it is to leave after this step, if so many others are left; 0: it stays
LEAVES = Column("leaves", unusual=True)
# a rank that is out, and of which it has heard what its own work takes, plus 1; the number of that, and its seconds
PROBED, PROBE_NUMBER, PROBE_S = Column("probed"), Column("probe_number"), Column("probe_s")
COLUMNS = (ADMITS, LEAVES, PROBED, PROBE_NUMBER, PROBE_S)


def admits_of(table: Table, rank: int) -> bool:
    """Whether this rank lets others in after this step."""
    return bool(table.told(ADMITS)[rank])


def admits(table: Table) -> bool:
    """Whether ranks are let in after this step."""
    return any(table.told(ADMITS))


def leaving_ranks(table: Table) -> frozenset[int]:
    """The ranks that leave after this step: those that are to, if the others may go on without them."""
    return frozenset() if table.is_usual else _departures(table)[0]


def is_last(table: Table) -> bool:
    """Whether this is the last step of all ranks: some are to leave, and too few would be left."""
    return not table.is_usual and _departures(table)[1]


def _departures(table: Table) -> tuple[frozenset[int], bool]:
    needs = table.told(LEAVES)
    leaving = frozenset(rank for rank, others in enumerate(needs) if others)
    left = set(range(table.num_ranks)) - table.absent_ranks() - leaving
    if len(left) < max(needs):
        return frozenset(), True
    # one of the others has to have the state of the job: otherwise they leave after a later step
    return leaving if left - table.stood_in_ranks() else frozenset(), False
