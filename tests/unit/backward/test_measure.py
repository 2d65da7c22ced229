"""Stage times are by the clock that is given, and stages can be planned by them."""

import itertools

import pytest
import torch
from clock import paced
from torch import nn
from training import features, grads, mlp

from straggle import BalancedByTime, StagedBackward, StageProfile, measure_stages
from straggle.backward.stages import plan_stages
from straggle.report import BackwardReport, StageTime


def test_measured_times_are_those_of_the_stages():
    module, clock = paced([1.0, 2.0, 4.0])
    profile = measure_stages(module, lambda: module(torch.randn(2, 4)).sum(), num_steps=3, clock=clock)
    assert [(stage.name, stage.seconds) for stage in profile.backward.stages] == [
        ("2.linear", 4.0),
        ("1.linear", 2.0),
        ("0.linear", 1.0),
    ]
    assert profile.backward.seconds == 7.0
    assert profile.forward_s == 0.0


def test_measuring_leaves_parameters_and_gradients_as_they_were():
    module = mlp()
    module(features(0, 0)).sum().backward()
    before, values = grads(module), [p.detach().clone() for p in module.parameters()]
    measure_stages(module, lambda: module(features(0, 1)).sum(), num_steps=2)
    assert all(torch.equal(old, new) for old, new in zip(before, grads(module), strict=True))
    assert all(torch.equal(old, new) for old, new in zip(values, module.parameters(), strict=True))


def profile_of(seconds, forward_s=1.0):
    stages = tuple(StageTime(f"s{i}", 10 * (i + 1), 40, s, 1) for i, s in enumerate(seconds))
    return StageProfile(forward_s, BackwardReport(stages, {}, False, ()))


@pytest.mark.parametrize(
    ("budget_s", "num_stages", "share"),
    [(0.5, 0, 0.0), (1.0, 0, 0.0), (3.0, 1, 10 / 60), (3.9, 1, 10 / 60), (4.0, 2, 30 / 60), (100.0, 3, 1.0)],
)
def test_reach_counts_the_whole_stages_that_fit(budget_s, num_stages, share):
    reach = profile_of([2.0, 1.0, 3.0]).reach(budget_s)
    assert (reach.num_stages, reach.share) == (num_stages, pytest.approx(share))


def test_table_has_a_line_for_each_stage_and_a_chart_can_be_drawn(tmp_path):
    profile = profile_of([2.0, 1.0, 1.0])
    lines = str(profile).splitlines()
    assert lines[1].split() == ["s0", "10", "40", "2000.00", "50.0%"]
    assert lines[-1] == "forward 1000.00 ms, backward 4000.00 ms"
    profile.save_chart(tmp_path / "stages.svg")
    drawn = (tmp_path / "stages.svg").read_text()
    assert "<svg" in drawn
    assert "s2" in drawn


def test_stages_balanced_by_time_divide_the_seconds_not_the_bytes():
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    seconds = [0.5, 0.5, 2.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 2.5, 2.5]  # two parameters a layer
    plan = plan_stages(module, BalancedByTime(2), order=list(reversed(range(12))), seconds=seconds)
    assert [stage.name for stage in plan.stages] == ["5..4", "3..0"]  # 6 of 11.5 seconds
    by_bytes = plan_stages(module, 2, order=list(reversed(range(12))), seconds=seconds)
    assert [stage.name for stage in by_bytes.stages] == ["5..3", "2..0"]


def test_staged_backward_balances_by_time_after_three_steps():
    module, clock = paced([1.0, 1.0, 1.0, 3.0])
    staged_backward = StagedBackward(module, stages=BalancedByTime(2), clock=clock)
    plans = []
    for _ in range(4):
        step = staged_backward.backward(module(torch.randn(2, 4)).sum())
        plans.append([stage.name for stage in step.report.stages])
    assert plans[:3] == [["3.linear..2.linear", "1.linear..0.linear"]] * 3
    assert plans[3] == ["3.linear", "2.linear..0.linear"]
    assert [stage.seconds for stage in step.report.stages] == [3.0, 3.0]


def test_staged_backward_can_stop_between_microbatches_only():
    module = mlp(depth=3)
    done = itertools.count(1)
    staged_backward = StagedBackward(
        module, granularity="microbatch", on_stage=lambda stage: next(done) == 4 and stage.stop()
    )
    with staged_backward.step() as step:
        for part in range(3):
            staged_backward.backward(module(features(0, part)).sum())
    assert step.report.truncated
    assert set(step.report.passes.values()) == {2}
