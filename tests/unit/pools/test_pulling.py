"""What the rows of a step with a pool say, before the next deadline is decided."""

from types import SimpleNamespace

import pytest
import torch
from telemetry_rows import ALL_COLUMNS, row_of

from straggle import FixedDeadline, LateHandling
from straggle.merge.late.current_deadline import CurrentDeadline
from straggle.merge.late.replica import Replica
from straggle.merge.rows.table import Table
from straggle.pools.pulling import Pulling


def after(*rows):
    """The table of a step with these rows and no stages, and the deadline of a rank that has read them."""
    encoded = [row_of(compute_s=1.0, busy_s=1.0, **row).encode(ALL_COLUMNS) for row in rows]
    table = Table(torch.stack(encoded), 0, ALL_COLUMNS)
    deadline = CurrentDeadline(FixedDeadline(2.0), LateHandling(), len(rows))
    channel = SimpleNamespace(rank=0, world_size=len(rows))
    rank = SimpleNamespace(channel=channel, deadline=deadline, replica=Replica.of_one_rank(channel))
    Pulling(rank).rows_read(SimpleNamespace(table=table))
    return table, deadline


@pytest.mark.parametrize("pool_parts", [0, 4])
def test_policy_sees_that_work_is_dealt_from_a_pool(pool_parts):
    table, deadline = after({"pool_parts": pool_parts}, {"pool_parts": pool_parts})
    deadline.decide(table)
    assert deadline.history.dealt == (pool_parts > 0)


def test_a_rank_that_did_not_come_to_a_pool_has_no_share_of_it():
    table, _ = after({"pool_parts": 4, "pool_weight": 8.0, "weight": 6.0}, {"weight": 3.0})
    assert (table.weight(), table.total_weight) == ([6.0, 0.0], 8.0)


def test_without_a_pool_each_rank_has_the_weight_that_its_row_says():
    table, _ = after({"weight": 6.0}, {"weight": 3.0})
    assert (table.weight(), table.total_weight) == ([6.0, 3.0], None)
