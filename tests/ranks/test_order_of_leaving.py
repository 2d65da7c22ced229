"""On leaving a step one thing follows another; one test for each pair whose order matters."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_forked, staged
from training import Signals, features, mlp

from straggle import Deadline, LateHandling, NextDeadline, PeerFailed

pytestmark = pytest.mark.light


class Descending(Deadline):
    """90 seconds after the first step, 89 after the next, and so on."""

    def decide(self, history):
        return NextDeadline(90.0 - history.num_steps + 1)


class FailingOnRank1(Deadline):
    def decide(self, history):
        if dist.get_rank() == 1 and history.num_steps == 3:
            raise ArithmeticError("this policy cannot go on")
        return NextDeadline(30.0)


def train(model, optimizer, steps, rank=0):
    for number in steps:
        with model.step():
            model(features(rank, number)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def reports(rank, deadline):
    """What a hook sees of four steps, each of which begins with a moment of sleep on rank 0."""
    module, seen = mlp(), []
    with staged(module, deadline=deadline) as model:
        model.register_step_hook(lambda record: seen.append(record.report))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, range(4), rank)
    return [(report.step, report.deadline_s, report.seconds) for report in seen]


def test_a_report_is_made_before_the_next_deadline_is_decided():
    for of_rank in run_forked(reports, 2, Descending()):
        assert [(step, deadline_s) for step, deadline_s, _ in of_rank[1:]] == [(1, 90.0), (2, 89.0), (3, 88.0)]


def test_a_report_is_made_before_the_next_step_begins_to_count():
    for of_rank in run_forked(reports, 2, None):
        assert all(seconds > 0 for _, _, seconds in of_rank)


def policy_that_fails(rank):
    module = mlp()
    with staged(module, deadline=FailingOnRank1()) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            train(model, optimizer, range(6), rank)
        except (ArithmeticError, PeerFailed) as error:
            return str(error)


def test_the_peers_are_told_of_an_error_of_the_policy_before_it_ends_the_rank():
    of_rank_0, of_rank_1 = run_forked(policy_that_fails, 2, timeout_s=30.0)
    assert "rank 1, step 2: ArithmeticError('this policy cannot go on')" in of_rank_0
    assert of_rank_1 == "this policy cannot go on"


def state_in_a_hook(rank):
    """What a hook finds in step 2."""
    module, found = mlp(), []
    with staged(module) as model:

        def look(record):
            gradient = next(module.parameters()).grad
            own = model.last_report.step, model.last_decision.step, model.lag, model.open_step is None
            found.append((record.step, *own, None if gradient is None else gradient.clone()))

        model.register_step_hook(look)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, range(2), rank)
        with model.step():
            model(features(rank, 2)).sum().backward()
        return found[-1], next(module.parameters()).grad.clone()


def test_the_step_is_over_before_its_hooks_are_called():
    for (step, report_step, decision_step, lag, is_left, gradient), merged in run_forked(state_in_a_hook, 2):
        assert (step, report_step, decision_step, lag, is_left) == (2, 2, 2, 0, True)
        assert torch.equal(gradient, merged)


def hook_that_raises(rank):
    """A hook of rank 0 raises in the step by which the stages are planned; how far the ranks come."""
    module = mlp()
    with staged(module, deadline=30.0, late_handling=LateHandling(give_up_s=20.0)) as model:

        def fail(record):
            if rank == 0 and record.step == 0:
                raise LookupError("a hook of the user's")

        model.register_step_hook(fail)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            train(model, optimizer, range(1), rank)
        except LookupError:
            optimizer.zero_grad()
        train(model, optimizer, range(1, 4), rank)
        return model.last_report.step


def test_the_stages_are_planned_before_a_hook_can_raise():
    # otherwise its peer waits for the stages of a rank that has gone on
    assert run_forked(hook_that_raises, 2, timeout_s=30.0) == [3, 3]


def submitted_and_waits(rank):
    """Rank 1 enters step 1 only when rank 0's submit hook was called in it."""
    module, signals, seen = mlp(), Signals(), []
    with staged(module) as model:

        def submitted(step):
            seen.append((step, None if (report := model.last_report) is None else report.step))
            signals.send(f"rank {rank} has submitted step {step}")

        model.register_submit_hook(submitted)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, range(1), rank)
        if rank == 1:
            signals.wait("rank 0 has submitted step 1")
        train(model, optimizer, range(1, 2), rank)
    return seen


def test_submit_hooks_are_called_after_the_submission_and_before_the_wait():
    assert run_forked(submitted_and_waits, 2, timeout_s=30.0) == [[(0, None), (1, 0)]] * 2
