"""The advice of errors about a model that was changed, copied, loaded or given data: made, followed, trained with."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from advice import case, check, follow, plain, sgd, train, trains
from ranks import run_forked, staged
from torch import nn
from training import features, mlp

import straggle
from straggle import StagedDataParallel
from straggle.replay.wing import Decision, Recording

# -- parameters that are others


def replace(module):
    module[0] = nn.Linear(4, 8)
    return module


def convert(module):
    return module.double()


def unfreeze(module):
    return module.requires_grad_(True)


def body_frozen():
    module = mlp()
    module[0].requires_grad_(False)
    return module


def in_its_dtype(model, optimizer, x):
    plain(model, optimizer, x.to(next(model.parameters()).dtype))


def after_wrapping(change, build=mlp, **options):
    """The module is changed in the middle of a run."""

    def refused(rank):
        with staged(build(), **options) as model:
            in_its_dtype(model, sgd(model), features(rank, 0))
            change(model.module)
            in_its_dtype(model, sgd(model), features(rank, 1))

    return refused


def before_wrapping(change, build=mlp):
    return trains(lambda: change(build()), in_its_dtype)


def wrapped_again(change, build=mlp, **options):
    """On all ranks, in the middle of the run that was refused; with members, hooks and a loader for the new one."""

    def way(rank):
        with staged(build(), **options) as model:
            optimizer = sgd(model)
            model.register_state(optimizer=optimizer)
            for number in range(2):
                in_its_dtype(model, optimizer, features(rank, number))
            optimizer.zero_grad()
            torch.manual_seed(1)
            change(model.module)
            with pytest.raises(RuntimeError, match="wrap"):
                in_its_dtype(model, optimizer, features(rank, 2))
            model.close()
            steps = []
            with staged(model.module, **options) as again:
                again.register_step_hook(lambda record: steps.append(record.step))
                optimizer = sgd(again)
                again.register_state(optimizer=optimizer)
                module = train(again, rank, in_its_dtype, optimizer=optimizer)
            assert steps == [0, 1, 2]
            return module

    return way


def freeze_then(rank):
    """The model is wrapped with all it will train; its body is frozen for some steps, and then trained again."""
    with staged(mlp(), members=straggle.Elastic()) as model:
        for frozen in (True, False):
            model.module[0].requires_grad_(not frozen)
            module = train(model, rank)
        return module


AGAIN = "or close() this one and wrap the model again with a new optimizer"
CONVERTED = "or close() this one and wrap the module again with a new optimizer"
MEMBERS = {"members": straggle.Elastic()}
CHANGED = {
    "replaced": case(
        AGAIN, after_wrapping(replace, **MEMBERS), before_wrapping(replace), wrapped_again(replace, **MEMBERS)
    ),
    "converted": case(CONVERTED, after_wrapping(convert), before_wrapping(convert), wrapped_again(convert)),
    "unfrozen": case(
        "wrap the model with all parameters that it will ever train, trainable, and freeze some after that",
        after_wrapping(unfreeze, body_frozen, **MEMBERS),
        freeze_then,
        wrapped_again(unfreeze, body_frozen, **MEMBERS),
    ),
}

# -- copies, and what comes before the first step


def ask_a_copy(rank):
    with staged(mlp()) as model:
        return copy.deepcopy(model).world_size


def enter_a_copy(rank):
    with staged(mlp()) as model:
        other = copy.deepcopy(model)
        try:
            module = train(other, rank)
            assert (other.rank, other.world_size) == (rank, 2)
            return module
        finally:
            other.close()


def wrap_a_copy(rank, group=None):
    with staged(mlp(), process_group=group) as model:
        other = StagedDataParallel(copy.deepcopy(model).module, process_group=group)
        try:
            return train(other, rank)
        finally:
            other.close()


def step_a_copy_of_a_group(rank):
    with staged(mlp(), process_group=dist.new_group([0, 1])) as model:
        copy.deepcopy(model).step()


def late(method):
    def refused(rank):
        with staged(mlp()) as model:
            plain(model, sgd(model), features(rank, 0))
            method(model)

    return refused


def in_time(method):
    def way(rank):
        with staged(mlp()) as model:
            method(model)
            return train(model, rank)

    return way


def state_of(rank, **options):
    with staged(mlp(), **options) as model:
        train(model, rank)
        return model.straggle_state()


def load(options, saved, only=None):
    """A run with these options goes on from that of others; ``only``: on this rank."""

    def way(rank):
        state = saved(rank)
        with staged(mlp(), **options) as model:
            if only in (None, rank):
                model.load_straggle_state(state)
            return train(model, rank)

    return way


def replay(only=None):
    def way(rank):
        with staged(mlp()) as model:
            if only in (None, rank):
                model.replay(Recording((), (), (Decision(0, 6, None, False),)))
            return train(model, rank)

    return way


def older(rank):
    """As a version saved it that did not know all of the progress."""
    state = state_of(rank, stages=2, deadline=straggle.DropBudget(straggle.FixedDeadline(60.0), 0.5))
    return {name: value for name, value in state.items() if name != "history.progress.entered_s"}


TWO_STAGES = {"stages": 2}
NOTHING = Recording((), (), ())
STATES = {
    "a copy's world_size": case(
        "enter `step()` on all ranks, or use copy.module", ask_a_copy, enter_a_copy, wrap_a_copy
    ),
    "a copy of a group": case(
        "write StagedDataParallel(copy.module, process_group=...)",
        step_a_copy_of_a_group,
        lambda rank: wrap_a_copy(rank, dist.new_group([0, 1])),
    ),
    "registered late": case(
        "comes before the first step",
        late(lambda model: model.register_state(optimizer=sgd(model))),
        in_time(lambda model: model.register_state(optimizer=sgd(model))),
    ),
    "replayed late": case(
        "comes before the first step",
        late(lambda model: model.replay(NOTHING)),
        in_time(lambda model: model.replay(NOTHING)),
    ),
    "of other stages": case(
        "load it into a model that is wrapped as the saved one was, or begin without it",
        load({}, lambda rank: state_of(rank, stages=2)),
        load(TWO_STAGES, lambda rank: state_of(rank, stages=2)),
        trains(),
    ),
    "of an older version": case(
        "begin without it, and the deadline is learned again",
        load(TWO_STAGES, older),
        trains(),
    ),
    "loaded on one rank": case(
        "call load_straggle_state() on all ranks with what was saved together, or on none",
        load({}, state_of, only=1),
        load({}, state_of),
        trains(),
    ),
    "replayed on one rank": case("call replay() on all ranks or on none", replay(only=1), replay(), trains()),
}


def run_cases(rank, name):
    return follow(rank, globals()[name])


@pytest.mark.parametrize("name", ["CHANGED", "STATES"])
def test_advice_about_a_model_that_was_changed_or_loaded_can_be_followed(name):
    check(*run_forked(run_cases, 2, name))
