"""`straggle_state`: a plain dict with which a run goes on as if it had not stopped, and which says what it is of."""

import io
import json

import pytest
import torch
from ranks import digest, run_forked, staged
from torch import nn
from training import Stopper, features, mlp

from straggle import LastOwn, MovingAverage, QuantileDeadline

STAGES = ["0", "2", "4", "6"]
STOPS = [None, 2, 5, 3, None, 1, None, None]  # in the first step after a resume no rank is late


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def go_on(rank, make_estimator):
    """The parameters and the history after eight steps, and after the last four of them from a saved state."""
    ends, saved = [], {}
    for resumed in (False, True):
        module = mlp(seed=resumed, depth=4)
        stopper = Stopper(module)
        options = {"estimator": make_estimator(), "deadline": QuantileDeadline(0.5, warmup_steps=1000)}
        with staged(module, **options, stages=STAGES) as model:
            if resumed:
                module.load_state_dict(saved["module"])
                model.load_straggle_state(saved["straggle"])
            for number in range(4 if resumed else 0, 8):
                if number == 4 and not resumed:
                    saved = through_a_file({"module": module.state_dict(), "straggle": model.straggle_state()})
                with model.step() as step:
                    stopper.arm(step, STOPS[number] if rank else None)
                    model(features(rank, number)).square().mean().backward()
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter -= 0.1 * parameter.grad
                model.zero_grad()
            ends.append((digest(module.parameters()), model.history.num_steps))
    return ends


@pytest.mark.parametrize("make_estimator", [LastOwn, MovingAverage])
def test_run_goes_on_from_the_state_as_if_it_had_not_stopped(make_estimator):
    for first, again in run_forked(go_on, 2, make_estimator):
        assert first == again


def state_of_a_run(rank):
    with staged(mlp(depth=4), estimator=LastOwn(0.5), stages=2) as model:
        with model.step():
            model(features(rank, 0)).sum().backward()
        return model.straggle_state()


def test_state_is_flat_and_has_nothing_but_tensors_numbers_and_strings():
    (state,) = run_forked(state_of_a_run, 1)
    plain = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
    names = [name for name, _ in mlp(depth=4).named_parameters()]
    numel = sum(parameter.numel() for parameter in mlp(depth=4).parameters())
    model = f"{len(names)} parameters of {numel} elements"
    assert json.loads(json.dumps(plain)) == {
        "ranks": 1,
        "stages": "2",
        "estimator": "LastOwn",
        "model": model,
    }
    assert {name for name in state if name.startswith("estimator.")} == {f"estimator.{name}" for name in names}


def load_other(rank, kind):
    state = state_of_a_run(rank)
    if kind == "nothing":
        state = mlp().state_dict()
    if kind == "parameters":
        state["estimator.other.weight"] = torch.zeros(2)
    estimator = MovingAverage() if kind == "estimator" else LastOwn(0.5)
    width = 9 if kind == "model" else 8
    with staged(mlp(depth=4, width=width), estimator=estimator, stages=3 if kind == "stages" else 2) as model:
        model.load_straggle_state(state)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("stages", "of stages=2, and this run has stages=3"),
        ("estimator", "of estimator=LastOwn, and this run has estimator=MovingAverage"),
        ("model", "elements, and this run has model="),
        (
            "nothing",
            "no state of straggle_state(): it has no history.num_steps, but ['0.weight', '0.bias', '2.weight']",
        ),
        ("parameters", "of another model than this: 'other.weight'"),
    ],
)
def test_state_of_something_else_is_refused_with_both_values(kind, words):
    (end,) = run_forked(load_other, 1, kind, outcomes=True)
    assert end.kind == "ValueError"
    assert words in end.message


def state_of_two(rank):
    with staged(mlp(depth=4), estimator=MovingAverage()) as model:
        for step in range(2):
            with model.step():
                model(features(rank, step)).sum().backward()
            model.zero_grad()
        return model.straggle_state()


def load_of_two(_rank, state):
    with staged(mlp(depth=4), estimator=MovingAverage()) as model:
        model.load_straggle_state(state)
        return len(model.estimator.memory), model.history.num_steps, model.history.compute_s.tolist()


def test_state_of_another_number_of_ranks_brings_the_history_of_those_that_there_are():
    states = run_forked(state_of_two, 2)
    ((kept, num_steps, compute_s),) = run_forked(load_of_two, 1, states[1])
    assert (kept, num_steps) == (0, 2)  # the estimator begins again
    assert compute_s == states[0]["history.compute_s"][:, :1].tolist()


def test_estimator_of_ones_own_is_saved_by_what_is_in_its_memory():
    parameter = nn.Parameter(torch.zeros(2))
    estimator, again = MovingAverage(), MovingAverage()
    estimator.observe(parameter, torch.ones(2), merged=True)
    state = estimator.state_dict({parameter: "weight"})
    again.load_state_dict(state, {"weight": parameter})
    estimator.observe(parameter, torch.zeros(2), merged=True)  # what was loaded is a copy
    assert again.memory[parameter].tolist() == [1.0, 1.0]
