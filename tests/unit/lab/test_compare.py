"""The head to head: which configuration a method has, what ratios mean, and all methods in real processes."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from ranks import run_command, run_ranks
from repository import ROOT

from straggle.commands.compare import _in_turn, _train_on
from straggle.commands.config import ConfigurationError, config_dir, load, of_method, of_scenario, plain, slows_ranks
from straggle.lab.comparison import Comparison, MethodResult
from straggle.lab.interleaved import TimedJob, reference_losses, seconds_to, time_to_loss_ratio
from straggle.lab.jobs import DdpJob, Job, LocalSgdJob
from straggle.lab.workloads.synthetic import Synthetic
from straggle.observe.intervals import Interval, ratio_interval

METHODS = sorted(path.stem for path in (config_dir() / "methods").iterdir())
ALL = f"methods=[{','.join(METHODS)}]"

# -- methods and scenarios


def test_methods_are_named_as_their_files():
    assert sorted(load("compare", [ALL]).methods) == METHODS


def test_without_more_the_methods_are_ddp_and_straggle():
    config = load("compare", [])
    assert list(config.methods) == ["ddp", "straggle"]
    assert config.scenarios is None


@pytest.mark.parametrize(
    ("keys", "slow"), [((), True), (("faults=none",), False), (("faults=pace",), False), (("faults=stall",), True)]
)
def test_ranks_that_all_have_the_same_pace_are_not_slow(keys, slow):
    assert slows_ranks(load("compare", keys)) is slow


def test_straggle_is_the_runs_own_configuration():
    config = load("compare", ["deadline=fixed", "deadline.budget_s=3.0", "patience.quorum=2"])
    own = of_method(config, "straggle")
    assert {key: own[key] for key in own} == {key: config[key] for key in config}


def test_method_replaces_a_class_and_overrides_single_keys():
    own = of_method(load("compare", ["methods=[ddp,dropcompute]", "patience.max_lag=3"]), "dropcompute")
    assert plain(own)["deadline"].keys() == {
        "_target_",
        "window",
        "warmup_steps",
        "every",
        "least_gain",
        "max_over_median",
    }
    assert (own.patience.granularity, own.patience.max_lag, own.estimator._target_) == (
        "microbatch", 3, "straggle.Zero"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "backup_workers", "majority"), [(1, 1, 1), (2, 1, 2), (3, 2, 2), (4, 3, 3), (5, 4, 3), (8, 7, 5)]
)
def test_first_k_follows_the_number_of_ranks(world_size, backup_workers, majority, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    config = load("compare", ["methods=[ddp,backup_workers,majority]"])
    assert of_method(config, "backup_workers").deadline.k == backup_workers
    assert of_method(config, "majority").deadline.k == majority


def test_scenario_has_the_faults_of_its_name_and_a_folder():
    config = of_scenario(load("compare", ["scenarios=[none,stall]"]), "stall")
    assert set(config.faults) == {"pace", "data", "forward", "backward"}
    assert config.run_dir == "runs/compare/stall"


def test_scenario_keeps_the_runs_pace():
    config = of_scenario(load("compare", ["scenarios=[stall]", "faults.pace.factor=2.0"]), "stall")
    assert config.faults.pace.factor == 2.0


def test_pace_can_be_switched_off_in_all_scenarios():
    assert of_scenario(load("compare", ["scenarios=[stall]", "faults.pace=null"]), "stall").faults.pace is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["methods=[ddp,straggel]"], "choose one of backup_workers, ddp, dropcompute, "),
        (["methods=[straggle]"], "ddp must be among them"),
        (["checkpoint_every=10"], "checkpoint_every=10: only train does that"),
        (["resume=auto"], "resume=auto: only train does that"),
        (["resume=true"], "resume=True: only train does that"),
        (["replay=nowhere"], "replay=nowhere: only train does that"),
        (["~report"], "report=None: only train does that"),
        (["metrics=prometheus"], "metrics: only train exports them"),
        (["scenarios=3"], "scenarios=3: give a list"),
        (["scenarios=[nobody]"], "choose of dropcompute, everyone_noisy, none, "),
        (["methods=[ddp,local_sgd]", "methods.local_sgd.job.every=1"], "a whole number of at least 2"),
        (["methods=[ddp,local_sgd]", "+methods.local_sgd.job.evry=2"], "unknown key methods.local_sgd.job.evry"),
        (["+methods.straggle.workload=text"], "unknown key methods.straggle.workload; it has job, deadline, "),
        (["methods=[ddp,majority]", "+methods.majority.deadline.q=2"], "unknown key methods.majority.deadline.q"),
        (["methods=[ddp,majority]", "methods.majority.deadline.k=0"], "k=0: must be a whole number of at least 1"),
        (["methods=[ddp,majority]", "methods.majority.deadline.k=${all_ranks_but:-1}"], "majority.* at least 0"),
    ],
)  # fmt: skip
def test_wrong_method_is_refused_before_there_are_ranks(overrides, message):
    with pytest.raises(ConfigurationError, match=message):
        load("compare", overrides)


def test_everyone_begins_and_ends_a_turn():
    orders = [_in_turn(["a", "b", "c"], turn) for turn in range(6)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert {order[0] for order in orders} == {order[-1] for order in orders} == {"a", "b", "c"}
    followers = {pair for order in orders for pair in itertools.pairwise(order)}
    assert len(followers) > 3  # not always the same one comes after another
    assert [_in_turn(["ddp", "straggle"], turn)[0] for turn in range(2)] == ["ddp", "straggle"]


def test_every_method_is_documented():
    page = (ROOT / "docs" / "configuration.md").read_text()
    section = page.partition("**`methods`**")[2].partition("\n**")[0]
    assert [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")] == METHODS


# -- ratios


def test_step_time_ratio_is_that_of_the_sums_and_certain_where_all_turns_agree():
    assert ratio_interval([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]) == Interval(0.5, 0.5, 0.5)


def test_step_time_ratio_has_an_interval_of_its_turns():
    ratio = ratio_interval([1.0, 3.0] * 10, [2.0] * 20)
    assert ratio.value == 1.0
    assert 0.6 < ratio.low < 0.9  # two standard errors of a mean of 20 are 0.22
    assert 1.1 < ratio.high < 1.4


def test_time_to_loss_ratio_is_that_of_the_last_loss_within_the_range_of_the_others():
    theirs = [float(at) for at in range(1, 11)]
    ours = [at * (0.5 if at != 4 else 0.4) for at in theirs]
    assert time_to_loss_ratio(ours, theirs) == Interval(0.5, 0.5, 0.5)
    assert time_to_loss_ratio([1.0, 1.0, 3.0], [1.0, 2.0, 2.0]) == Interval(1.5, 0.5, 1.5)


def test_loss_that_was_never_reached_has_no_ratio():
    assert time_to_loss_ratio([1.0, None], [2.0, 4.0]) == Interval(math.inf, 0.5, math.inf)


def test_reference_losses_are_those_that_were_new_in_the_second_half_and_the_last_one():
    assert reference_losses([9.0, 8.0, 7.0, 5.0, 6.0, 4.0]) == [5.0, 4.0]
    assert reference_losses([9.0, 8.0, 7.0, 5.0, 2.0, 4.0]) == [5.0, 4.0]


@pytest.mark.parametrize(
    ("target", "expected"), [(9.0, 1.0), (8.0, 1.0), (7.5, 1.5), (4.0, 4.5), (3.0, 5.0), (2.0, None)]
)
def test_loss_is_reached_on_the_line_between_two_measurements(target, expected):
    assert seconds_to([8.0, 7.0, 9.0, 5.0, 3.0], [1.0, 2.0, 3.0, 4.0, 5.0], target) == expected


@pytest.mark.parametrize("unknown", [math.nan, math.inf])
def test_loss_after_one_that_is_no_number_is_reached_where_it_was_measured(unknown):
    assert seconds_to([unknown, 2.0], [1.0, 2.0], 3.0) == 2.0


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
        self.now_s += 7.0  # which counts for nobody
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
    turn_s, end_s, losses, summary = run_ranks(own_clock, 1)[0]
    assert turn_s == [5.0] * 3
    assert end_s == [5.0, 10.0, 15.0]
    assert losses == [99.0, 98.0, 97.0]
    assert summary["seconds"] == 10.0
    assert summary["step_seconds_mean"] == summary["step_seconds_median"] == 0.5


def train_on(rank):
    """How many turns each method has had in the end; DDP's took 100 s, and so did the others' first ten."""
    methods = {"ddp": timed(1.0), "there": timed(1.0), "behind": timed(1.0, 101.5), "far": timed(1.0, 109.0)}
    _train_on(methods, 10)
    return {name: len(one.turn_s) for name, one in methods.items()}


def test_method_that_is_behind_trains_on_until_it_is_there_or_its_time_is_up():
    assert run_ranks(train_on, 1) == [{"ddp": 10, "there": 10, "behind": 12, "far": 13}]


def verdict_of(rank, faults, lost, seconds):
    """Of methods that come to the same losses in the same steps, at different speeds, and some that learn nothing."""
    methods = {name: MethodResult(timed(step_s, lost=lost.get(name)), ["a"]) for name, step_s in seconds.items()}
    return Comparison(methods, 100, 10, faults).verdict()


def verdict(faults=True, lost=None, **seconds):
    return run_ranks(verdict_of, 1, faults, lost or {}, seconds)[0]


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


# -- jobs


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
    first, second = run_ranks(local_sgd, 2)
    same = [one == other for one, other in zip(first, second, strict=True)]
    assert same == [True] * 3 + [False, False, True] * 3 + [False, True, True]


# -- the command


@pytest.mark.slow
def test_all_methods_train_in_turns_under_several_scenarios(tmp_path: Path) -> None:
    keys = (ALL, "scenarios=[none,slow_rank]", "workload=digits", "steps=12", "block=4", "num_microbatches=2")
    out = run_command("compare", 4, *keys, "run_dir=run", folder=tmp_path)
    for scenario in ("none", "slow_rank"):
        results = json.loads((tmp_path / "run" / scenario / "compare.json").read_text())
        assert sorted(results) == METHODS
        assert all(fields["replicas_identical"] for fields in results.values())
        assert results["ddp"]["step_time_ratio"] == results["ddp"]["time_to_loss_ratio"] == 1.0
        assert results["ddp"]["dropped_share"] == results["local_sgd"]["dropped_share"] == 0.0
    assert results["majority"]["dropped_share"] > 0.1  # one rank of four is slow, and all of its step is dropped
    assert results["straggle"]["dropped_share"] > 0.0
    assert "time to DDP's final validation loss, over DDP's" in out
    assert (tmp_path / "run" / "compare.png").read_bytes().startswith(b"\x89PNG")
