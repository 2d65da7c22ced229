"""What a report says that the rows of the ranks do not."""

import math
from dataclasses import replace

import pytest
import torch
from telemetry_rows import ALL_COLUMNS, row_of
from training import mlp

from straggle.backward.stages import plan_stages
from straggle.merge.rows.step_record import StepRecord
from straggle.merge.rows.table import Table
from straggle.merge.rows.telemetry import NONFINITE, ScalarNames
from straggle.observe.numbers.reader import step_report
from straggle.policies.shares.cost import UsualCost
from straggle.policies.what_if.step_model import StopRules
from straggle.pools.pulling import share_out
from straggle.report import RankNumbers
from straggle.schema import numbers_of

WEIGHTS = (2.0, 1.0)  # of the ranks that are left
PLAN = plan_stages(mlp())
NUM_STAGES = len(PLAN.stages)


def weights(merged, pool_weight=0.0, nonfinite=0):
    """Those of the stages, of which so much was ``merged`` in each; ``nonfinite``: gradients of the second rank."""
    alike = {"computed": (1.0,) * NUM_STAGES, "estimated": (0.0,) * NUM_STAGES, "stage_s": (math.nan,) * NUM_STAGES}
    pool = {"pool_parts": int(pool_weight), "pool_weight": pool_weight}
    rows = [row_of(compute_s=0.1, busy_s=0.1, weight=own, **alike, **pool) for own in (*WEIGHTS, 0.0)]
    rows = torch.stack([row.encode(ALL_COLUMNS) for row in rows])
    rows[1, NONFINITE] = nonfinite
    table = Table(rows, NUM_STAGES, ALL_COLUMNS)
    if pool_weight:
        share_out(table)
    record = StepRecord(0, 0.1, math.inf, PLAN, table, ScalarNames({}), merged_weights=merged)
    return [stage.weight for stage in record.report.stages]


@pytest.mark.parametrize("merged", [(), (3.0,) * NUM_STAGES, (2.0,) * NUM_STAGES], ids=["", "same", "not-finite"])
def test_weight_of_a_stage_is_the_sum_over_the_ranks(merged):
    assert weights(merged) == [3.0] * NUM_STAGES


def test_what_was_merged_of_a_rank_that_has_left_counts_too():
    assert weights((4.0, *(3.0,) * (NUM_STAGES - 1))) == [4.0] + [3.0] * (NUM_STAGES - 1)


def test_it_counts_also_where_less_was_merged_because_something_was_not_finite():
    # the third rank gave half before it left, and the second rank's one was left out
    assert weights((2.5, *(3.5,) * (NUM_STAGES - 1)), nonfinite=1) == [2.5] + [3.5] * (NUM_STAGES - 1)
    assert weights((), nonfinite=1) == [3.0] * NUM_STAGES


def test_of_a_pool_too():
    # of five parts the third rank, which has left, had two; a pool counts as one step of all three ranks
    assert weights((3.0,) * NUM_STAGES, pool_weight=5.0) == [5.0] * NUM_STAGES


def test_each_number_that_a_row_declares_is_in_the_report_and_in_its_trace_as_it_was_sent():
    of_kind = {bool: lambda _: True, int: lambda place: place + 1, float: lambda place: place + 0.5}
    sent = {own.name: of_kind[own.kind](place) for place, own in enumerate(numbers_of(RankNumbers))}
    row = row_of(
        busy_s=0.1, computed=(1.0,) * NUM_STAGES, estimated=(0.0,) * NUM_STAGES, stage_s=(0.1,) * NUM_STAGES, **sent
    )
    record = StepRecord(0, 0.1, math.inf, PLAN, Table(row.encode().unsqueeze(0), NUM_STAGES), ScalarNames({}))
    (rank,) = record.report.ranks
    assert {name: getattr(rank, name) for name in sent} == sent
    (again,) = step_report(record.report.as_dict()).ranks
    assert repr(again) == repr(rank)  # NaN is as NaN here


@pytest.mark.parametrize("after_quorum_s", [0.0, 1.0])
def test_record_of_a_rank_that_knew_no_deadline_is_its_peers_once_it_has_what_that_had_decided(after_quorum_s):
    alike = {"computed": (1.0,) * NUM_STAGES, "estimated": (0.0,) * NUM_STAGES, "stage_s": (0.1,) * NUM_STAGES}
    rows = [row_of(compute_s=own, busy_s=own, cost=2.0, num_microbatches=1, **alike) for own in (0.1, 0.1, 0.9)]
    table = Table(torch.stack([row.encode(ALL_COLUMNS) for row in rows]), NUM_STAGES, ALL_COLUMNS)
    own = StepRecord(0, 1.0, math.inf, PLAN, table, ScalarNames({}), shadow_s=math.inf, rules=StopRules(2))
    decided = {"shadow_s": 0.2, "rules": StopRules(2, after_quorum_s), "usual_cost": UsualCost(4.0, 2.0)}
    peer = replace(own, deadline_s=0.3, **decided)
    assert own.report != peer.report
    corrected = own.as_decided(**peer.decided)
    assert repr(corrected.report) == repr(peer.report)
    assert corrected.report.shadow.late_ranks == ((2,) if after_quorum_s == 0.0 else ())
    assert [rank.cost for rank in corrected.report.ranks] == [0.5] * 3
