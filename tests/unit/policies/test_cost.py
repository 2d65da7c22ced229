"""A step that costs more takes longer by right: closed forms, no ranks."""

import math

import pytest
import torch
from telemetry_rows import row_of
from torch import nn

from straggle.backward.stages import Stage, StagePlan
from straggle.merge.late.current_deadline import CurrentDeadline
from straggle.merge.rows.table import Table
from straggle.policies.auto_deadline import AutoDeadline
from straggle.policies.deadline import Deadline, LateHandling, NextDeadline, QuantileDeadline
from straggle.policies.history import History
from straggle.policies.shares.cost import UsualCost, mean_cost_of
from straggle.policies.wrappers import Shadow
from straggle.source.replicated import slots_of

NAN = math.nan
PLAN = StagePlan((Stage("all", (0,), 1, 4, "all", "all"),))


def table(compute_s, costs, numbers=None):
    """A step that all ranks finished, in one stage; ``numbers`` of micro-batches."""
    numbers = numbers or [1] * len(costs)
    rows = [
        row_of(
            compute_s=own_s,
            busy_s=own_s,
            cost=cost,
            computed=(1.0,),
            estimated=(0.0,),
            stage_s=(own_s,),
            num_microbatches=number,
            microbatch_s=tuple(own_s * (done + 1) / number for done in range(number)),
        )
        for own_s, cost, number in zip(compute_s, costs, numbers, strict=True)
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
    assert UsualCost(mean, 1.0).relative_of(costs, [1.0] * len(costs)) == relative


def test_deadline_is_that_of_a_step_of_the_mean_cost():
    """Ranks take 2 ms a token, one of them 3 ms: the median is that of the others, whatever the lengths."""
    deadline = CurrentDeadline(QuantileDeadline(0.5, slack=1.0, warmup_steps=1), LateHandling(), 4)
    costs = torch.tensor([[50.0, 100.0, 150.0, 100.0], [400.0, 20.0, 30.0, 60.0], [90.0, 80.0, 300.0, 10.0]])
    for own in costs:
        compute_s = own * torch.tensor([0.002, 0.002, 0.002, 0.003])
        deadline.decide(table(compute_s.tolist(), own.tolist()))
        assert deadline.usual_cost.given == 100.0
        assert deadline.seconds == pytest.approx(0.2)
    assert [deadline.usual_cost.relative(cost, 1) for cost in (50.0, 400.0, NAN)] == [0.5, 4.0, 1.0]
    assert deadline.history.compute_s[:, 3].tolist() == pytest.approx([0.3] * len(deadline.history.compute_s))


def test_times_are_as_measured_before_there_are_costs():
    deadline = CurrentDeadline(QuantileDeadline(0.5, slack=1.0, warmup_steps=1), LateHandling(), 2)
    deadline.decide(table([0.2, 0.4], [NAN, NAN]))
    assert deadline.history.compute_s.tolist()[-1] == pytest.approx([0.2, 0.4])
    assert math.isnan(deadline.usual_cost.given)


def test_mean_cost_is_saved_with_the_history():
    deadline = CurrentDeadline(QuantileDeadline(0.5, warmup_steps=1), LateHandling(), 2)
    deadline.decide(table([0.2, 0.4], [10.0, 30.0], [2, 4]))
    again = CurrentDeadline(QuantileDeadline(0.5, warmup_steps=1), LateHandling(), 2)
    again.restore(History.from_tensors(deadline.history.tensors()))
    assert again.usual_cost == UsualCost(20.0, 3.0)
    again.restore(deadline.history.of_ranks(1))
    assert again.usual_cost == UsualCost(20.0, 3.0)


def test_history_of_a_run_without_costs_has_none_when_it_is_restored():
    deadline = CurrentDeadline(QuantileDeadline(0.5, warmup_steps=1), LateHandling(), 2)
    deadline.decide(table([0.2, 0.4], [NAN, NAN]))
    tensors = deadline.history.tensors()
    assert "mean_cost" not in tensors
    assert math.isnan(History.from_tensors(tensors).mean_cost)


def test_step_without_a_cost_costs_its_number_of_micro_batches():
    """Ranks take 0.1 s for a micro-batch, one of them twice as long, also where all of them go from one to four."""
    deadline = CurrentDeadline(QuantileDeadline(0.5, slack=1.0, warmup_steps=1), LateHandling(), 4)
    for number in (1, 1, 4, 4, 2):
        compute_s = [0.1 * number] * 3 + [0.2 * number]
        deadline.decide(table(compute_s, [NAN] * 4, [number] * 4))
        assert deadline.seconds == pytest.approx(0.1)
    assert [deadline.usual_cost.relative(NAN, number) for number in (1, 4)] == [1.0, 4.0]
    assert deadline.history.compute_s[:, 3].tolist() == pytest.approx([0.2] * len(deadline.history.compute_s))


def test_cost_that_is_given_comes_before_the_number_of_micro_batches():
    usual = UsualCost(100.0, 2.0)
    assert usual.relative(50.0, 8) == 0.5
    assert usual.relative_of([50.0, NAN], [8, 8]) == [0.5, 4.0]
    assert usual.relative_of([NAN, NAN, NAN], [2, NAN, 4]) == [1.0, 1.5, 2.0]  # one did not enter the step


def test_rank_that_was_dealt_fewer_micro_batches_has_the_deadline_of_the_others():
    deadline = CurrentDeadline(QuantileDeadline(0.5, slack=1.0, warmup_steps=1), LateHandling(), 4)
    deadline.decide(table([0.4, 0.4, 0.4, 0.8], [NAN] * 4, [4, 4, 4, 4]))
    deadline.work_is_dealt()
    deadline.decide(table([0.5, 0.5, 0.4, 0.4], [NAN] * 4, [5, 5, 4, 2]))
    assert [deadline.usual_cost.relative(NAN, number) for number in (5, 2)] == [1.0, 1.0]
    assert deadline.history.compute_s[-1].tolist() == pytest.approx([0.5, 0.5, 0.4, 0.4])


def late_steps(late_handling, numbers):
    """Steps in which a rank that is a fifth slower is late, on a machine that all share, with so many micro-batches."""
    deadline, generator, late = CurrentDeadline(AutoDeadline(), late_handling, 4), torch.Generator().manual_seed(0), 0
    deadline.prepare(PLAN, slots_of([("head", nn.Parameter(torch.zeros(1)))]))
    deadline.watch(PLAN)
    for number in numbers:
        noise = 1 + 0.02 * torch.randn(4, generator=generator) + 0.05 * torch.randn(1, generator=generator)
        compute_s = (0.1 * number * noise * torch.tensor([1.0, 1.0, 1.0, 1.2])).tolist()
        relative, quorum_s = deadline.usual_cost.relative(NAN, number), sorted(compute_s)[1]
        stop_s = max(relative * deadline.seconds, quorum_s + deadline.after_quorum_of(relative))
        late += compute_s[3] > stop_s
        deadline.decide(table(compute_s, [NAN] * 4, [number] * 4))
    return late


def test_rank_that_is_a_little_slower_is_not_late_as_all_go_from_one_micro_batch_to_four():
    for numbers in ([1] * 120, [1] * 60 + [4] * 60, [4] * 60 + [1] * 60, [1, 4] * 60):
        assert late_steps(LateHandling(), numbers) == 0


@pytest.mark.parametrize(("grace_s", "decided_s", "given_s"), [(0.1, 0.0, 0.1), (0.1, 0.3, 1.2), (0.0, 0.3, 1.2)])
def test_time_after_a_quorum_grows_with_the_step_but_that_of_the_policy_itself(grace_s, decided_s, given_s):
    class Gives(Deadline):
        def decide(self, history):  # noqa: ARG002
            return NextDeadline(1.0, after_quorum_s=decided_s)

    policy = Gives()
    policy.grace_s = grace_s
    deadline = CurrentDeadline(policy, LateHandling(), 2)
    deadline.decide(table([1.0, 1.0], [NAN, NAN]))
    assert deadline.after_quorum_of(4.0) == pytest.approx(given_s)


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
