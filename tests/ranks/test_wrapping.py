"""What is refused when a model is wrapped: DDP's words, a model that is wrapped already, ranks that are not alike."""

import inspect
import re
import threading

import pytest
import torch
from ranks import run_ranks, staged
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import features, mlp

import straggle
from straggle import (
    Abstain,
    AutoDeadline,
    BalancedByTime,
    Deadline,
    DropBudget,
    FixedDeadline,
    LastMerged,
    LastOwn,
    LateHandling,
    Merge,
    OptimizerMomentum,
    QuantileDeadline,
    StagedDataParallel,
    building,
)
from straggle.merge.alike import describe, difference
from straggle.merge.checks import INSTEAD
from straggle.merge.rows.telemetry import Column, Columns
from straggle.replay.wing import Recording

WITHIN_S = 30.0


def ask(rank, words):
    """What a model says to each of these words, as arguments and as attributes."""
    answers = []
    with staged(mlp()) as model:
        for word in words:
            try:
                StagedDataParallel(mlp(), **{word: 1})
            except TypeError as error:
                answers.append(str(error))
            try:
                getattr(model, word)
            except AttributeError as error:
                answers.append(str(error))
        return answers, hasattr(model, "no_sync"), hasattr(model, "module")


def test_ddp_kwargs_are_refused_with_what_to_write_instead():
    ((answers, no_sync, module),) = run_ranks(ask, 1, list(INSTEAD))
    for number, (word, instead) in enumerate(INSTEAD.items()):
        assert answers[2 * number] == f"StagedDataParallel() has no argument {word} ({instead})"
        assert answers[2 * number + 1] == f"StagedDataParallel has no {word}: {instead}"
    assert (no_sync, module) == (False, True)
    assert "with model.step(num_microbatches=n)" in INSTEAD["no_sync"]


def test_every_argument_of_ddp_that_there_is_not_has_a_word_on_what_to_write_instead():
    theirs = inspect.signature(DistributedDataParallel).parameters.keys()
    ours = inspect.signature(StagedDataParallel).parameters.keys()
    assert theirs - ours <= INSTEAD.keys()
    assert not ours & INSTEAD.keys()


def test_unknown_argument_is_refused_by_its_name():
    with pytest.raises(TypeError, match=r"StagedDataParallel\(\) has no argument deadlin, device_ids \(leave it out"):
        StagedDataParallel(mlp(), deadlin=1.0, device_ids=[0])


def wrap_again(rank, kind):
    module = mlp()
    with staged(module) as model:
        again = {
            "itself": lambda: model,
            "inside": lambda: nn.Sequential(model, nn.Linear(2, 2)),
            "same module": lambda: module,
            "part of it": lambda: nn.Sequential(nn.Linear(4, 4), *module[:2]),
            "ddp": lambda: DistributedDataParallel(mlp()),
            "ddp inside": lambda: nn.Sequential(DistributedDataParallel(mlp()), nn.Linear(2, 2)),
        }[kind]()
        with staged(again):
            pass


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("itself", "this is already a StagedDataParallel: wrap the entire plain module, once"),
        ("inside", "0 is a StagedDataParallel: wrap the entire plain module, once"),
        ("same module", "parameter 0.weight belongs to a StagedDataParallel that is not closed"),
        ("part of it", "parameter 1.weight belongs to a StagedDataParallel that is not closed"),
        ("ddp", "this is already a DistributedDataParallel: wrap the entire plain module, once"),
        ("ddp inside", "0 is a DistributedDataParallel: wrap the entire plain module, once"),
    ],
)
def test_model_that_is_wrapped_already_is_refused(kind, words):
    for end in run_ranks(wrap_again, 2, kind, outcomes=True, timeout_s=WITHIN_S):
        assert end.kind == "ValueError"
        assert words in end.message


def wrap_after_close(rank):
    module = mlp()
    for _ in range(2):
        with staged(module) as model:
            with model.step():
                model(features(rank, 0)).sum().backward()
            reach = model.last_report.ranks[rank].reach
        module.zero_grad()
    return reach


def test_module_is_wrapped_again_after_close():
    assert run_ranks(wrap_after_close, 2) == [1.0, 1.0]


def wrap_bad_on_one(rank):
    with staged(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)) if rank == 1 else mlp()):
        pass


def test_module_that_one_rank_refuses_is_refused_on_all():
    for end in run_ranks(wrap_bad_on_one, 3, outcomes=True, timeout_s=WITHIN_S):
        assert end.kind == "ValueError"
        assert "rank 1: 1 is a SyncBatchNorm" in end.message


class Own(Deadline):
    """A user's policy, whose state is not called as its argument is."""

    def __init__(self, budget, extra=None):
        self._seconds = budget
        self._seen = [extra]

    def decide(self, history):
        return self._seconds + 0 * history.num_steps


def wrap_with(rank, options, common):
    with staged(mlp(), **common, **options[rank]):
        pass


def momentum(rate):
    return {"estimator": OptimizerMomentum(torch.optim.SGD(mlp().parameters(), lr=rate, momentum=0.9))}


DIFFERENT = [
    ({"stages": 2}, {"stages": 3}, "stages differs between ranks: rank 1 has 3 where rank 0 has 2"),
    ({}, {"stages": ["0", "2"]}, "stages differs between ranks: rank 1 has ['0', '2'] where rank 0 has None"),
    ({}, {"links": True}, "links differs between ranks: rank 1 has True where rank 0 has False"),
    (
        {"stages": BalancedByTime(2)},
        {"stages": BalancedByTime(3)},
        "rank 1 has BalancedByTime(num_stages=3) where rank 0 has BalancedByTime(num_stages=2)",
    ),
    (
        {"late_handling": LateHandling(quorum=1)},
        {"late_handling": LateHandling(quorum=2)},
        "late_handling differs between ranks: rank 1 has LateHandling(quorum=2) where rank 0 has LateHandling(",
    ),
    (
        {"merge": Merge(buffers="mean")},
        {"merge": Merge(buffers="local", check_every=5)},
        "rank 1 has Merge(buffers='local', check_every=5) where rank 0 has Merge(buffers='mean', check_every=100)",
    ),
    ({"deadline": 0.5}, {"deadline": None}, "rank 1 has WaitForAll() where rank 0 has FixedDeadline(budget_s=0.5"),
    (
        {"deadline": DropBudget(QuantileDeadline(0.5), 0.5)},
        {"deadline": DropBudget(QuantileDeadline(0.6), 0.5)},
        "deadline differs between ranks: rank 1 has DropBudget(inner=QuantileDeadline(q=0.6)) where rank 0 has "
        "DropBudget(inner=QuantileDeadline(q=0.5))",
    ),
    ({"deadline": Own(1.0)}, {"deadline": Own(2.0)}, "rank 1 has Own(_seconds=2.0) where rank 0 has Own(_seconds=1.0)"),
    (
        {"estimator": LastOwn(0.5)},
        {"estimator": LastMerged(0.5)},
        "estimator differs between ranks: rank 1 has LastMerged(weight=0.5) where rank 0 has LastOwn(weight=0.5)",
    ),
]


@pytest.mark.parametrize(("first", "second", "words"), DIFFERENT)
def test_option_that_differs_between_ranks_is_refused_by_name_on_all_of_them(first, second, words):
    for end in run_ranks(wrap_with, 3, [first, second, first], {}, outcomes=True, timeout_s=WITHIN_S):
        assert end.kind == "ValueError"
        assert words in end.message


OF_THREAD = threading.local()


def wrap_with_another_build(rank, members):
    OF_THREAD.more = [Column("of_another_build")] * rank
    with staged(mlp(), members=members):
        pass


@pytest.mark.parametrize("members", [None, straggle.Elastic()], ids=["all", "members"])
def test_build_whose_rows_have_other_numbers_is_refused_on_all_ranks(members, monkeypatch):
    own = building.all_columns().of_wings
    monkeypatch.setattr(building, "all_columns", lambda: Columns((*own, *OF_THREAD.more)))
    told = r"straggle differs between ranks: rank 1 has \S+ with rows of \d+ numbers \(\w{8}\)"
    for end in run_ranks(wrap_with_another_build, 2, members, outcomes=True, timeout_s=WITHIN_S):
        assert end.kind == "ValueError"
        assert re.search(told, end.message)


@pytest.mark.parametrize(
    "options",
    [
        [{"deadline": AutoDeadline()}, {"deadline": AutoDeadline()}],
        [{"deadline": 1}, {"deadline": FixedDeadline(1.0)}],
        [
            {},
            {
                "deadline": straggle.WaitForAll(),
                "estimator": Abstain(),
                "late_handling": LateHandling(),
                "merge": Merge(),
            },
        ],
        [{"stages": ["0", "2"]}, {"stages": ("0", "2")}],
        [momentum(0.1), momentum(0.2)],
        [{"deadline": Own(1.0, extra=object())}, {"deadline": Own(1.0, extra=object())}],
    ],
)
def test_the_same_options_in_other_words_are_accepted(options):
    run_ranks(wrap_with, 2, options, {}, timeout_s=WITHIN_S)


def test_description_of_an_option_holds_no_tensor_and_no_optimizer():
    described = describe(momentum(0.1)["estimator"])
    assert described == ["OptimizerMomentum", {"optimizer": "SGD", "weight": "0.5"}]
    assert difference(described, describe(Abstain())) == (
        "OptimizerMomentum(optimizer=SGD, weight=0.5)",
        "Abstain()",
    )


def wrap_with_buffers(rank, kind):
    module = mlp()
    if rank == 1:
        shape = 3 if kind == "more" else 2
        module.register_buffer("seen", torch.zeros(shape), persistent=kind != "not saved")
    elif kind != "more":
        module.register_buffer("seen", torch.zeros(2), persistent=True)
    with staged(module):
        pass


@pytest.mark.parametrize("kind", ["more", "not saved"])
def test_buffers_that_differ_between_ranks_are_refused_by_name(kind):
    for end in run_ranks(wrap_with_buffers, 2, kind, outcomes=True, timeout_s=WITHIN_S):
        assert end.kind == "ValueError"
        assert "the model differs between ranks" in end.message
        assert "'seen'" in end.message


def go_on_differently(rank, kind):
    with staged(mlp(), deadline=QuantileDeadline(0.5)) as model:
        for number in range(3):
            with model.step():
                model(features(rank, number)).sum().backward()
        saved = model.straggle_state()
    with staged(mlp(), deadline=QuantileDeadline(0.5)) as model:
        if kind == "replay" and rank == 1:
            model.replay(Recording((), (), ()))
        if kind == "one rank" and rank == 1:
            model.load_straggle_state(saved)
        if kind == "other times":
            model.load_straggle_state({**saved, "history.compute_s": saved["history.compute_s"] + rank})
        if kind == "the same":
            model.load_straggle_state(saved)
        for number in range(3):
            with model.step():
                model(features(rank, number)).sum().backward()
        return model.last_report.step


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("replay", "rank 1 replays a recorded run, unlike rank 0: call replay() on all ranks or on none"),
        ("one rank", "rank 1 has a history of 4 steps, and not that of rank 0, of 1 steps: call load_straggle_state()"),
        (
            "other times",
            "rank 1 has a history of 4 steps, and not that of rank 0, of 4 steps: call load_straggle_state()",
        ),
    ],
)
def test_state_that_differs_between_ranks_ends_the_first_step_on_all_of_them(kind, words):
    for end in run_ranks(go_on_differently, 2, kind, outcomes=True, timeout_s=WITHIN_S):
        assert end.kind == "ValueError"
        assert words in end.message


def test_ranks_that_go_on_from_the_same_state_train():
    assert run_ranks(go_on_differently, 2, "the same", timeout_s=WITHIN_S) == [5, 5]
