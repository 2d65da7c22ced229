"""The staged backward by itself: each use and limit of docs/staged-backward.md, beside plain ``backward()``."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from clock import paced
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import Tied, features, grads, mlp

from straggle import LastMerged, LastOwn, MovingAverage, OptimizerMomentum, StagedBackward, Zero

LAYERS = ["0", "2", "4"]  # the modules of mlp() that have parameters; backward finishes them from the right


# -- what the tests share


class Recurrent(nn.Module):
    """A cell unrolled over a sequence of shape (time, rows, 4), and a head on the last hidden state."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.RNNCell(4, 4), nn.Linear(4, 1)

    def forward(self, sequence, hidden):
        for x in sequence:
            hidden = self.cell(x, hidden)
        return self.head(hidden), hidden


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.discriminator(self.generator(x))


def seeded(kind):
    torch.manual_seed(0)
    return kind()


def loss_of(model, number=0):
    return model(features(0, number)).square().mean()


def plain_grads(model, *losses):
    """The gradients that plain backward passes leave in a copy of the model, from no gradient at all."""
    model = copy.deepcopy(model)
    model.zero_grad()
    for number, loss in enumerate(losses or [loss_of]):
        loss(model).backward(retain_graph=number < len(losses) - 1)
    return grads(model)


def same(ours, theirs):
    """Equal bit for bit, in the same places."""
    return [None if g is None else bits(g) for g in ours] == [None if g is None else bits(g) for g in theirs]


def bits(gradient):
    return gradient.detach().contiguous().view(torch.uint8).numpy().tobytes()


def only(model, full, kept):
    """The gradients of the parameters in these modules, ``None`` for all others."""
    names = [name for name, _ in model.named_parameters()]
    return [g if any(name.startswith(f"{k}.") for k in kept) else None for name, g in zip(names, full, strict=True)]


def stop_after(name):
    return lambda stage: stage.stop() if stage.name == name else None


def count_nodes(loss, run):
    """How many autograd nodes are executed while ``run`` goes backward from ``loss``."""
    executed, seen, waiting = [], set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            node.register_prehook(lambda _: executed.append(1))
            waiting += [below for below, _ in node.next_functions]
    run(loss)
    return len(executed)


class SavedTensors:
    """Counts the tensors that graphs built inside of it keep for backward, as long as they keep them."""

    def __init__(self):
        self._live = weakref.WeakSet()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed.tensor)

    def __enter__(self):
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)

    def __len__(self):
        return len(self._live)

    def _pack(self, tensor):
        packed = Packed(tensor.detach())  # with its grad_fn it would hold the graph that holds it
        self._live.add(packed)
        return packed


class Packed:
    def __init__(self, tensor):
        self.tensor = tensor


def in_a_step(staged, loss, stops=False):
    with staged.step() as step:
        loss.backward()
        assert not stops, "the block goes on after a stop"
    return step


def by_itself(staged, loss, stops=False):
    return staged.backward(loss)


IN_BOTH_WAYS = pytest.mark.parametrize("backward", [by_itself, in_a_step])


# -- step through backward


def test_callback_sees_each_stage_finished_before_the_layers_below_have_run():
    model = mlp()
    full = dict(zip(dict(model.named_parameters()), plain_grads(model), strict=True))
    seen = []

    def look(stage):
        ran = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        seen.append((stage.name, sorted({name[0] for name in ran})))
        assert set(stage.parameters) == {f"{stage.name}.weight", f"{stage.name}.bias"}
        for name, parameter in stage.parameters.items():
            assert bits(parameter.grad) == bits(full[name])
        gradients = [full[name] for name in stage.parameters]
        torch.testing.assert_close(stage.norm(), torch.cat([g.flatten() for g in gradients]).norm())

    StagedBackward(model, stages=LAYERS, on_stage=look).backward(loss_of(model))
    assert seen == [("4", ["4"]), ("2", ["2", "4"]), ("0", ["0", "2", "4"])]


def test_output_gradients_of_a_module_that_is_called_twice_come_last_call_first():
    model, seen = seeded(Recurrent), {}
    staged = StagedBackward(
        model, stages=["cell", "head"], on_stage=lambda stage: seen.update({stage.name: stage.output_gradients})
    )
    hidden, states = torch.zeros(8, 4), []
    model.cell.register_forward_hook(lambda _m, _x, y: states.append(y))
    loss = model(torch.stack([features(0, t) for t in range(3)]), hidden)[0].sum()
    expected = torch.autograd.grad(loss, states, retain_graph=True)
    staged.backward(loss)
    assert same(seen["cell"], reversed(expected))


def test_output_gradient_is_seen_where_the_pass_does_not_begin_at_the_models_output():
    model, seen = mlp(), []
    staged = StagedBackward(model, stages=LAYERS, on_stage=lambda s: seen.append((s.name, len(s.output_gradients))))
    with staged.step():
        x = features(0, 0)
        for layer in model:
            x = layer(x)
        x.square().mean().backward()
    assert seen == [("4", 1), ("2", 1), ("0", 1)]


def test_error_in_the_callback_leaves_backward_and_the_next_pass_is_whole():
    model, errors = mlp(), [ZeroDivisionError]

    def fail_once(_stage):
        if errors:
            raise errors.pop()

    staged = StagedBackward(model, on_stage=fail_once)
    with pytest.raises(ZeroDivisionError):
        staged.backward(loss_of(model))
    model.zero_grad()
    assert not staged.backward(loss_of(model)).report.truncated
    assert same(grads(model), plain_grads(model))


# -- seconds per stage


def test_seconds_of_all_passes_of_a_step_are_added():
    model, clock = paced([1.0, 2.0])
    staged = StagedBackward(model, clock=clock)
    with staged.step() as step:
        for _ in range(3):
            loss = loss_of(model)
            clock.advance(64.0)  # not backward
            staged.backward(loss)
    assert [(stage.seconds, stage.passes) for stage in step.report.stages] == [(6.0, 3), (3.0, 3)]


@pytest.mark.parametrize(("backward", "seconds"), [(by_itself, [12.0, 1.0]), (in_a_step, [4.0, 1.0])])
def test_time_of_the_loss_counts_only_where_the_pass_itself_is_seen_to_begin(backward, seconds):
    model, clock = paced([1.0, 4.0])
    model = nn.Sequential(model, nn.Tanh())  # the output's gradient arrives before the last layer's time begins
    staged = StagedBackward(model, clock=clock)
    loss = loss_of(model)
    loss.register_hook(lambda _: clock.advance(8.0))
    assert [stage.seconds for stage in backward(staged, loss).report.stages] == seconds


def test_work_below_the_last_parameter_belongs_to_the_last_stage():
    model, clock = paced([1.0, 4.0])
    x = features(0, 0).requires_grad_()
    x.register_hook(lambda _: clock.advance(16.0))
    report = StagedBackward(model, clock=clock).backward(model(2 * x).sum()).report
    assert [stage.seconds for stage in report.stages] == [4.0, 17.0]


def test_real_seconds_of_every_stage_are_positive_and_the_table_shows_them():
    model = mlp()
    report = StagedBackward(model).backward(loss_of(model)).report
    assert all(stage.seconds > 0 for stage in report.stages)
    assert [line.split()[0] for line in str(report).splitlines()] == ["stage", "4", "2", "0"]


# -- stop, and give the rest another gradient


@IN_BOTH_WAYS
@pytest.mark.parametrize("last", LAYERS[1:])
def test_stop_in_the_callback_keeps_the_finished_stages_exactly_and_leaves_the_others(backward, last):
    model = mlp()
    full, kept = plain_grads(model), LAYERS[LAYERS.index(last) :]
    staged = StagedBackward(model, stages=LAYERS, on_stage=stop_after(last))
    step = backward(staged, loss_of(model), stops=True)
    assert same(grads(model), only(model, full, kept))
    assert step.report.truncated
    assert {name[0] for name in step.report.missing} == set(LAYERS) - set(kept)
    assert {stage.name for stage in step.report.stages if stage.passes} == set(kept)


@pytest.mark.parametrize(
    ("budget_s", "took_s", "num_kept"),
    [
        (0.5, 1, [1, 0, 0, 0]),
        (1.5, 2, [2, 1, 0, 0]),
        (2.5, 3, [2, 2, 1, 0]),
        (3.5, 4, [2, 2, 2, 1]),
        (4.5, 4, [2, 2, 2, 2]),  # it is not spent
    ],
)
def test_budget_saves_the_time_of_the_stages_that_never_ran(budget_s, took_s, num_kept):
    """Each of four layers takes a second: the one in which the budget ends is stopped at its first gradient."""
    model, clock = paced([1.0] * 4)
    names = dict(model.named_parameters())
    full = dict(zip(names, plain_grads(model), strict=True))
    staged = StagedBackward(model, clock=clock)
    loss = loss_of(model)
    before = clock()
    report = staged.backward(loss, budget_s=budget_s).report
    assert (clock() - before, report.truncated) == (took_s, sum(num_kept) < 8)
    kept = [name for name, parameter in names.items() if parameter.grad is not None]
    assert sorted(kept) == sorted(names.keys() - set(report.missing))
    assert [sum(name[0] == layer for name in kept) for layer in "3210"] == num_kept
    assert all(bits(names[name].grad) == bits(full[name]) for name in kept)


def test_budget_of_a_step_counts_the_forward_pass_and_can_end_in_it():
    model, clock = paced([1.0] * 3)
    staged = StagedBackward(model, clock=clock)
    ran = []

    def ran_for_a_second(name):
        ran.append(name)
        clock.advance(1.0)

    for name, layer in model.named_children():
        layer.register_forward_hook(lambda *_, name=name: ran_for_a_second(name))
    with staged.step(budget_s=1.5) as step:
        loss_of(model).backward()
    assert ran == ["0", "1"]
    assert step.report.truncated
    assert grads(model) == [None] * 6


def test_another_thread_can_stop_the_pass():
    model = mlp()
    full = plain_grads(model)
    reached, stopped = threading.Event(), threading.Event()

    def meet(stage):
        if stage.name == "2":
            reached.set()
            assert stopped.wait(30)

    staged = StagedBackward(model, stages=LAYERS, on_stage=meet)

    def watch():
        assert reached.wait(30)
        staged.stop()
        stopped.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    report = staged.backward(loss_of(model)).report
    watcher.join()
    assert report.missing == ("0.weight", "0.bias")
    assert same(grads(model), only(model, full, ["2", "4"]))


def test_stop_between_two_steps_stops_nothing():
    model = mlp()
    staged = StagedBackward(model)
    staged.stop()
    assert not staged.backward(loss_of(model)).report.truncated


@IN_BOTH_WAYS
@pytest.mark.parametrize("last", LAYERS)
def test_activations_of_the_stages_that_never_ran_are_freed_at_once(backward, last):
    model = mlp()
    staged = StagedBackward(model, stages=LAYERS, on_stage=stop_after(last))
    with SavedTensors() as saved:
        output = model(features(0, 0))
        loss = output.square().mean()
    assert len(saved) == 8
    gc.disable()  # nothing is to wait for the collector
    try:
        backward(staged, loss)
        assert len(saved) == 0
    finally:
        gc.enable()
    assert not loss.requires_grad
    assert not output.requires_grad


def test_second_backward_from_a_loss_that_was_detached_says_so():
    model = mlp()
    loss = loss_of(model)
    StagedBackward(model, stages=LAYERS, on_stage=stop_after("4")).backward(loss)
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()


@pytest.mark.parametrize("name", ["nothing", "Zero", "LastMerged", "LastOwn", "MovingAverage", "OptimizerMomentum"])
def test_stages_that_were_not_reached_get_nothing_or_the_estimate(name):
    """After two complete passes with gradients ``a`` and ``b``, one that stops after the last layer."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    estimator = {
        "nothing": None,
        "Zero": Zero(),
        "LastMerged": LastMerged(weight=0.25),
        "LastOwn": LastOwn(),
        "MovingAverage": MovingAverage(decay=0.5),
        "OptimizerMomentum": OptimizerMomentum(optimizer),
    }[name]
    a, b, c = (plain_grads(model, lambda m, number=number: loss_of(m, number)) for number in range(3))
    last = [None]
    staged = StagedBackward(
        model, stages=LAYERS, estimator=estimator, on_stage=lambda s: s.name == last[0] and s.stop()
    )
    for number in range(2):
        model.zero_grad()
        staged.backward(loss_of(model, number))
        optimizer.step()
    model.zero_grad()
    last[0] = "4"
    staged.backward(loss_of(model, 2))
    zero, average = [torch.zeros_like(g) for g in a], [old.lerp(new, 0.5) for old, new in zip(a, b, strict=True)]
    momentum = [(0.5 * old + new) * 0.5 for old, new in zip(a, b, strict=True)]
    expected = {"nothing": [None] * 6, "Zero": zero, "MovingAverage": average, "OptimizerMomentum": momentum}
    own = only(model, c, ["4"])
    assert same(grads(model), [e if g is None else g for g, e in zip(own, expected.get(name, b), strict=True)])


def test_estimate_is_added_to_gradients_that_were_there():
    model = mlp()
    last = []
    staged = StagedBackward(
        model, stages=LAYERS, estimator=LastMerged(), on_stage=lambda s: s.name in last and s.stop()
    )
    staged.backward(loss_of(model))
    full = grads(model)
    last.append("4")
    staged.backward(loss_of(model))
    assert same(grads(model), [2 * gradient for gradient in full])


def test_estimate_is_not_given_to_a_pass_that_was_not_stopped():
    model = mlp()
    staged = StagedBackward(model, stages=LAYERS, estimator=LastMerged())
    staged.backward(loss_of(model))
    model.zero_grad()
    staged.backward(model[4](features(0, 0, rows=8).repeat(1, 2)).sum())  # the head only
    assert [p.grad is None for p in model.parameters()] == [True] * 4 + [False] * 2


# -- update a layer at once


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    ],
    ids=["SGD with momentum", "AdamW"],
)
@pytest.mark.parametrize("kind", [mlp, Tied])
def test_optimizer_step_per_stage_gives_the_parameters_of_one_step_at_the_end(kind, make):
    model, updated = seeded(kind), []
    plain = copy.deepcopy(model)

    def update(stage):
        updated.append(stage.name)
        optimizers[stage.name].step()
        optimizers[stage.name].zero_grad()

    names = [name for name, child in model.named_children() if grads(child)]
    staged = StagedBackward(model, stages=names, on_stage=update)
    optimizers = {stage.name: make([staged.parameters[i] for i in stage.parameters]) for stage in staged.stages}
    at_the_end = make(plain.parameters())
    for number in range(5):
        staged.backward(loss_of(model, number))
        loss_of(plain, number).backward()
        at_the_end.step()
        at_the_end.zero_grad()
    assert same(model.parameters(), plain.parameters())
    assert sorted(updated) == sorted(5 * names)


def test_gradient_that_the_callback_frees_is_gone_before_the_next_stage_has_one():
    model, held = mlp(), []

    def free(stage):
        held.append({name[0] for name, parameter in model.named_parameters() if parameter.grad is not None})
        for parameter in stage.parameters.values():
            parameter.grad = None

    report = StagedBackward(model, stages=LAYERS, on_stage=free).backward(loss_of(model)).report
    assert held == [{"4"}, {"2"}, {"0"}]
    assert set(report.passes.values()) == {1}


# -- several passes


def test_two_losses_over_one_graph_add_up_at_their_own_depths():
    def shallow(model):
        return model[:2](features(0, 0)).square().mean()

    model = mlp()
    full = plain_grads(model, loss_of, shallow)
    staged = StagedBackward(model, stages=LAYERS)
    with staged.step() as step:
        hidden = model[:2](features(0, 0))
        staged.backward(model[2:](hidden).square().mean(), retain_graph=True)
        staged.backward(hidden.square().mean())
    assert same(grads(model), full)
    assert {name: count for name, count in step.report.passes.items() if name.endswith("bias")} == {
        "0.bias": 2,
        "2.bias": 1,
        "4.bias": 1,
    }


@pytest.mark.parametrize("call", ["staged.backward", "loss.backward"])
def test_second_of_two_passes_can_be_stopped_and_the_first_stays_whole(call):
    model = mlp()
    full, double = plain_grads(model), plain_grads(model, loss_of, loss_of)
    passes = []
    staged = StagedBackward(
        model, stages=LAYERS, on_stage=lambda s: passes.append(s.name) or (passes.count("2") == 2 and s.stop())
    )
    with staged.step() as step:
        loss = loss_of(model)
        for retain_graph in (True, False):
            if call == "staged.backward":
                staged.backward(loss, retain_graph=retain_graph)
            else:
                loss.backward(retain_graph=retain_graph)
    twice = only(model, double, ["2", "4"])
    assert same(grads(model), [one if two is None else two for one, two in zip(full, twice, strict=True)])
    assert step.report.missing == ("0.weight", "0.bias")
    assert step.report.passes["0.weight"] == 1
    assert step.report.passes["4.weight"] == 2


def test_second_full_pass_over_a_retained_graph_that_was_stopped_gives_the_full_gradient():
    model = mlp()
    full, last = plain_grads(model), ["2"]
    staged = StagedBackward(model, stages=LAYERS, on_stage=lambda s: s.name in last and s.stop())
    loss = loss_of(model)
    assert staged.backward(loss, retain_graph=True).report.truncated
    model.zero_grad()
    last.clear()
    assert not staged.backward(loss).report.truncated
    assert same(grads(model), full)


@pytest.mark.parametrize("stop_in", ["backward", "forward"])
def test_graph_that_an_earlier_pass_retained_outlives_a_stop_of_a_later_one(stop_in):
    model, passes = mlp(), []
    staged = StagedBackward(
        model, stages=LAYERS, on_stage=lambda s: passes.append(s.name) or (len(passes) == 4 and s.stop())
    )
    with staged.step() as step:
        first = model(features(0, 0))
        staged.backward(first.square().mean(), retain_graph=True)
        if stop_in == "forward":
            step.stop()
        staged.backward(loss_of(model, 1))
    assert step.report.truncated
    model.zero_grad()
    first.square().mean().backward()
    assert same(grads(model), plain_grads(model))


class StyleLoss(nn.Module):
    """Calls backward in its forward pass, and passes on what it was given."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, x):
        self.run(x.square().mean())
        return x


@pytest.mark.parametrize("call", ["staged.backward", "loss.backward"])
@pytest.mark.parametrize("stop", [False, True])
def test_module_that_calls_backward_in_its_forward_pass(call, stop):
    """Two losses: one inside, after the first two layers, and one at the end, which may be stopped after the head."""

    def inner(model):
        return model[:4](features(0, 0)).square().mean()

    layers = mlp()
    once, both = plain_grads(layers, inner), plain_grads(layers, inner, loss_of)
    style = StyleLoss(lambda loss: backward(loss, retain_graph=True))
    model = nn.Sequential(*layers[:4], style, layers[4])
    staged = StagedBackward(model, stages=["0", "2", "5"], on_stage=stop_after("5" if stop else None))

    def backward(loss, retain_graph=False):
        if call == "staged.backward":
            staged.backward(loss, retain_graph=retain_graph)
        else:
            loss.backward(retain_graph=retain_graph)

    with staged.step() as step:
        backward(loss_of(model))
    head = only(layers, both, ["4"])
    expected = [inside if last is None else last for inside, last in zip(once, head, strict=True)] if stop else both
    assert same(grads(layers), expected)
    assert step.report.passes["0.weight"] == (1 if stop else 2)
    assert step.report.passes["5.weight"] == 1
    assert step.report.truncated == stop


# -- something that is no scalar


def test_gradient_can_be_given_for_one_root_or_for_several():
    weights = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    model = mlp()
    plain = copy.deepcopy(model)
    staged = StagedBackward(model)
    staged.backward(model(features(0, 0)), weights)
    plain(features(0, 0)).backward(weights)
    assert same(grads(model), grads(plain))

    output, other = model(features(0, 0)), plain(features(0, 0))
    staged.backward([output[0], output.sum()], [weights[0], None])
    torch.autograd.backward([other[0], other.sum()], [weights[0], None])
    assert same(grads(model), grads(plain))


@pytest.mark.parametrize("last", LAYERS)
def test_truncation_works_from_something_that_is_no_scalar(last):
    model, weights = mlp(), torch.ones(8, 2)
    full = plain_grads(model, lambda m: (m(features(0, 0)) * weights).sum())
    StagedBackward(model, stages=LAYERS, on_stage=stop_after(last)).backward(model(features(0, 0)), weights)
    assert same(grads(model), only(model, full, LAYERS[LAYERS.index(last) :]))


# -- custom functions


class Cube(torch.autograd.Function):
    """A hand-written backward pass."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class Again(Cube):
    """No backward pass of its own: autograd goes through the same operations, inside of the running pass."""

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = x**3
        return torch.autograd.grad(y, x, gradient)


class First(torch.autograd.Function):
    """The sum of two; only one of them gets a gradient."""

    @staticmethod
    def forward(_ctx, x, y):
        return x + y

    @staticmethod
    def backward(_ctx, gradient):
        return gradient, None


class Custom(nn.Module):
    """A custom function between two linear layers."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 2), function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


class TwoBranches(nn.Module):
    """Two layers whose sum goes through ``First``."""

    def __init__(self):
        super().__init__()
        self.used, self.unused, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(First.apply(self.used(x), self.unused(x)))


@pytest.mark.parametrize("function", [Cube.apply, Again.apply], ids=["by hand", "nested"])
@pytest.mark.parametrize("stop", [None, "last"])
def test_custom_function_in_the_model_works_and_nobody_registers_anything(function, stop):
    model = seeded(lambda: Custom(function))
    full = plain_grads(model)
    step = StagedBackward(model, stages=["first", "last"], on_stage=stop_after(stop)).backward(loss_of(model))
    assert same(grads(model), only(model, full, ["last"]) if stop else full)
    assert step.report.truncated == (stop is not None)


def test_branch_that_gets_none_is_not_finished_in_any_pass():
    model, seen = seeded(TwoBranches), []
    used, old = plain_grads(model), {}
    staged = StagedBackward(model, stages=["unused", "used", "last"], on_stage=lambda s: seen.append(s.name))
    for _ in range(2):
        seen.clear()
        report = staged.backward(loss_of(model)).report
        assert seen == ["last", "used"]
        assert (report.truncated, report.missing) == (False, ())
        assert {name for name, count in report.passes.items() if count == 0} == {"unused.weight", "unused.bias"}
        assert same(grads(model), [old.get(i) if g is None else g for i, g in enumerate(used)])
        # the second time there are gradients from before, which are no sign of new ones
        old = dict(enumerate(torch.ones_like(parameter) for parameter in model.parameters()))
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = old[number].clone()
        used = [None if g is None else 1 + g for g in used]


# -- grad_input and grad_output

A = torch.tensor([[1.0, -2.0, -1.0], [-2.0, 1.0, -2.0], [-1.0, -2.0, 1.0]]) / 4


class Adjoint(nn.Module):
    """``u + A u``"""

    def __init__(self):
        super().__init__()
        self.A = nn.Parameter(A.clone())

    def forward(self, u):
        return u + self.A @ u


def test_gradient_at_each_boundary_is_the_adjoint_recursion_applied_again_and_again():
    model, seen, hooked = nn.Sequential(*(Adjoint() for _ in range(3))), [], {}
    for name, layer in model.named_children():
        layer.register_full_backward_hook(
            lambda _m, grad_input, grad_output, name=name: hooked.update({name: (grad_input[0], grad_output[0])})
        )
    u, y = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([1.0, 0.0, -1.0])
    staged = StagedBackward(model, on_stage=lambda stage: seen.append(stage.output_gradients[0]))
    out = model(u)
    staged.backward((out - y).square().sum() / 2)
    adjoints = [(out - y).detach()]
    for _ in range(3):
        adjoints.append((torch.eye(3) + A.T) @ adjoints[-1])
    assert same([*seen, u.grad], adjoints)  # quarters: exact in floating point
    for depth, name in enumerate(["2", "1", "0"]):
        assert same(hooked[name], [adjoints[depth + 1], adjoints[depth]])


def fired(model, run):
    """The hooks of all kinds that fire while ``run`` goes backward, by name of the layer."""
    events = {"pre-hook": [], "hook": [], "tensor hook": [], "parameter hook": []}

    def on_output(_layer, _x, y, name):
        y.register_hook(lambda _: events["tensor hook"].append(name))

    for name, layer in model.named_children():
        layer.register_full_backward_pre_hook(lambda *_, name=name: events["pre-hook"].append(name))
        layer.register_full_backward_hook(lambda *_, name=name: events["hook"].append(name))
        layer.register_forward_hook(lambda *args, name=name: on_output(*args, name))
        layer.weight.register_hook(lambda _, name=name: events["parameter hook"].append(name))
    run(model(features(0, 0).requires_grad_()).square().mean())
    return events


def linear_layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


@pytest.mark.parametrize("made", ["before the hooks", "after the hooks"])
def test_hooks_of_the_user_fire_as_in_a_plain_pass(made):
    plain = fired(linear_layers(), lambda loss: loss.backward())
    assert plain == {kind: ["3", "2", "1", "0"] for kind in plain}
    model, staged = linear_layers(), []
    if made == "before the hooks":
        staged.append(StagedBackward(model, on_stage=lambda _: None))

    def run(loss):
        (staged or [StagedBackward(model, on_stage=lambda _: None)])[0].backward(loss)

    assert fired(model, run) == plain


def test_hooks_of_the_user_fire_for_the_stages_that_ran_and_not_for_the_others():
    model = linear_layers()
    staged = StagedBackward(model, stages=["0", "1", "2", "3"], on_stage=stop_after("1"))
    events = fired(model, staged.backward)
    assert events.pop("hook") == ["3", "2"]  # that of "1" waits for the gradient of its input
    assert events == {kind: ["3", "2", "1"] for kind in events}


# -- the graph's memory


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.slow  # looks at all tensors of the process, of which other tests leave some
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_hundreds_of_truncated_steps_leave_as_many_tensors_as_fifty_and_a_process_as_large():
    """The graph of one step holds about 300 kB, so that keeping them would be a hundred megabytes."""
    model = mlp(width=64)
    staged = StagedBackward(model, stages=LAYERS, on_stage=stop_after("4"), estimator=LastMerged())

    def train_truncated(num_steps):
        """In turns from ``staged.backward`` and ``loss.backward()``."""
        for number in range(num_steps):
            with contextlib.nullcontext() if number % 2 else staged.step() as step:
                loss = model(features(0, number % 4, rows=256)).square().mean()
                if number % 2:
                    step = staged.backward(loss)
                else:
                    loss.backward()
            assert step.report.truncated
            model.zero_grad()

    train_truncated(50)
    num_tensors, num_bytes = live_tensors(), resident_bytes()
    train_truncated(300)
    assert live_tensors() <= num_tensors  # what other tests left may go meanwhile
    assert resident_bytes() < 1.02 * num_bytes


def test_second_backward_over_a_freed_graph_raises_torchs_own_error():
    model = mlp()
    staged = StagedBackward(model)
    loss = loss_of(model)
    staged.backward(loss)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        staged.backward(loss)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()
    assert not staged.backward(loss_of(model)).report.truncated


class Shift(nn.Module):
    """Adds a parameter: an operation that saves nothing for backward."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x + self.shift


def test_graph_that_saves_nothing_allows_a_second_backward_as_ever():
    model = Shift()
    staged = StagedBackward(model)
    loss = model(features(0, 0)).sum()
    for _ in range(2):
        staged.backward(loss)
    assert same(grads(model), [torch.full((4,), 16.0)])


@pytest.mark.parametrize("inside", [False, True], ids=["outside of a step", "in a step"])
def test_forward_pass_that_is_never_backpropagated_is_freed_with_its_output(inside):
    model = mlp()
    staged = StagedBackward(model, on_stage=lambda _: None)
    gc.disable()
    try:
        with staged.step() if inside else contextlib.nullcontext(), SavedTensors() as saved:
            output = model(features(0, 0))
            held = len(saved)
            del output
            assert (held, len(saved)) == (7, 0)
    finally:
        gc.enable()


# -- frozen parameters


def freeze(model, frozen=True):
    for parameter in model.parameters():
        parameter.requires_grad_(not frozen)


def test_frozen_discriminator_belongs_to_no_stage_and_costs_nothing():
    model = seeded(Adversaries)
    freeze(model.discriminator)
    full = plain_grads(model)
    plain = count_nodes(loss_of(model), lambda loss: loss.backward())
    model.zero_grad()
    staged = StagedBackward(model, on_stage=lambda _: None)
    assert [stage.name for stage in staged.stages] == ["generator.2", "generator.0"]
    assert count_nodes(loss_of(model), staged.backward) == plain
    assert same(grads(model), full)
    assert grads(model.discriminator) == [None] * 4
    freeze(model.discriminator, False)
    assert plain < count_nodes(loss_of(model), staged.backward)


def test_freezing_and_unfreezing_between_steps_is_noticed():
    model = seeded(Adversaries)
    staged, seen = StagedBackward(model, on_stage=lambda stage: seen.append(stage.name)), []
    for frozen in (model.discriminator, None, model.generator, model.discriminator, None):
        freeze(model, False)
        if frozen is not None:
            freeze(frozen)
        full = plain_grads(model)
        model.zero_grad()
        seen.clear()
        report = staged.backward(loss_of(model)).report
        assert same(grads(model), full)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        assert dict(report.passes) == dict.fromkeys(trained, 1)
        assert sorted(seen) == sorted({name.rpartition(".")[0] for name in trained})


def test_stages_that_were_given_by_name_can_be_frozen_between_steps():
    model = seeded(Adversaries)
    staged = StagedBackward(model, stages=["generator", "discriminator"])
    for frozen, names in ((True, ["generator"]), (False, ["discriminator", "generator"])):
        freeze(model.discriminator, frozen)
        report = staged.backward(loss_of(model)).report
        assert [stage.name for stage in report.stages] == names


@pytest.mark.parametrize("unfreeze", [False, True])
def test_output_gradients_are_those_of_their_stage_right_after_freezing_and_unfreezing(unfreeze):
    """The forward pass runs before the step that notices; the shapes say whose output it is."""
    model, seen = seeded(Adversaries), []
    freeze(model.discriminator, unfreeze)
    staged = StagedBackward(model, on_stage=lambda s: seen.append((s.name, [g.shape[1] for g in s.output_gradients])))
    freeze(model.discriminator, not unfreeze)
    staged.backward(loss_of(model))
    own = [("generator.2", [6]), ("generator.0", [8])]
    assert seen == ([("discriminator.2", [1]), ("discriminator.0", [8]), *own] if unfreeze else own)


def test_model_that_is_frozen_as_a_whole_is_refused():
    model = mlp()
    staged = StagedBackward(model)
    freeze(model)
    with pytest.raises(ValueError, match="Sequential has no parameter with requires_grad=True"), staged.step():
        pass
    assert not model(features(0, 0)).requires_grad  # evaluating it is no step
    freeze(model, False)
    assert not staged.backward(loss_of(model)).report.truncated


# -- an RNN


def test_unrolled_graph_is_whole_or_says_that_the_shared_weights_are_missing():
    def unrolled(model):
        sequence = torch.stack([features(0, t, rows=3) for t in range(12)])
        return model(sequence, torch.zeros(3, 4))[0].square().mean()

    model, last = seeded(Recurrent), []
    full = plain_grads(model, unrolled)
    staged = StagedBackward(model, stages=["cell", "head"], on_stage=lambda s: s.name in last and s.stop())
    assert set(staged.backward(unrolled(model)).report.passes.values()) == {1}
    assert same(grads(model), full)
    model.zero_grad()
    last.append("head")
    report = staged.backward(unrolled(model)).report
    assert report.missing == tuple(name for name, _ in model.named_parameters() if name.startswith("cell"))
    assert same(grads(model), only(model, full, ["head"]))


# -- one pass


@pytest.mark.parametrize("kind", [mlp, Tied, Adversaries])
@pytest.mark.parametrize("on_stage", [None, lambda _: None])
def test_executed_autograd_nodes_are_those_of_plain_backward(kind, on_stage):
    model = seeded(kind)
    plain = count_nodes(loss_of(model), lambda loss: loss.backward())
    staged = StagedBackward(model, on_stage=on_stage)
    assert count_nodes(loss_of(model), staged.backward) == plain
    assert count_nodes(loss_of(model), lambda loss: in_a_step(staged, loss)) == plain


# -- limits


class CheckpointedTwice(nn.Module):
    """One layer, used twice and checkpointed both times."""

    def __init__(self):
        super().__init__()
        self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return self.head(x)


@pytest.mark.parametrize("finished", [1, 2, 3, 4, 9])  # the last: there is no cut
def test_cut_in_shared_weights_under_reentrant_checkpointing_never_keeps_a_part(finished):
    module, x = seeded(CheckpointedTwice), torch.ones(3, 4, requires_grad=True)
    staged, seen = None, []

    def cut(parameter):
        seen.append(parameter)
        if len(seen) == finished:
            staged.stop()

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(cut)
    staged = StagedBackward(module)
    if finished <= 2:  # in the head, before the first checkpoint's own pass
        with staged.step() as step:
            module(x).sum().backward()
        assert {"block.weight", "block.bias"} <= set(step.report.missing)
        assert module.block.weight.grad is None
    else:
        message = r"parameter block\.\w+ got a gradient twice .*use_reentrant=False"
        with pytest.raises(RuntimeError, match=message), staged.step():
            module(x).sum().backward()


def chunk_by_chunk(model):
    """A loss whose hook runs forward and back again for each chunk, as GradCache does."""

    def again(_):
        with torch.enable_grad():
            for chunk in features(0, 0).chunk(4):
                model(chunk).square().mean().backward()

    loss = torch.ones((), requires_grad=True)
    loss.register_hook(again)
    return loss


def test_passes_that_a_hook_begins_are_parts_of_one_pass_which_is_not_stopped_between_them():
    model, stages = seeded(lambda: Tied()), []
    expected = plain_grads(model, chunk_by_chunk)
    staged = StagedBackward(model, on_stage=lambda stage: (stages.append(stage.name), stage.stop()))
    for backward in (by_itself, in_a_step):
        model.zero_grad()
        stages.clear()
        report = backward(staged, chunk_by_chunk(model)).report
        assert same(grads(model), expected)
        assert set(report.passes.values()) == {1}
        assert len(stages) == len(staged.stages)  # each once, when its gradients are whole


def test_undefined_gradient_that_is_the_first_sign_of_a_pass_is_not_counted():
    module = nn.ModuleDict({"body": nn.Linear(4, 4), "gate": nn.Linear(4, 1, bias=False)})
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    with StagedBackward(module).step() as step:
        for _ in range(2):
            First.apply(module["body"](torch.ones(2, 4)), module["gate"].weight).sum().backward()
    assert step.report.passes == {"body.weight": 2, "body.bias": 2, "gate.weight": 0}


def failing_once(layer):
    """The first backward pass that comes to its output fails."""
    failures = [ValueError("out of memory")]

    def fail(_gradient):
        if failures:
            raise failures.pop()

    layer.register_forward_hook(lambda _module, _args, output: output.register_hook(fail) and None)


@pytest.mark.parametrize(("emptied", "retried"), [(True, True), (False, True), (False, False)])
def test_pass_that_failed_may_be_run_again_and_is_missing_what_was_not_computed(emptied, retried):
    model = mlp()
    full = plain_grads(model)
    failing_once(model[2])
    staged = StagedBackward(model, stages=LAYERS)
    with staged.step() as step:
        with pytest.raises(ValueError, match="out of memory"):
            loss_of(model).backward()
        if emptied:
            model.zero_grad()
        if retried:
            loss_of(model).backward()
    head, others = ("4.weight", "4.bias"), ("0.weight", "0.bias", "2.weight", "2.bias")
    assert step.report.passes == {**dict.fromkeys(head, retried + (not emptied)), **dict.fromkeys(others, retried)}
    assert set(step.report.missing) == (set() if emptied else set(others))
    assert not step.report.truncated
    if emptied:
        assert same(grads(model), full)


def test_modules_whose_forward_pass_ran_before_have_no_output_gradients_but_are_staged():
    model, seen = mlp(), []
    full = plain_grads(model)
    loss = loss_of(model)
    staged = StagedBackward(model, stages=LAYERS, on_stage=lambda s: seen.append((s.name, s.output_gradients)))
    staged.backward(loss)
    assert seen == [("4", ()), ("2", ()), ("0", ())]
    assert same(grads(model), full)


def test_hook_that_empties_gradients_is_registered_after_the_stages():
    model = mlp()
    staged, seen = StagedBackward(model, stages=LAYERS, on_stage=lambda s: seen.append(s.name)), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    assert set(staged.backward(loss_of(model)).report.passes.values()) == {1}
    assert seen == ["4", "2", "0"]
