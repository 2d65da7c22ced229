"""What a loop has of ``p.grad`` when it goes on to the next step stays as it is, as under DDP."""

import pytest
import torch
from ranks import run_ranks, staged
from torch.nn.parallel import DistributedDataParallel
from training import Signals, Stopper, features, mlp

from straggle import FixedDeadline, LateHandling, Merge

NUM_STEPS = 5
KEEPS = {
    "gradients": lambda gradient: gradient,
    "views": lambda gradient: gradient.view(-1)[1:],
    "detached": lambda gradient: gradient.detach(),
    "detached in place": lambda gradient: gradient.detach_(),
}


def zero(optimizer, how, number):
    if how == "every other step":
        how = "to None" if number % 2 else "never"
    if how != "never":
        optimizer.zero_grad(set_to_none=how == "to None")


def kept_and_copied(parameters, keep):
    """What the loop keeps of a step, and a copy of it."""
    kept = [keep(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return kept, [one.clone() for one in kept]


def train(rank, keep, how, late, options):
    """For each step the sums of what was kept, as it was then and as it is in the end."""
    module = mlp()
    stopper = Stopper(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    then, steps = [], []
    with staged(module, **options) as model:
        for number in range(NUM_STEPS):
            with model.step() as step:
                stopper.arm(step, 2 if late and rank == 1 and number in (1, 2) else None)
                model(features(rank, number)).square().sum().backward()
            kept, copies = kept_and_copied(module.parameters(), KEEPS[keep])
            optimizer.step()
            zero(optimizer, how, number)
            if how == "in place":  # what the loop keeps is zeroed with p.grad, and stays so
                copies = [one.clone() for one in kept]
            steps.append(kept)
            then.append(copies)
        return [[map_of(kept), map_of(copies)] for kept, copies in zip(steps, then, strict=True)]


def map_of(tensors):
    return [tensor.tolist() for tensor in tensors]


def train_ddp(rank, how):
    module = mlp()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    steps = []
    for number in range(NUM_STEPS):
        model(features(rank, number)).square().sum().backward()
        steps.append([parameter.grad for parameter in module.parameters()])
        optimizer.step()
        zero(optimizer, how, number)
    return [map_of(step) for step in steps]


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("late", [False, True], ids=["nobody late", "one late"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_a_loop_keeps_of_a_gradient_is_not_overwritten(world_size, late, keep):
    for steps in run_ranks(train, world_size, keep, "to None", late, {}):
        for kept, copies in steps:
            assert kept == copies


@pytest.mark.parametrize("how", ["in place", "every other step"])
@pytest.mark.parametrize("late", [False, True], ids=["nobody late", "one late"])
def test_nor_where_gradients_are_zeroed_in_place_or_added_up(late, how):
    for steps in run_ranks(train, 2, "gradients", how, late, {}):
        for kept, copies in steps:
            assert kept == copies


def test_all_gradients_of_a_run_are_those_of_ddp():
    ours, ddp = run_ranks(train, 2, "gradients", "to None", False, {}), run_ranks(train_ddp, 2, "to None")
    assert [[kept for kept, _ in steps] for steps in ours] == ddp


@pytest.mark.parametrize(
    "options",
    [{"merge": Merge(wire_dtype="bfloat16")}, {"merge": Merge(nonfinite="keep")}, {"stages": 1}],
    ids=["rounded", "not looked at", "one stage"],
)
def test_it_holds_whatever_is_merged_in_which_way(options):
    for steps in run_ranks(train, 2, "gradients", "to None", False, options):
        for kept, copies in steps:
            assert kept == copies


def fall_behind(rank):
    """Rank 1 is stuck before step 2 until three steps are merged without it, and keeps all gradients."""
    module, signals = mlp(), Signals()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    steps = []
    with staged(module, deadline=FixedDeadline(0.2), late_handling=LateHandling(grace_s=0.0)) as model:
        for number in range(9):
            if rank == 1 and number == 2:
                signals.wait("merged 4")
            with model.step():
                model(features(rank, number)).square().sum().backward()
            if rank == 0:
                signals.send(f"merged {number}")
            steps.append(kept_and_copied(module.parameters(), KEEPS["gradients"]))
            optimizer.step()
            optimizer.zero_grad()
        return [[map_of(kept), map_of(copies)] for kept, copies in steps]


def test_a_rank_that_catches_up_keeps_the_gradients_of_each_step_that_was_merged_without_it():
    first, second = run_ranks(fall_behind, 2)
    assert all(kept == copies for kept, copies in [*first, *second])
    assert [copies for _, copies in first] == [copies for _, copies in second]


def step_early(rank):
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    steps = []
    with staged(module, merge=Merge(nonfinite="keep")) as model:
        for number in range(NUM_STEPS):
            with model.step(optimizer=optimizer):
                model(features(rank, number)).square().sum().backward()
            steps.append(kept_and_copied(module.parameters(), KEEPS["gradients"]))
            optimizer.zero_grad()
        return [[map_of(kept), map_of(copies)] for kept, copies in steps]


def test_it_holds_where_the_optimizer_steps_during_the_merge():
    for steps in run_ranks(step_early, 2):
        for kept, copies in steps:
            assert kept == copies
            assert kept


def reuse(rank):
    """Where the gradients lie, without anything kept."""
    module = mlp()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    places = []
    with staged(module) as model:
        for number in range(NUM_STEPS):
            with model.step():
                model(features(rank, number)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            places.append([parameter.grad.data_ptr() for parameter in module.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    return places


def test_nothing_is_allocated_where_a_loop_keeps_nothing():
    for first, *places in run_ranks(reuse, 2):  # the stages are planned after the first step
        assert first
        assert all(place == places[0] for place in places)
