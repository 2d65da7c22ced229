"""Backward passes that a pass begins by itself: in hooks, as GradCache does, and in functions of one's own.

The oracle is the same program on a plain copy of the module, over the data of all ranks.
"""

import copy
from functools import partial
from itertools import product

import pytest
import torch
from ranks import run_forked, staged
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import Stopper, features, grads

WORLD, CHUNKS = 2, 3


class Encoder(nn.Module):
    """Two layers, the first of which may be computed again in backward, and a scale that only a loss uses."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        if self.use_reentrant is None:
            return self.last(self.first(x))
        return self.last(checkpoint(self.first, x.requires_grad_(), use_reentrant=self.use_reentrant))


def contrastive(outputs):
    """A loss that needs all chunks at once."""
    return (outputs @ outputs.T).logsumexp(1).mean()


def begins(call):
    """A hook that calls this, and leaves the gradient as it is."""

    def hook(*_):
        with torch.enable_grad():
            call()

    return hook


def chunks_of(model, x):
    """Chunks, their outputs without a graph, and the function that computes them again and goes back through them."""
    parts = x.chunk(CHUNKS)
    with torch.no_grad():
        outputs = [model(part).requires_grad_() for part in parts]

    def again():
        for part, output in zip(parts, outputs, strict=True):
            (model(part) * output.grad).sum().backward()

    return outputs, again


def hook_on_loss(model, x):
    """As sentence-transformers' cached losses: the loss is a leaf, and its graph reaches nothing."""
    outputs, again = chunks_of(model, x)
    loss = contrastive(torch.cat(outputs))
    loss.backward()
    loss = loss.detach().requires_grad_()
    loss.register_hook(begins(again))
    loss.backward()


def scaled_loss(model, x, register):
    """The loss's own pass gives the outputs their gradients and the scale its own; a hook of it does the rest."""
    outputs, again = chunks_of(model, x)
    together = torch.cat(outputs)
    scale = next(parameter for name, parameter in model.named_parameters() if name.endswith("scale"))
    total = together.sum()
    found = torch.autograd.grad(contrastive(together) * scale.detach(), outputs)
    for output, gradient in zip(outputs, found, strict=True):
        output.grad = gradient
    register(contrastive(together.detach()) * scale + 0 * total, total, again)


def hook_on_inner_tensor(model, x):
    def register(loss, total, again):
        total.register_hook(begins(again))
        loss.backward()

    scaled_loss(model, x, register)


def hook_on_node(model, x):
    def register(loss, _total, again):
        loss.grad_fn.register_prehook(begins(again))
        loss.backward()

    scaled_loss(model, x, register)


def hook_after_node(model, x):
    def register(loss, _total, again):
        loss.grad_fn.register_hook(begins(again))
        loss.backward()

    scaled_loss(model, x, register)


def hook_of_module(model, x):
    def register(loss, _total, again):
        last = nn.Identity()
        last.register_full_backward_hook(begins(again))
        last(loss).backward()

    scaled_loss(model, x, register)


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, again):
        ctx.again = again
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        begins(ctx.again)()
        return gradient, None


def own_function(model, x):
    scaled_loss(model, x, lambda loss, _, again: Again.apply(loss, again).backward())


def one_chunk(model, x):
    """One nested run, in the first two steps; later there are more."""
    outputs = model(x)
    loss = torch.ones((), requires_grad=True)
    loss.register_hook(begins(lambda: contrastive(outputs).backward()))
    loss.backward()


class Growing:
    """As many chunks as there were calls."""

    def __init__(self):
        self.number = 0

    def __call__(self, model, x):
        self.number += 1
        parts = x.chunk(self.number)
        loss = torch.ones((), requires_grad=True)
        loss.register_hook(begins(lambda: [contrastive(model(part)).backward() for part in parts]))
        loss.backward()


def graphs_of_before(model, x):
    """The hook runs back through graphs that there are already, and keeps them: nothing shows the outer pass."""
    losses = [contrastive(model(part)) for part in x.chunk(CHUNKS)]
    total = torch.ones((), requires_grad=True)
    total.register_hook(begins(lambda: [loss.backward(retain_graph=True) for loss in losses]))
    total.backward()


def gradients_by_hand_within(model, x):
    """The hook computes with `torch.autograd.grad` through the model, which gives no parameter a gradient."""
    outputs = model(x)

    def penalty(gradient):
        x2 = x.clone().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(model(x2).sum(), x2)
        return gradient * slope.norm()

    outputs.register_hook(penalty)
    contrastive(outputs).backward()


def deeper(model, x):
    """A hook of a pass that a hook has begun begins another."""
    outer, inner = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
    one, two, three = x.chunk(3)
    inner.register_hook(begins(lambda: [contrastive(model(part)).backward() for part in (one, two)]))
    outer.register_hook(begins(lambda: [inner.backward(), contrastive(model(three)).backward()]))
    outer.backward()


def with_another_model(model, x):
    """The hook trains another model, too, which is in no step."""
    torch.manual_seed(1)
    other = nn.Linear(3, 1)

    def both():
        outputs = model(x)
        other(outputs.detach()).sum().backward()
        contrastive(outputs).backward()

    loss = torch.ones((), requires_grad=True)
    loss.register_hook(begins(both))
    loss.backward()
    assert other.weight.grad is not None


PROGRAMS = {
    own.__name__: own
    for own in (
        hook_on_loss,
        hook_on_inner_tensor,
        hook_on_node,
        hook_after_node,
        hook_of_module,
        own_function,
        one_chunk,
        graphs_of_before,
        gradients_by_hand_within,
        deeper,
        with_another_model,
    )
} | {"growing": Growing}
CACHED = ("hook_on_loss", "own_function", "graphs_of_before", "deeper")
MODELS = {"plain": None, "checkpoints": False, "reentrant": True}


def program(name):
    return Growing() if name == "growing" else PROGRAMS[name]


def batch(rank, step, part=0):
    return features(rank, 10 * step + part, rows=6)


def train(rank, names, use_reentrant, num_passes):
    """Each program for three steps: reach, distance from the oracle's gradients."""
    ends = {}
    for name in names:
        module = Encoder(use_reentrant)
        oracle, run, run_oracle, worst = copy.deepcopy(module), program(name), program(name), 0.0
        with staged(module, deadline=1000.0) as model:
            for step in range(3):
                module.zero_grad(), oracle.zero_grad()
                with model.step(num_passes):
                    for part in range(num_passes):
                        run(model, batch(rank, step, part))
                if name == "growing":  # how many chunks it has depends on how often it was called
                    run_oracle.number = step
                whole(oracle, run_oracle, step, num_passes)
                worst = max(worst, distance(grads(module), grads(oracle)))
            ends[name] = worst, model.last_report.ranks[rank].reach
    return ends


def whole(oracle, run, step, num_passes):
    """Gradients of the mean over all ranks, without any merge."""
    for rank in range(WORLD):
        if isinstance(run, Growing):
            run.number = step
        for part in range(num_passes):
            run(oracle, batch(rank, step, part))
    for parameter in oracle.parameters():
        if parameter.grad is not None:
            parameter.grad /= WORLD


def distance(own, others):
    assert [one is None for one in own] == [one is None for one in others]
    pairs = [(one, other) for one, other in zip(own, others, strict=True) if one is not None]
    assert pairs
    return max((one - other).abs().max().item() for one, other in pairs)


@pytest.mark.parametrize("kind", MODELS)
def test_pass_that_begins_passes_has_the_gradients_of_plain_backward(kind):
    names = set(PROGRAMS) - {"gradients_by_hand_within"} if kind == "reentrant" else PROGRAMS  # torch refuses it
    for ends in run_forked(train, WORLD, list(names), MODELS[kind], 1):
        for name, (worst, reach) in ends.items():
            assert (name, reach) == (name, 1.0)
            assert worst < 1e-6, name


def test_passes_that_begin_passes_are_counted_as_the_loop_counts_them():
    names = [name for name in PROGRAMS if name != "growing"]
    for ends in run_forked(train, WORLD, names, None, 2):
        for name, (worst, reach) in ends.items():
            assert (name, reach) == (name, 1.0)
            assert worst < 1e-6, name


def back_to_back(rank):
    """Two passes one after the other, both of which only begin others, and two of which the first fails."""
    module = Encoder()
    results = []
    with staged(module, deadline=1000.0) as model:
        for fails in (False, True):
            module.zero_grad()
            with model.step(2):
                passes = []
                for part in range(2):
                    first, second = (contrastive(model(half)) for half in batch(rank, 0, part).chunk(2))
                    if fails and (rank, part) == (1, 0):
                        second.register_hook(out_of_memory)
                    passes.append(torch.ones((), requires_grad=True))
                    passes[-1].register_hook(begins(partial(backward_of, first, second)))
                for one in passes:
                    try:
                        one.backward()
                    except RuntimeError:
                        assert fails
            results.append((grads(module), model.last_report.ranks[1].cause, model.last_report.ranks[1].reach))
    return results


def backward_of(*losses):
    for loss in losses:
        loss.backward()


def out_of_memory(_gradient):
    raise RuntimeError("out of memory")


def halves(rank, part):
    oracle = Encoder()
    for half in batch(rank, 0, part).chunk(2):
        contrastive(oracle(half)).backward()
    return grads(oracle)


def mean(*shares):
    """Of gradients, each of a module."""
    return [None if own[0] is None else sum(own) / len(own) for own in zip(*shares, strict=True)]


def test_passes_without_anything_between_them_are_told_apart_and_a_part_of_one_counts_as_nothing():
    every = [halves(rank, part) for rank in range(WORLD) for part in range(2)]
    for (both, cause, reach), (without, failed_cause, failed_reach) in run_forked(back_to_back, WORLD):
        assert (cause, reach) == (None, 1.0)
        assert distance(both, [None if own is None else 2 * own for own in mean(*every)]) < 1e-6
        assert failed_cause == "error"
        assert failed_reach < 1.0
        left = mean(every[0], every[1], every[3])
        assert distance(without, [None if own is None else 2 * own for own in left]) < 1e-6


def cut(rank, name, after, num_passes):
    """Rank 1 stops in its third step after so many gradients of parameters have come; then a whole step."""
    module = Encoder()
    stopper, run = Stopper(module), PROGRAMS[name]
    seen = []
    with staged(module, deadline=1000.0) as model:
        for number in range(4):
            module.zero_grad()
            with model.step(num_passes) as step:
                if (rank, number) == (1, 2):
                    stopper.arm(step, after)
                for part in range(num_passes):
                    run(model, batch(rank, number, part))
            own = model.last_report.ranks[1]
            seen.append((grads(module), own.late, own.cause, own.stages))
    return seen[2:]


def alone(run, rank, step, part):
    oracle = Encoder()
    run(oracle, batch(rank, step, part))
    return grads(oracle)


CUTS = list(product(CACHED, (1, 4, 5, 11)))


def all_cuts(rank):
    return [cut(rank, name, after, 1) for name, after in CUTS]


def test_pass_that_is_cut_in_one_that_it_has_begun_counts_as_nothing_and_the_next_is_whole():
    cuts = [
        (name, own) for results in run_forked(all_cuts, WORLD) for (name, _), own in zip(CUTS, results, strict=True)
    ]
    for name, (late, following) in cuts:
        run = PROGRAMS[name]
        assert late[1:3] == (True, "backward")
        kept = [own for own, other in zip(late[0], alone(run, 0, 2, 0), strict=True) if other is not None]
        assert all(own is not None for own in kept)
        if name != "own_function":  # whose scale is finished before
            assert set(late[3]) == {0.0}
        assert distance(late[0][:4], alone(run, 0, 2, 0)[:4]) < 1e-6
        assert following[1:3] == (False, None)
        expected = mean(alone(run, 0, 3, 0), alone(run, 1, 3, 0))
        assert distance(following[0], expected) < 1e-6


def test_passes_of_before_the_cut_count():
    run = PROGRAMS["hook_on_loss"]
    for late, following in run_forked(cut, WORLD, "hook_on_loss", CHUNKS * 4 + 5, 2):
        assert late[1:3] == (True, "backward")
        share = mean(alone(run, 0, 2, 0), alone(run, 0, 2, 1), alone(run, 1, 2, 0))
        assert distance(late[0], [None if own is None else 2 * own for own in share]) < 1e-6
        assert following[1] is False


def kept(rank):
    """The loop does not zero the first step's gradients: the second's are added."""
    module = Encoder()
    with staged(module, deadline=1000.0) as model:
        for number in range(2):
            with model.step():
                hook_on_loss(model, batch(rank, number))
    return grads(module)


def test_kept_gradients_are_added_to_those_of_a_pass_that_begins_passes():
    oracle = Encoder()
    for step in range(2):
        for rank in range(WORLD):
            hook_on_loss(oracle, batch(rank, step))
    for own in run_forked(kept, WORLD):
        assert distance(own, [None if one is None else one / WORLD for one in grads(oracle)]) < 1e-6


def step_in_a_hook(rank):
    """A whole step of one model, forward pass included, in a hook of another's pass."""
    module, outer = Encoder(), Encoder()
    with staged(module, deadline=1000.0) as model, staged(outer, deadline=1000.0) as around:
        for number in range(2):
            module.zero_grad(), outer.zero_grad()

            def whole_step(number=number):
                with model.step():
                    contrastive(model(batch(rank, number))).backward()

            with around.step():
                loss = contrastive(around(batch(rank, number)))
                loss.register_hook(begins(whole_step))
                loss.backward()
    return grads(module), grads(outer)


def test_step_of_one_model_within_the_pass_of_another_is_a_step():
    expected = mean(*(alone(lambda model, x: contrastive(model(x)).backward(), rank, 1, 0) for rank in range(WORLD)))
    for inner, outer in run_forked(step_in_a_hook, WORLD):
        assert distance(inner, expected) < 1e-6
        assert distance(outer, expected) < 1e-6
