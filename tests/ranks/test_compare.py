"""The head to head on real ranks: turns, verdicts and local SGD."""

from __future__ import annotations

import math

import pytest
import torch
from ranks import run_forked

from straggle.commands.compare import train_on
from straggle.commands.configuration.config import load
from straggle.lab.comparison import Comparison, MethodResult
from straggle.lab.interleaved import TimedJob
from straggle.lab.jobs import DdpJob, Job, LocalSgdJob
from straggle.lab.without import WithoutJob
from straggle.lab.workloads.synthetic import Synthetic


class Learner(Job):
    """Every step takes ``step_s``, and after each turn the loss is one less, or ``lost`` if that is given."""

    def __init__(self, step_s, loss=100.0, lost=None):
        self.step_s, self.loss, self.lost, self.now_s = step_s, loss, lost, 0.0

    def _wrap(self, config):
        raise NotImplementedError

    def _passes(self, batches):
        raise NotImplementedError

    def step(self, number):  # noqa: ARG002
        self.now_s += self.step_s

    def evaluate(self):
        self.now_s += 7.0  # which counts for no method
        self.loss -= 1.0
        return {"loss": self.loss if self.lost is None else self.lost}

    def clock(self):
        return self.now_s


def timed(*learner, turns=10, **more):
    job = Learner(*learner, **more)
    own = TimedJob(job, job.clock)
    for turn in range(turns):
        own.turn(10 * turn, 10)
    return own


def own_clock(rank):
    own = timed(0.5, turns=3)
    return own.turn_s, own.end_s, own.losses, own.summary(20, 2)


def test_only_the_steps_of_its_own_turns_count_for_a_job():
    turn_s, end_s, losses, summary = run_forked(own_clock, 1)[0]
    assert turn_s == [5.0] * 3
    assert end_s == [5.0, 10.0, 15.0]
    assert losses == [99.0, 98.0, 97.0]
    assert summary["seconds"] == 10.0
    assert summary["step_seconds_mean"] == summary["step_seconds_median"] == 0.5


def trained_on(rank):
    """How many turns each method has had in the end; DDP's took 100 s, and so did the others' first ten."""
    methods = {"ddp": timed(1.0), "there": timed(1.0), "behind": timed(1.0, 101.5), "far": timed(1.0, 109.0)}
    train_on(methods, 10)
    return {name: len(one.turn_s) for name, one in methods.items()}


def test_method_that_is_behind_trains_on_until_it_is_there_or_its_time_is_up():
    assert run_forked(trained_on, 1) == [{"ddp": 10, "there": 10, "behind": 12, "far": 13}]


def verdict_of(rank, faults, lost, seconds):
    """Of methods that come to the same losses in the same steps, at different speeds, and some that learn nothing."""
    methods = {name: MethodResult(timed(step_s, lost=lost.get(name)), ["a"]) for name, step_s in seconds.items()}
    return Comparison(methods, 100, 10, faults).verdict()


def verdict(faults=True, lost=None, **seconds):
    return run_forked(verdict_of, 1, faults, lost or {}, seconds)[0]


@pytest.mark.parametrize(
    ("faults", "seconds", "expected"),
    [
        (True, {"ddp": 1.0, "straggle": 0.5}, "0.500 (0.50 to 0.50) of the time of ddp, +: at least as good"),
        (
            True,
            {"ddp": 1.0, "straggle": 0.5, "other": 0.4},
            "1.250 (1.25 to 1.25) of the time of other, +NOT as good",
        ),
        (False, {"ddp": 1.0, "straggle": 1 + 1 / 64}, "1.016 (1.02 to 1.02) of DDP's: within 2 %"),
        (False, {"ddp": 1.0, "straggle": 1 + 1 / 32}, "1.031 (1.03 to 1.03) of DDP's: NOT within 2 %"),
    ],
)
def test_verdict_says_whether_straggle_is_first(faults, seconds, expected):
    said = verdict(faults, **seconds)
    assert all(part in said for part in expected.split("+"))


def test_verdict_says_that_straggle_never_came_there():
    said = verdict(lost={"straggle": math.inf}, ddp=1.0, other=0.5, straggle=1.0)
    assert "did NOT come to DDP's final loss in 1.25 of DDP's time; other was the first" in said


def test_verdict_says_that_ddps_loss_is_no_number():
    assert verdict(lost={"ddp": math.nan}, ddp=1.0, straggle=1.0) == (
        "DDP's final loss is nan: there is nothing to compare by"
    )


def test_without_straggle_there_is_no_verdict():
    assert verdict(ddp=1.0, other=0.5) == ""


def without(rank):
    """What three ranks train with DDP, and two of them without the third with the same samples."""
    keys = ["workload=synthetic", "workload.width=8", "workload.depth=1", "workload.num_samples=64", "batch_size=2"]
    config = load("compare", [*keys, "+faults.slow={_target_: straggle.lab.faults.Slowdown, factor: 1.0, ranks: [1]}"])
    workload, device = Synthetic(width=8, depth=1, num_samples=64), torch.device("cpu")
    with pytest.raises(ValueError, match="name those that are slow, and not all"):
        WithoutJob(config, workload, device, ranks=[0, 1, 2])
    ddp, others = DdpJob(config, workload, device), WithoutJob(config, workload, device)
    for number in range(4):
        ddp.step(number)
        others.step(number)
    scores = [own.evaluate()["loss"] for own in (ddp, others)]
    own, hashed = torch.cat([p.detach().flatten() for p in others.module.parameters()]), others.parameters_sha256()
    torch.testing.assert_close(own, torch.cat([p.detach().flatten() for p in ddp.module.parameters()]))
    others.close()
    ddp.close()
    return scores, hashed


def test_without_a_slow_rank_the_others_train_on_the_same_samples_and_hand_on_what_they_have():
    (scores, hashed), *others = run_forked(without, 3)
    assert scores[0] == pytest.approx(scores[1])
    assert others == [(scores, hashed)] * 2


def local_sgd(rank):
    """Whether parameters are equal on all ranks after each of 12 steps: the first 3 DDP's, then averaged every 3."""
    keys = ["workload=synthetic", "workload.width=8", "workload.depth=1", "workload.num_samples=64", "faults=none"]
    config = load("compare", keys)
    workload, device = Synthetic(width=8, depth=1, num_samples=64), torch.device("cpu")
    local = LocalSgdJob(config, workload, device, every=3, warmup_steps=3)
    ddp, hashes = DdpJob(config, workload, device), []
    for number in range(12):
        local.step(number)
        hashes.append(super(LocalSgdJob, local).parameters_sha256())
        if number < 3:
            ddp.step(number)
            assert hashes[-1] == ddp.parameters_sha256()
    local.step(12)
    own = super(LocalSgdJob, local).parameters_sha256()
    averages = [local.parameters_sha256(), str(local.evaluate())]
    assert own == super(LocalSgdJob, local).parameters_sha256()  # looking at the average changes nothing
    local.close()
    ddp.close()
    return [*hashes, own, *averages]


def test_local_sgd_is_ddp_at_first_and_then_averages_every_so_many_steps():
    first, second = run_forked(local_sgd, 2)
    same = [one == other for one, other in zip(first, second, strict=True)]
    assert same == [True] * 3 + [False, False, True] * 3 + [False, True, True]
