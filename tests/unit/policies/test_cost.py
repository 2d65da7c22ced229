"""A step that costs more takes longer by right: closed forms, no ranks."""

import math

import pytest
import torch

from straggle.merge.current_deadline import CurrentDeadline
from straggle.merge.table import Table
from straggle.merge.telemetry import Row
from straggle.policies.cost import check_cost, mean_cost_of, relative_cost
from straggle.policies.deadline import Deadline, LateHandling, NextDeadline, QuantileDeadline
from straggle.policies.history import History
from straggle.policies.wrappers import Shadow
from straggle.report import PHASES

NAN = math.nan


def table(compute_s, costs):
    """A step that all ranks finished, in one stage."""
    rows = [
        Row(dict.fromkeys(PHASES, 0.0), own_s, own_s, cost=cost, computed=(1.0,), estimated=(0.0,), stage_s=(own_s,))
        for own_s, cost in zip(compute_s, costs, strict=True)
    ]
    return Table(torch.stack([row.encode() for row in rows]), 1)


@pytest.mark.parametrize(
    ("costs", "mean", "relative"),
    [
        ([100.0, 300.0], 200.0, [0.5, 1.5]),
        ([100.0, NAN], 100.0, [1.0, 1.0]),
        ([NAN, NAN], NAN, [1.0, 1.0]),
    ],
)
def test_cost_is_relative_to_the_mean_of_those_that_are_known(costs, mean, relative):
    assert mean_cost_of(costs) == pytest.approx(mean, nan_ok=True)
    assert [relative_cost(cost, mean) for cost in costs] == relative


@pytest.mark.parametrize("cost", [0, -1.0, math.inf, NAN, True, "many"])
def test_what_is_no_cost_is_refused(cost):
    with pytest.raises(ValueError, match="must be a positive number, such as the tokens"):
        check_cost(cost)


def test_deadline_is_that_of_a_step_of_the_mean_cost():
    """Ranks take 2 ms a token, one of them 3 ms: the median is that of the others, whatever the lengths."""
    deadline = CurrentDeadline(QuantileDeadline(0.5, slack=1.0, warmup_steps=1), LateHandling(), 4)
    costs = torch.tensor([[50.0, 100.0, 150.0, 100.0], [400.0, 20.0, 30.0, 60.0], [90.0, 80.0, 300.0, 10.0]])
    for own in costs:
        compute_s = own * torch.tensor([0.002, 0.002, 0.002, 0.003])
        deadline.decide(table(compute_s.tolist(), own.tolist()))
        assert deadline.mean_cost == 100.0
        assert deadline.seconds == pytest.approx(0.2)
    assert [deadline.relative_cost(cost) for cost in (50.0, 400.0, NAN)] == [0.5, 4.0, 1.0]
    assert deadline.history.compute_s[:, 3].tolist() == pytest.approx([0.3] * len(deadline.history.compute_s))


def test_times_are_as_measured_before_there_are_costs():
    deadline = CurrentDeadline(QuantileDeadline(0.5, slack=1.0, warmup_steps=1), LateHandling(), 2)
    deadline.decide(table([0.2, 0.4], [NAN, NAN]))
    assert deadline.history.compute_s.tolist()[-1] == pytest.approx([0.2, 0.4])
    assert math.isnan(deadline.mean_cost)


def test_mean_cost_is_saved_with_the_history():
    deadline = CurrentDeadline(QuantileDeadline(0.5, warmup_steps=1), LateHandling(), 2)
    deadline.decide(table([0.2, 0.4], [10.0, 30.0]))
    again = CurrentDeadline(QuantileDeadline(0.5, warmup_steps=1), LateHandling(), 2)
    again.restore(History.from_tensors(deadline.history.tensors()))
    assert again.mean_cost == 20.0


def test_history_of_a_run_without_costs_has_none_when_it_is_restored():
    deadline = CurrentDeadline(QuantileDeadline(0.5, warmup_steps=1), LateHandling(), 2)
    deadline.decide(table([0.2, 0.4], [NAN, NAN]))
    tensors = deadline.history.tensors()
    assert "mean_cost" not in tensors
    assert math.isnan(History.from_tensors(tensors).mean_cost)


class GivesTime(Deadline):
    """Decides that a rank is not late for 0.3 s after a quorum has finished."""

    grace_s = 0.1

    def decide(self, history):
        return NextDeadline(1.0, after_quorum_s=0.3 if history.num_steps == 1 else 0.0)


def test_time_after_a_quorum_is_what_was_decided_for_the_step_but_no_less_than_the_policy_s_own():
    deadline = CurrentDeadline(Shadow(GivesTime()), LateHandling(), 2)
    seen = [deadline.after_quorum_s]
    for _ in range(2):
        deadline.decide(table([1.0, 1.0], [1.0, 1.0]))
        assert deadline.rules.after_quorum_s == deadline.after_quorum_s
        seen.append(deadline.after_quorum_s)
    assert seen == [0.1, 0.3, 0.1]
