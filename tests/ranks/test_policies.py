"""Policies that look at how ranks came through a step, in training."""

import pytest
import torch
from ranks import digest, run_forked, staged
from training import features, mlp

from straggle import (
    AutoDeadline,
    FirstK,
    FixedDeadline,
    History,
    LateHandling,
    Shadow,
)
from straggle.policies.what_if.recorded_steps import StepTimes


def until_two_have_finished(rank):
    """The last of three ranks goes on with its forward pass until it is stopped."""
    late = []
    with staged(mlp(), deadline=FirstK(2), late_handling=LateHandling(grace_s=60.0, quorum=3)) as model:
        for number in range(5):
            with model.step():
                while rank == 2 and number in (2, 3):
                    model(features(rank, number))
                model(features(rank, number)).sum().backward()
            late.append(model.last_report.late_ranks)
        return late, digest(model.module.parameters())


def test_rank_is_late_once_the_first_k_have_finished_whatever_the_quorum():
    results = run_forked(until_two_have_finished, 3)
    assert len(set(map(str, results))) == 1
    late, _ = results[0]
    assert late[2:4] == [(2,), (2,)]
    assert late[0] == ()  # of the warm-up


def too_many(rank):
    with staged(mlp(), deadline=FirstK(3)):
        pass


def test_more_than_all_ranks_cannot_be_the_first():
    assert run_forked(too_many, 2, outcomes=True)[0].message == "quorum=3: there are only 2 ranks"


def in_shadow(rank, deadline):
    module, deadlines, late = mlp(), [], []
    with staged(module, deadline=deadline) as model:
        for number in range(6):
            with model.step():
                model(features(rank, number)).square().mean().backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.1 * parameter.grad
            deadlines.append(model.last_report.deadline_s)
            late.append(model.last_report.late_ranks)
    return digest(module.parameters()), deadlines, late


def test_in_the_shadow_of_a_deadline_training_is_as_without_one():
    shadow, waiting = run_forked(in_shadow, 2, Shadow(FixedDeadline(1e-9))), run_forked(in_shadow, 2, None)
    assert shadow == waiting
    assert shadow[0][2] == [()] * 6


def see(rank, num_microbatches, granularity):
    policy = AutoDeadline(warmup_steps=1000)
    with staged(mlp(), deadline=policy, late_handling=LateHandling(granularity=granularity), stages=2) as model:
        for number in range(4):
            with model.step(num_microbatches=num_microbatches):
                for _ in range(num_microbatches):
                    model(features(rank, number)).sum().backward()
        return model.history.tensors()


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("granularity", ["stage", "microbatch"])
def test_ranks_see_the_same_progress_of_all(num_microbatches, granularity):
    first, second = run_forked(see, 2, num_microbatches, granularity)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name].nan_to_num(-1), second[name].nan_to_num(-1)) for name in first)
    progress = History.from_tensors(first).progress
    used = progress.unit_share > 0
    assert progress.unit_s[used].isfinite().all()
    assert len(progress.unit_s) == 3  # the first step planned the stages
    assert bool((progress.computed == 1).all())
    # as no rank was late, that is how long everything takes
    whole_s = StepTimes.of(History.from_tensors(first), lambda _: 1).unit_s
    assert torch.allclose(whole_s, progress.unit_s[used].view_as(whole_s).to(whole_s))
    assert bool((progress.overhead_s > 0).all())
    assert (used.sum(-1) == (num_microbatches if granularity == "microbatch" else num_microbatches + 1)).all()
