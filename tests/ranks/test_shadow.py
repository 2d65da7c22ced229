"""Under Shadow no rank is stopped, and the report says what would have happened."""

from __future__ import annotations

import json
import math

from ranks import digest, run_forked, staged
from training import features, grads, mlp

from straggle import FixedDeadline, Shadow
from straggle.observe.numbers.reader import step_report


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
    ends = run_forked(train, 2, Shadow(FixedDeadline(1e-9)))
    plain = run_forked(train, 2, None)
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
    report = run_forked(train, 2, Shadow(FixedDeadline(1e-9)))[0][1][-1]
    assert step_report(json.loads(json.dumps(report.as_dict()))).shadow == report.shadow
