"""Shadow: no rank is stopped, and the report says what would have happened."""

from __future__ import annotations

import math

import pytest
import torch
from telemetry_rows import row_of
from training import Chain

from straggle.backward.stages import plan_stages
from straggle.merge.rows.step_record import shadow_report
from straggle.merge.rows.table import Table
from straggle.policies.what_if.step_model import StopRules
from straggle.report import PHASES

NUM_STAGES = 5


def a_row(unit_s: float, *, outside_s: float = 0.0, idle: bool = False) -> torch.Tensor:
    """A rank whose stages take ``unit_s`` seconds each, the forward pass nothing."""
    compute_s = math.nan if idle else NUM_STAGES * unit_s
    return row_of(
        times={"outside": outside_s, "backward": NUM_STAGES * unit_s},
        compute_s=compute_s,
        busy_s=outside_s + (0.0 if idle else NUM_STAGES * unit_s),
        idle=idle,
        computed=(0.0 if idle else 1.0,) * NUM_STAGES,
        estimated=(0.0,) * NUM_STAGES,
        stage_s=tuple(math.nan if idle else unit_s * (stage + 1) for stage in range(NUM_STAGES)),
        microbatch_s=() if idle else (compute_s,),
    ).encode()


def shadow_of(rows: list[torch.Tensor], deadline_s: float, rules: StopRules):
    plan = plan_stages(Chain(NUM_STAGES), NUM_STAGES)
    slowest = max(float(row[: len(PHASES)].sum()) for row in rows)
    return plan, shadow_report(Table(torch.stack(rows), NUM_STAGES), slowest + 0.1, deadline_s, rules, plan)


def test_slow_rank_would_have_stopped_at_the_deadline():
    plan, shadow = shadow_of([a_row(0.1), a_row(0.1), a_row(0.2)], 0.7, StopRules(quorum=2))
    assert shadow.late_ranks == (2,)
    assert shadow.seconds == pytest.approx(0.8)  # the deadline and a tenth of a second for the merge
    # at 0.7 s three stages of 0.2 s are done, and half of the fourth
    shares = [stage.numel / plan.numel for stage in plan.stages]
    assert shadow.reach == pytest.approx((1.0, 1.0, sum(shares[:3]) + shares[3] / 2))
    assert shadow.stages == pytest.approx((1.0, 1.0, 1.0, 2.5 / 3, 2 / 3))
    assert shadow.dropped_share == pytest.approx((1 - shadow.reach[2]) / 3)


IDLE, LATE_BY, GRACE = a_row(0.1, idle=True), a_row(0.1, outside_s=0.4), StopRules(quorum=2, grace_s=0.1)


@pytest.mark.parametrize(
    ("rows", "deadline_s", "rules", "late", "seconds", "reach"),
    [
        # nobody before the quorum has finished
        ([a_row(0.1), a_row(0.2), a_row(0.2)], 0.3, StopRules(quorum=3), (), 1.1, (1.0, 1.0, 1.0)),
        # a rank that entered late has its whole deadline
        ([a_row(0.1), a_row(0.1), LATE_BY], 0.6, StopRules(quorum=2), (), 1.0, (1.0, 1.0, 1.0)),
        # one that had not entered is stood in for: deadline, grace and merge
        ([a_row(0.1), a_row(0.1), a_row(0.1, outside_s=0.9)], 0.6, GRACE, (2,), 0.8, (1.0, 1.0, 0.0)),
        # a running micro-batch is finished within the grace
        ([a_row(0.1), a_row(0.2)], 0.6, StopRules(quorum=1, finish_running=True, grace_s=1.0), (), 1.1, (1.0, 1.0)),
    ],
)
def test_what_would_have_happened_is_by_the_rules_of_a_step(rows, deadline_s, rules, late, seconds, reach):
    _, shadow = shadow_of(rows, deadline_s, rules)
    assert shadow.late_ranks == late
    assert shadow.seconds == pytest.approx(seconds)
    assert shadow.reach == pytest.approx(reach)
    assert shadow.dropped_share == pytest.approx(1 - sum(reach) / len(reach), abs=1e-6)


def test_rank_without_data_is_missed_by_nobody():
    _, shadow = shadow_of([a_row(0.1), a_row(0.1), IDLE], math.inf, StopRules(quorum=2))
    assert shadow.late_ranks == ()
    assert shadow.dropped_share == pytest.approx(0.0, abs=1e-6)
    assert shadow.stages == pytest.approx((1.0,) * NUM_STAGES)
