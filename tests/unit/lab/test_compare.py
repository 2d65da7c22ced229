"""The head to head: which configuration a method has, what ratios mean, and all methods in real processes."""

from __future__ import annotations

import itertools
import math

import pytest

from straggle.commands.compare import in_turn
from straggle.commands.configuration.checks import of_method, of_scenario, slows_ranks
from straggle.commands.configuration.config import load
from straggle.commands.configuration.schema import ConfigurationError, config_dir
from straggle.lab.interleaved import reference_losses, seconds_to, time_to_loss_ratio
from straggle.observe.numbers.intervals import Interval, ratio_interval

METHODS = sorted(path.stem for path in (config_dir() / "methods").iterdir())
ALL = f"methods=[{','.join(METHODS)}]"

# -- methods and scenarios


def test_methods_are_named_as_their_files():
    assert sorted(load("compare", [ALL, "num_microbatches=2"]).methods) == METHODS


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
    config = load("compare", ["deadline=fixed", "deadline.budget_s=3.0", "late_handling.quorum=2"])
    own = of_method(config, "straggle")
    assert {key: own[key] for key in own} == {key: config[key] for key in config if key != "methods"}


def test_method_of_the_command_line_is_the_runs_own_but_for_what_it_names():
    keys = ["num_microbatches=4", "+methods.equal.rebalance=null", "+methods.equal.work=pulled"]
    config = load("compare", [*keys, "+methods.equal.deadline={_target_: straggle.FixedDeadline, budget_s: 2.0}"])
    own = of_method(config, "equal")
    assert (own.rebalance, own.work, dict(own.deadline)) == (
        None, "pulled", {"_target_": "straggle.FixedDeadline", "budget_s": 2.0}
    )  # fmt: skip
    assert {key: own[key] for key in own if key not in ("rebalance", "work", "deadline")} == {
        key: config[key] for key in config if key not in ("rebalance", "work", "deadline", "methods")
    }


def test_method_replaces_a_class_and_overrides_single_keys():
    own = of_method(load("compare", ["methods=[ddp,dropcompute]", "late_handling.max_lag=3"]), "dropcompute")
    assert own.deadline.keys() == {
        "_target_",
        "window",
        "warmup_steps",
        "every",
        "least_gain",
        "max_over_median",
    }
    assert (own.late_handling.granularity, own.late_handling.max_lag, own.estimator._target_) == (
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


def test_first_k_follows_the_number_of_replicas_if_each_is_several_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    config = load("compare", ["methods=[ddp,backup_workers,majority]", "parallel=sharded", "parallel.shards=2"])
    assert of_method(config, "backup_workers").deadline.k == 3
    assert of_method(config, "majority").deadline.k == 3


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
        (["checkpoint_every=10"], "checkpoint_every: only train does that"),
        (["resume=auto"], "resume: only train does that"),
        (["resume=true"], "resume: only train does that"),
        (["replay=nowhere"], "replay: only train does that"),
        (["report=true"], "report: only train does that"),
        (["metrics=prometheus"], "metrics: only train does that"),
        (["scenarios=3"], "scenarios=3: must be a list"),
        (["scenarios=[nobody]"], "choose of dropcompute, everyone_noisy, kill, none, "),
        (["methods=[ddp,local_sgd]", "methods.local_sgd.job.every=1"], "an integer of at least 2"),
        (["methods=[ddp,local_sgd]", "+methods.local_sgd.job.evry=2"], "unknown key job.evry; job has"),
        (["+methods.straggle.workload=text"], "workload; methods.straggle has job, deadline, "),
        (["methods.straggle.workload=text"], "workload; methods.straggle has job, deadline, "),
        (["+methods.other=3"], "methods.other=3: must be parts, such as {deadline: {q: 0.5}}"),
        (["methods=[ddp,majority]", "+methods.majority.deadline.q=2"], "deadline: FirstK.* unexpected"),
        (["methods=[ddp,majority]", "methods.majority.deadline.k=0"], "k=0: must be an integer of at least 1"),
        (["methods=[ddp,majority]", "methods.majority.deadline.k=${all_ranks_but:-1}"], "majority.* at least 0"),
    ],
)  # fmt: skip
def test_wrong_method_is_refused_before_there_are_ranks(overrides, message):
    with pytest.raises(ConfigurationError, match=message):
        load("compare", overrides)


def test_everyone_begins_and_ends_a_turn():
    orders = [in_turn(["a", "b", "c"], turn) for turn in range(6)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert {order[0] for order in orders} == {order[-1] for order in orders} == {"a", "b", "c"}
    followers = {pair for order in orders for pair in itertools.pairwise(order)}
    assert len(followers) > 3  # not always the same one comes after another
    assert [in_turn(["ddp", "straggle"], turn)[0] for turn in range(2)] == ["ddp", "straggle"]


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
