"""Judging estimators: lateness in time, comparison with the truth, intervals, and the command."""

import math
from dataclasses import replace
from itertools import islice

import pytest
import torch

from straggle.commands.config import load
from straggle.commands.config_keys import ConfigurationError
from straggle.commands.evaluate import check
from straggle.lab.estimators.lateness import Paced
from straggle.lab.estimators.result import Found, read, run_rows, save_picture, truth_rows, verdict_rows
from straggle.lab.estimators.runs import WAIT, RunScore, train_once
from straggle.lab.estimators.task import Case, Task
from straggle.lab.estimators.truth import Judgement, compare, judge
from straggle.observe.intervals import mean_interval

UNITS = 20


# -- who is late


def depths(lateness, factors):
    """How many units the last of two ranks finishes in each step, where it takes this many times as long as usual."""
    reached = [lateness.finished(torch.tensor([1.0, factor]), UNITS).sum(1).tolist() for factor in factors]
    assert all(first == UNITS for first, _ in reached)
    return [second for _, second in reached]


@pytest.mark.parametrize(
    ("factors", "stops", "goes_on"),
    [
        # 1.1 / 1.51 of its step is done: 0.593 of the backward pass; 0.41 of a step is left
        ([1.51, 1.0, 1.0], [11, 20, 20], [11, 10, 13]),
        # hardly in its backward pass, and with it until two merges later, when 0.39 of a step can be done
        ([2.91, 1.0, 1.0, 1.0], [1, 20, 20, 20], [1, 0, 1, 4]),
        ([5.0, 1.0], [0, 20], [0, 20]),  # it stops in its forward pass
    ],
)
def test_what_a_rank_finishes_late_costs_it_time_of_its_next_steps(factors, stops, goes_on):
    assert depths(Paced(1, always=True, finishes_late=False), factors) == stops
    assert depths(Paced(1, always=True, finishes_late=True), factors) == goes_on


def test_late_ranks_are_drawn_anew_or_always_the_last():
    steps = {
        always: torch.stack(list(islice(Paced(2, always=always, finishes_late=False).steps(5, UNITS, generator), 200)))
        for always in (True, False)
        for generator in [torch.Generator().manual_seed(0)]
    }
    late = {always: (~reached).any(2) for always, reached in steps.items()}
    assert all((each.sum(1) == 2).all() for each in late.values())
    assert late[True].any(0).tolist() == [False] * 3 + [True] * 2
    assert late[False].any(0).all()
    share = steps[True][:, 3:].float().mean()
    assert share == pytest.approx(0.5 - 0.5 / UNITS, abs=0.03)  # evenly from 0 to 1, in entire units


# -- the truth


def test_gradients_are_compared_by_cosine_and_relative_error():
    truth = torch.tensor([3.0, 4.0])
    assert compare(truth, truth) == pytest.approx((1.0, 0.0))
    assert compare(2 * truth, truth) == pytest.approx((1.0, 1.0))
    assert compare(torch.tensor([4.0, -3.0]), truth) == pytest.approx((0.0, math.sqrt(2)))
    assert compare(torch.zeros(2), truth) == (0.0, 1.0)
    assert compare(torch.zeros(2), torch.zeros(2)) == (1.0, 0.0)


METHODS = {
    "abstain": {"estimator": {"_target_": "straggle.Abstain"}},
    "zero": {"estimator": {"_target_": "straggle.Zero"}},
    "error_feedback": {"estimator": {"_target_": "straggle.ErrorFeedback"}},
    "momentum": {
        "estimator": {"_target_": "straggle.ErrorFeedback", "inner": {"_target_": "straggle.OptimizerMomentum"}}
    },
    "carry": {"estimator": {"_target_": "straggle.Carry"}},
    "inverse_probability": {"estimator": {"_target_": "straggle.Abstain"}, "weighting": "inverse_probability"},
}


@pytest.fixture(scope="module")
def task():
    return Task(
        "digits",
        {"_target_": "straggle.lab.workloads.digits.Digits", "channels": 4, "depth": 2},
        {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9},
        METHODS,
        ranks=4,
        batch_size=2,
        steps=30,
        num_stages=3,
    )


def test_every_method_is_exact_where_nobody_is_late(task):
    judgements = judge(task, [0.0], seed=0)
    assert {judgement.method for judgement in judgements} == METHODS.keys()
    assert len(judgements) == len(METHODS) * 3 * 3
    for judgement in judgements:
        assert judgement.dropped == 0
        assert judgement.cosine == pytest.approx(1.0, abs=1e-5)
        assert judgement.error == judgement.sum_error == 0
    waited = train_once(task, WAIT, Case(0.0, own_data=True), 0)
    for method in METHODS:
        same = train_once(task, method, Case(0.0, own_data=True), 0)
        assert (same.validation_loss, same.training_loss) == (waited.validation_loss, waited.training_loss)
        assert same.dropped == 0


def test_error_grows_with_what_is_dropped_and_zeros_shorten_the_gradient(task):
    judgements = judge(task, [0.25, 0.75], seed=0)
    found = Found({}, tuple(judgements), ())
    for method in METHODS:
        assert found.mean("error", method=method, late_share=0.25) < found.mean("error", method=method, late_share=0.75)
    for stage in range(3):
        where = {"stage": stage, "late_share": 0.75}
        dropped = [
            found.mean("dropped", method=method, **where) for method in ("abstain", "zero", "inverse_probability")
        ]
        assert len(set(dropped)) == 1  # the same ranks are late under all methods
        assert found.mean("cosine", method="zero", **where) == pytest.approx(
            found.mean("cosine", method="abstain", **where), abs=1e-5
        )
    assert found.mean("dropped", method="abstain", stage=0) < found.mean("dropped", method="abstain", stage=2)


# -- what was found


def test_interval_is_students():
    assert mean_interval([1.0, 2.0, 3.0]).value == 2.0
    assert mean_interval([1.0, 2.0, 3.0]).half == pytest.approx(4.303 / math.sqrt(3))
    assert mean_interval([5.0]).half == math.inf


def made_up():
    judgements = [
        Judgement("digits", method, 0.3, phase, stage, 0.1, 0.9, 0.5, 0.25)
        for method in ("abstain", "zero")
        for phase in ("early", "middle", "late")
        for stage in range(2)
    ]
    losses = {WAIT: 1.0, "abstain": 1.5, "zero": 1.8}
    scores = [
        RunScore("digits", method, 0.0 if method == WAIT else 0.3, own, seed, loss, loss + seed, 0.9, 0.1)
        for method, loss in losses.items()
        for own in (False, True)
        for seed in range(3)
    ]
    return Found({"steps": 3}, tuple(judgements), tuple(scores))


def test_runs_are_compared_with_those_of_the_same_seed(tmp_path):
    found = made_up()
    assert truth_rows(found, "digits") == [[method, "0.900", "0.500", "0.250"] for method in ("abstain", "zero")]
    assert run_rows(found, "digits", True) == [
        ["abstain", "+0.500 ±0.000", "90.0%"],
        ["zero", "+0.800 ±0.000", "90.0%"],
    ]
    relative = [1.8 / 1.5 - 1, 2.8 / 2.5 - 1, 3.8 / 3.5 - 1]
    assert found.relative("zero", task="digits", own_data=False) == mean_interval(relative)
    assert verdict_rows(found)[0] == ["abstain", "+0.0% ±0.0%", "+0.0% ±0.0%"]
    once = replace(found, scores=tuple(score for score in found.scores if score.seed == 0))  # no interval
    assert run_rows(once, "digits", True)[1][1] == "+0.800"
    assert verdict_rows(once)[0] == ["abstain", "+0.0%", "+0.0%"]
    more = [replace(s, late_share=0.6, validation_loss=2 * s.validation_loss) for s in found.scores if s.method != WAIT]
    both = replace(found, scores=(*found.scores, *more))  # a seed's runs are no draws of their own
    assert both.relative("zero", task="digits", own_data=False) == mean_interval(relative)
    found.write(tmp_path / "found.json")
    assert read(tmp_path / "found.json") == found
    save_picture(found, tmp_path / "found.png")
    assert (tmp_path / "found.png").stat().st_size > 10_000


# -- the command


def test_wrong_key_is_refused():
    with pytest.raises(ConfigurationError, match="unknown key stepps"):
        load("evaluate", ["stepps=3"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["late=[]"], r"late=\[\]: give a list"),
        (["late=0.2"], "late=0.2: give a list"),
        (["late=[0.3,2.0]"], "late=2.0: must be a share of 10 ranks"),
        (["late=[0.1]", "num_ranks=4"], "late=0.1: must be a share of 4 ranks, not none"),
        (["num_ranks=1"], "num_ranks=1: must be an integer of at least 2"),
        (["workers=0"], "workers=0: must be an integer of at least 1"),
        (["quick=maybe"], "quick=maybe: choose one of true, false"),
        (["tasks.digits.seeds=0"], "tasks.digits.seeds=0: must be an integer"),
        (["~tasks.text", "~tasks.digits"], "there is nothing to judge"),
        (["~tasks.text", "num_stages=99"], "tasks.digits: stages=99: this model can be divided into"),
        (["~tasks.text", "judged.carry.estimator.weight=2"], "unknown key judged.carry.estimator.weight"),
        (["~tasks.text", "judged.last_own.estimator.weight=2"], "tasks.digits: weight=2: relative to"),
    ],
)
def test_what_cannot_be_judged_is_refused(keys, message):
    with pytest.raises(ConfigurationError, match=message):
        check(load("evaluate", keys))
