"""The advice of errors in a step, and about the loop around it: each is made, followed, and trained with."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from advice import case, check, follow, plain, sgd, stepping, train, trains
from ranks import run_forked, staged
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_, get_total_norm
from training import Stopper, features, mlp, warned

import straggle
from straggle import Merge

KEEP = Merge(nonfinite="keep")


def loss_of(model, x):
    return model(x).square().mean()


# -- clipping and the optimizer


def clipped_inside(model, optimizer, x):
    with model.step():
        loss_of(model, x).backward()
        clip_grad_norm_(model.parameters(), 1e6)
    optimizer.step()
    optimizer.zero_grad()


def clipped(model, optimizer, x):
    with model.step():
        loss_of(model, x).backward()
    assert clip_grad_norm_(model.parameters(), 1e6) > 0
    optimizer.step()
    optimizer.zero_grad()


def stepped_by_the_block(model, optimizer, x):
    with model.step(optimizer=optimizer):
        loss_of(model, x).backward()
    optimizer.zero_grad()


def stepped_and_clipped(model, optimizer, x):
    with model.step(optimizer=optimizer):
        loss_of(model, x).backward()
    clip_grad_norm_(model.parameters(), 1e6)


def stepped_with_the_norm(model, optimizer, x):
    with model.step(optimizer=optimizer):
        loss_of(model, x).backward()
    assert get_total_norm([parameter.grad for parameter in model.parameters()]) > 0
    optimizer.zero_grad()


def stepped_twice(model, optimizer, x):
    stepped_by_the_block(model, optimizer, x)
    optimizer.step()


def stepped_inside(model, optimizer, x):
    with model.step():
        loss_of(model, x).backward()
        optimizer.step()


def scaled(model, optimizer, x):
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    with model.step():
        scaler.scale(loss_of(model, x)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


class Own(optim.SGD):
    """May look at all gradients in its step."""


def hooked(parameters, lr):
    optimizer = optim.SGD(parameters, lr=lr)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def of_another(_parameters, lr):
    return optim.SGD(mlp().parameters(), lr=lr)


def given(make):
    """The block is given this optimizer."""
    return stepping(lambda model, _, x: stepped_by_the_block(model, make(model.parameters(), lr=0.1), x), merge=KEEP)


def after_the_block(make):
    """It steps after the block; the others see a plain step of SGD."""

    def way(rank):
        with staged(mlp(), merge=KEEP) as model:
            return train(model, rank, optimizer=make(model.parameters(), lr=0.1))

    return way


def lbfgs_after_the_block(rank):
    with staged(mlp()) as model:
        optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)
        for number in range(3):
            with model.step():
                loss = loss_of(model, features(rank, number))
                loss.backward()
            optimizer.step(lambda: torch.zeros(()))
        return model.module


OPTIMIZERS = {
    "clipped in the block": case(
        "clip after the block, before optimizer.step()", stepping(clipped_inside), trains(step=clipped)
    ),
    "clipped after a step": case(
        "leave optimizer= out of step(), and call optimizer.step() after clipping (for the norm alone there is "
        "torch.nn.utils.get_total_norm)",
        stepping(stepped_and_clipped, merge=KEEP),
        trains(step=clipped, merge=KEEP),
        trains(step=stepped_with_the_norm, merge=KEEP),
    ),
    "stepped twice": case(
        "optimizer.step() after `with model.step(optimizer=optimizer)`, which has made this step: leave out one",
        stepping(stepped_twice, merge=KEEP),
        trains(step=stepped_by_the_block, merge=KEEP),
        trains(merge=KEEP),
    ),
    "drops, and steps in the block": case(
        'it goes with merge=straggle.Merge(nonfinite="keep")',
        stepping(stepped_by_the_block),
        trains(step=stepped_by_the_block, merge=straggle.Merge(nonfinite="keep")),
        trains(),
    ),
    "stepped in the block": case("step after it", stepping(stepped_inside), trains()),
    "scaler": case(
        'so that its scale would only grow: write merge=straggle.Merge(nonfinite="keep")',
        stepping(scaled),
        trains(step=scaled, merge=straggle.Merge(nonfinite="keep")),
    ),
    "no optimizer": case(
        "give a torch.optim.Optimizer",
        given(lambda *_, **__: "SGD"),
        trains(step=stepped_by_the_block, merge=KEEP),
    ),
    "closure": case(
        "computes the loss again in its step, which needs all gradients: {}", given(optim.LBFGS), lbfgs_after_the_block
    ),
    "own": case(
        "leave optimizer= out of step(), and call optimizer.step() after the block", given(Own), after_the_block(Own)
    ),
    "hooked": case(
        "leave optimizer= out of step(), and call optimizer.step() after the block",
        given(hooked),
        after_the_block(hooked),
    ),
    "of another": case(
        "this {} has no parameter of the wrapped model",
        given(of_another),
        trains(step=stepped_by_the_block, merge=KEEP),
    ),
}

# -- passes


def two_losses(model, optimizer, x, num=1):
    with model.step(num_microbatches=num):
        loss = loss_of(model, x) / 2
        loss.backward(retain_graph=True)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def one_of_two(model, optimizer, x):
    with model.step(num_microbatches=2):
        loss_of(model, x).backward()


def no_count(model, optimizer, x):
    with model.step(num_microbatches=x.mean().item()):
        pass


def outside(model, optimizer, x):
    loss_of(model, x).backward()


def through(model, _, x, freeze=False, both=False):
    """The step of another model, whose loss goes through this one."""
    other = mlp(3)[:1]
    with staged(other) as first:
        model.requires_grad_(not freeze)
        with first.step():
            if both:
                with model.step():
                    loss_of(model, first(x) @ torch.ones(8, 4)).backward()
            else:
                loss_of(model, first(x) @ torch.ones(8, 4)).backward()
        assert other[0].weight.grad is not None
        model.requires_grad_(True)


def through_frozen(model, optimizer, x):
    through(model, optimizer, x, freeze=True)
    plain(model, optimizer, x)


def through_both(model, optimizer, x):
    through(model, optimizer, x, both=True)
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.zero_grad()
    plain(model, optimizer, x)


def not_finite(model, optimizer, x):
    with model.step():
        (loss_of(model, x) * float("nan")).backward()


def scaled_overflow(model, optimizer, x):
    """The first of each two steps overflows; the scaler leaves it out, and tries again."""
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for factor in (float("inf"), 1.0):
        with model.step():
            (scaler.scale(loss_of(model, x)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def around_the_model(model, optimizer, x, zero=False, call=False):
    """A pass goes around the wrapped model, where gradients are added to those of before."""
    for _ in range(1 if zero else 2):
        if zero:
            model.zero_grad(set_to_none=True)
        with model.step():
            loss = loss_of(model if call else model.module, x) / (1 if zero else 2)
            loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@dataclass
class Output:
    logits: Tensor


class InDataclass(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return Output(self.body(x))


def in_dataclass(rank):
    """Gradients of two steps are added up, and the output is a dataclass."""
    with staged(InDataclass()) as model:
        for number in range(4):
            with model.step():
                model(features(rank, number)).logits.square().mean().backward()
            if number % 2:
                sgd(model).step()
                model.zero_grad()
        return model.module


def logged_scalars(model, optimizer, x, num=8):
    with model.step() as step:
        loss = loss_of(model, x)
        loss.backward()
        step.log(**{f"scalar_{number}": loss for number in range(num)})
    assert len(model.last_report.scalars) == num
    optimizer.step()
    optimizer.zero_grad()


def skips_on_one(model, optimizer, x):
    with model.step():
        loss_of(model, x).backward()
    if model.rank == 0:
        optimizer.step()
    optimizer.zero_grad()


def changes(model, optimizer, x, on=(0, 1)):
    """Halves a parameter after each step."""
    plain(model, optimizer, x)
    with torch.no_grad():
        model.module[0].bias.mul_(0.5 if model.rank in on else 1.0)


def alike_everywhere(rank):
    with staged(mlp(), merge=Merge(check_every=1)) as model, warned() as warnings:
        for number in range(3):
            changes(model, sgd(model), features(rank, number))
        assert warnings == []
        return model.module


class Two(nn.Module):
    """Each network has an optimizer of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.one(x) + self.two(x)


def two_networks(rank, in_the_block):
    """Rank 1 is late before it comes to zero_grad, if that is in the block; there it is of one network only."""
    module = Two()
    stopper = Stopper(module)
    with staged(module) as model, warned("straggle.loop.open_step") as warnings:
        for number in range(3):
            if not in_the_block:
                module.zero_grad()
            with model.step() as step:
                stopper.arm(step, 0 if (rank, number) == (1, 1) else None)
                loss = loss_of(model, features(rank, number))
                if in_the_block:
                    module.one.zero_grad()
                loss.backward()
            sgd(model).step()
    return (warnings or [None])[0], module


PASSES = {
    "two losses": case(
        "model.step(num_microbatches=<number of backward passes>)",
        stepping(two_losses),
        trains(step=lambda *args: two_losses(*args, num=2)),
    ),
    "one pass of two": case("Write model.step(num_microbatches={})", stepping(one_of_two), trains()),
    "no count": case("must be an integer number of backward passes, such as 4", stepping(no_count), trains()),
    "outside": case("write `with model.step():` around the forward and backward pass", stepping(outside), trains()),
    "outside, in the step of another": case(
        "freeze this one during that pass, by requires_grad_(False) and afterwards (True), or open both steps, `with "
        "first.step(), second.step():`",
        stepping(through),
        trains(step=through_frozen),
        trains(step=through_both),
    ),
    "not finite": case(
        'If a GradScaler is to see them, write merge=straggle.Merge(nonfinite="keep")',
        stepping(not_finite),
        trains(step=scaled_overflow, merge=straggle.Merge(nonfinite="keep")),
    ),
    "around the model": case(
        "call the wrapped model itself, with tensors, tuples, lists, mappings or dataclasses as its output, or "
        "zero_grad(set_to_none=True) before the block",
        stepping(around_the_model),
        trains(step=lambda *args: around_the_model(*args, call=True)),
        trains(step=lambda *args: around_the_model(*args, zero=True)),
        in_dataclass,
    ),
    "scalars": case(
        "scalars in one step: at most 8",
        stepping(lambda *args: logged_scalars(*args, num=9)),
        trains(step=logged_scalars),
    ),
    "skipped on one rank": case(
        "look for `continue`, `break` or `return` that skips optimizer.step() on some ranks only, and resume from a",
        stepping(skips_on_one),
        trains(),
    ),
    "changed on one rank": case(
        "look for code that changes them on some ranks only, and resume from a checkpoint",
        stepping(lambda *args: changes(*args, on=(1,)), merge=Merge(check_every=1)),
        alike_everywhere,
    ),
    "zeroed in the block": case(
        "replicas may differ from here on; zero_grad() before the block",
        lambda rank: two_networks(rank, in_the_block=True)[0],
        lambda rank: two_networks(rank, in_the_block=False)[1],
    ),
}


def run_cases(rank, name):
    return follow(rank, globals()[name])


@pytest.mark.parametrize("name", ["OPTIMIZERS", "PASSES"])
def test_advice_on_steps_can_be_followed(name):
    check(*run_forked(run_cases, 2, name))
