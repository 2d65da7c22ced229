"""Two models in a loop, such as a generator and its discriminator: what one's lateness takes from the other."""

import copy
import itertools
from functools import partial

import pytest
import torch
from ranks import digest, run_ranks, staged
from torch import nn
from training import features, grads, mlp

WORLD = 2
CHAIN, BESIDE = "one through the other", "side by side"


def pair():
    """A generator and a discriminator of what it makes."""
    return {"g": mlp(1), "d": nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))}  # `mlp` sets the seed


def loss_of(models, x, how):
    if how == CHAIN:
        return models["d"](models["g"](x)).square().mean()
    return models["g"](x).square().mean() + models["d"](x[:, :2]).square().mean()


class Arrivals:
    """The names of parameters with a gradient, in order; stops a step when there are so many of them.

    Made before the modules are wrapped: the gradient with which it stops is the last one that counts.
    """

    def __init__(self, modules):
        self.names, self._after, self._step = [], None, None
        for key, module in modules.items():
            for name, parameter in module.named_parameters():
                parameter.register_post_accumulate_grad_hook(partial(self._came, f"{key}.{name}"))

    def arm(self, step, after):
        self.names.clear()
        self._step, self._after = step, after
        if after == 0:
            step.stop()

    def _came(self, name, _parameter):
        self.names.append(name)
        if len(self.names) == self._after:
            self._step.stop()


def cut(rank, order, how, num_passes):
    """Rank 1 is late in its third step, in one model or the other, after each number of gradients.

    Returns for each case the gradients of all, what came on rank 1, and the reports; and the parameters at the end.
    """
    modules = pair()
    arrivals = Arrivals(modules)
    ends = []
    with staged(modules["g"], deadline=1000.0) as g, staged(modules["d"], deadline=1000.0) as d:
        models = {"g": g, "d": d}
        optimizer = torch.optim.SGD([p for module in modules.values() for p in module.parameters()], lr=0.1)
        for number, (late, after) in enumerate([(None, None)] * 2 + cases(num_passes)):
            before = copy.deepcopy(modules)
            for module in modules.values():
                module.zero_grad()
            outer, inner = (models[key].step(num_passes) for key in order)
            with outer as first, inner as second:
                steps = dict(zip(order, (first, second), strict=True))
                arrivals.arm(steps[late] if late else None, after if rank == 1 and late else None)
                for part in range(num_passes):
                    loss_of(models, features(rank, 10 * number + part), how).backward()
            if late:
                full = [whole(before, how, own, number, num_passes) for own in range(WORLD)]
                lacks = {key: models[key].last_report.ranks[1] for key in "gd"}
                ends.append(
                    (
                        {key: grads(modules[key]) for key in "gd"},
                        full,
                        list(arrivals.names),
                        {key: (own.late, own.cause, own.reach) for key, own in lacks.items()},
                    )
                )
            optimizer.step()
        return ends, digest(p for module in modules.values() for p in module.parameters())


def cases(num_passes):
    """Of ten gradients of each pass."""
    places = range(0, 10, 2) if num_passes == 1 else (0, 4, 9, 13, 17)
    return [(late, after) for late in "gd" for after in places]


def whole(modules, how, rank, number, num_passes):
    """The gradients of each pass of a rank, by name."""
    passes = []
    for part in range(num_passes):
        own = copy.deepcopy(modules)
        for module in own.values():
            module.zero_grad()
        loss_of(own, features(rank, 10 * number + part), how).backward()
        passes.append({f"{key}.{name}": p.grad for key in "gd" for name, p in own[key].named_parameters()})
    return passes


@pytest.mark.parametrize(("order", "how"), [*itertools.product(["gd", "dg"], [CHAIN, BESIDE])])
def test_what_one_models_lateness_takes_from_another_is_late_in_the_reports_of_both(order, how):
    check(run_ranks(cut, WORLD, order, how, 1))


@pytest.mark.parametrize("order", ["gd", "dg"])
def test_with_several_passes_those_before_the_cut_count_for_both(order):
    check(run_ranks(cut, WORLD, order, CHAIN, 2))


def check(ranks):
    (first, parameters), (second, others) = ranks
    assert parameters == others
    for (gradients, full, _, reports), (same, _, came, same_reports) in zip(first, second, strict=True):
        assert reports == same_reports
        for key in "gd":
            assert digest(gradients[key]) == digest(same[key])
            late, cause, reach = reports[key]
            names = [name for name in full[0][0] if name.startswith(key)]
            num_passes = len(full[0])
            num_came = [came.count(name) for name in names]
            for name, count, merged in zip(names, num_came, gradients[key], strict=True):
                shares = [own[name] for own in full[0]] + [own[name] for own in full[1][:count]]
                torch.testing.assert_close(merged, num_passes * sum(shares) / len(shares), rtol=1e-4, atol=1e-6)
            missing = min(num_came) < num_passes
            assert late == missing, (key, num_came, reports)
            assert cause == (None if not missing else "backward" if len(came) % len(full[0][0]) else "forward")
            assert (reach == 1.0) == (not missing)


def unfrozen(_rank):
    modules = pair()
    with staged(modules["g"]) as g, staged(modules["d"]) as d, g.step():
        loss_of({"g": g, "d": d}, features(0, 0), CHAIN).backward()


def followed(rank, how):
    modules = pair()
    with staged(modules["g"]) as g, staged(modules["d"]) as d:
        models, x = {"g": g, "d": d}, features(rank, 0)
        if how == "frozen":
            d.requires_grad_(False)
            with g.step():
                loss_of(models, x, CHAIN).backward()
            d.requires_grad_(True)
            with d.step():
                d(g(x).detach()).square().mean().backward()
        else:
            with g.step(), d.step():
                loss_of(models, x, CHAIN).backward()
        return [grads(modules[key]) for key in "gd"]


def test_pass_of_one_model_through_another_that_is_in_no_step_is_told_what_to_do():
    for raised in run_ranks(unfrozen, WORLD, outcomes=True):
        words = raised.message
        assert "backward outside of a step: write `with model.step():`" in words
        assert "freeze this one during that pass, by requires_grad_(False)" in words
        assert "`with first.step(), second.step():`" in words
        assert "gradient for 2.bias" in words


@pytest.mark.parametrize("how", ["frozen", "both"])
def test_what_that_says_trains_both(how):
    oracle = pair()
    for rank in range(WORLD):
        loss_of(oracle, features(rank, 0), CHAIN).backward()
    for own in run_ranks(followed, WORLD, how):
        for key, gradients in zip("gd", own, strict=True):
            for one, other in zip(gradients, grads(oracle[key]), strict=True):
                torch.testing.assert_close(one, other / WORLD)


def one_block_in_the_other(rank, which):
    """The inner model has a loss of its own in the block of the outer one, and is late; the outer one goes on."""
    modules = pair()
    with staged(modules["g"], deadline=1000.0) as g, staged(modules["d"], deadline=1000.0) as d:
        for number in range(3):
            g.zero_grad(), d.zero_grad()
            x = features(rank, number)
            with g.step():
                if which == "before":
                    g(x).square().mean().backward()
                with d.step() as step:
                    if (rank, number) == (1, 2):
                        step.stop()
                    d(x[:, :2]).square().mean().backward()
                if which == "after":
                    g(x).square().mean().backward()
        return [(r.late, r.reach) for r in (g.last_report.ranks[1], d.last_report.ranks[1])], grads(modules["g"])


@pytest.mark.parametrize("which", ["before", "after"])
def test_model_whose_own_pass_was_whole_is_not_late_because_another_was(which):
    for (outer, inner), _ in run_ranks(one_block_in_the_other, WORLD, which):
        assert outer == (False, 1.0)
        assert inner == (True, 0.0)
