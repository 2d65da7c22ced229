"""Shadow: nobody is stopped, and the report says what would have happened."""

from __future__ import annotations

import json
import math

import pytest
import torch
from ranks import digest, run_ranks, staged
from training import Chain, features, grads, mlp

from straggle import FixedDeadline, Shadow
from straggle.backward.stages import plan_stages
from straggle.merge.telemetry import Row, Table
from straggle.observe.run import step_report
from straggle.policies.step_model import StopRules
from straggle.report import PHASES

NUM_STAGES = 5


def a_row(unit_s: float, *, outside_s: float = 0.0, idle: bool = False) -> torch.Tensor:
    """A rank whose stages take ``unit_s`` seconds each, the forward pass nothing."""
    compute_s = math.nan if idle else NUM_STAGES * unit_s
    return Row(
        times={**dict.fromkeys(PHASES, 0.0), "outside": outside_s, "backward": NUM_STAGES * unit_s},
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
    slowest = max(float(row[list(PHASES).index("outside")] + row[3]) for row in rows)
    return plan, Table(torch.stack(rows), NUM_STAGES).shadow(slowest + 0.1, deadline_s, rules, plan)


def test_slow_rank_would_have_stopped_at_the_deadline():
    plan, shadow = shadow_of([a_row(0.1), a_row(0.1), a_row(0.2)], 0.7, StopRules(quorum=2))
    assert shadow.late_ranks == (2,)
    assert shadow.seconds == pytest.approx(0.8)  # the deadline and a tenth of a second for the merge
    # at 0.7 s three stages of 0.2 s are done, and half of the fourth
    shares = [stage.numel / plan.numel for stage in plan.stages]
    assert shadow.reach == pytest.approx((1.0, 1.0, sum(shares[:3]) + shares[3] / 2))
    assert shadow.stages == pytest.approx((1.0, 1.0, 1.0, 2.5 / 3, 2 / 3))
    assert shadow.dropped_share == pytest.approx((1 - shadow.reach[2]) / 3)


def test_nobody_would_have_been_late_before_the_quorum_had_finished():
    _, shadow = shadow_of([a_row(0.1), a_row(0.2), a_row(0.2)], 0.3, StopRules(quorum=3))
    assert shadow.late_ranks == ()
    assert shadow.seconds == pytest.approx(1.1)
    assert shadow.dropped_share == pytest.approx(0.0, abs=1e-6)


def test_rank_that_entered_late_would_have_had_its_whole_deadline():
    _, shadow = shadow_of([a_row(0.1), a_row(0.1), a_row(0.1, outside_s=0.4)], 0.6, StopRules(quorum=2))
    assert shadow.late_ranks == ()
    assert shadow.seconds == pytest.approx(1.0)


def test_rank_that_had_not_entered_would_have_been_stood_in_for():
    _, shadow = shadow_of([a_row(0.1), a_row(0.1), a_row(0.1, outside_s=0.9)], 0.6, StopRules(quorum=2, grace_s=0.1))
    assert shadow.late_ranks == (2,)
    assert shadow.seconds == pytest.approx(0.8)  # deadline, grace and merge
    assert shadow.reach == pytest.approx((1.0, 1.0, 0.0))


def test_running_microbatch_would_have_been_finished_within_the_grace():
    rules = StopRules(quorum=1, finish_running=True, grace_s=1.0)
    _, shadow = shadow_of([a_row(0.1), a_row(0.2)], 0.6, rules)
    assert shadow.late_ranks == ()
    assert shadow.reach == pytest.approx((1.0, 1.0))


def test_rank_without_data_is_missed_by_nobody():
    _, shadow = shadow_of([a_row(0.1), a_row(0.1), a_row(0.1, idle=True)], math.inf, StopRules(quorum=2))
    assert shadow.late_ranks == ()
    assert shadow.dropped_share == pytest.approx(0.0, abs=1e-6)
    assert shadow.stages == pytest.approx((1.0,) * NUM_STAGES)


def train(rank, policy):
    module, reports = mlp(), []
    with staged(module, deadline=policy) as model:
        for number in range(4):
            with model.step():
                model(features(rank, number)).square().mean().backward()
            reports.append(model.last_report)
    return digest(grads(module)), reports


def test_under_shadow_nobody_is_late_but_would_have_been():
    """Of two ranks one finishes first, and a deadline of a nanosecond is over by then."""
    ends = run_ranks(train, 2, Shadow(FixedDeadline(1e-9)))
    plain = run_ranks(train, 2, None)
    assert [gradients for gradients, _ in ends] == [gradients for gradients, _ in plain]
    for _, reports in ends:
        assert [report.late_ranks for report in reports] == [()] * 4
        assert [rank.reach for report in reports for rank in report.ranks] == [1.0] * 8
        assert math.isinf(reports[0].shadow.deadline_s)
        assert [len(report.shadow.late_ranks) for report in reports[1:]] == [1] * 3
        assert all(report.shadow.dropped_share > 0 for report in reports[1:])
        assert all(report.shadow.seconds <= report.seconds for report in reports)
    assert [report.shadow.reach for report in ends[0][1]] == [report.shadow.reach for report in ends[1][1]]
    assert all(report.shadow is None for report in plain[0][1])


def test_shadow_of_a_trace_reads_back():
    report = run_ranks(train, 2, Shadow(FixedDeadline(1e-9)))[0][1][-1]
    assert step_report(json.loads(json.dumps(report.as_dict()))).shadow == report.shadow
