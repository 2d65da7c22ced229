"""A GradScaler sees what overflows, as with DDP, or is refused at its first step; what is left out is reported once."""

import pytest
import torch
from ranks import digest, run_ranks, staged
from torch.nn.parallel import DistributedDataParallel
from training import Stopper, features, mlp, warned

from straggle import Merge

pytestmark = pytest.mark.light

WITHIN_S = 30.0


def overflow(rank, number, loss):
    """Rank 1's loss overflows in step 2, and all ranks' in step 4."""
    return loss * float("inf") if (rank, number) == (1, 2) or number == 4 else loss


def train_ddp(rank):
    return train(rank, DistributedDataParallel(mlp()), lambda _: torch.enable_grad())


def train_ours(rank, fused):
    with staged(mlp(), merge=Merge(nonfinite="keep")) as model:
        return train(rank, model, lambda model: model.step(), fused=fused)


def train(rank, model, step, fused=False, num_steps=8):
    """The scale before each step, which grows after two steps without an overflow, and the parameters at the end."""
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scales = []
    for number in range(num_steps):
        scales.append(scaler.get_scale())
        with step(model):
            loss = model(features(rank, number)).square().mean()
            scaler.scale(overflow(rank, number, loss)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scales, digest(model.parameters())


def test_scaler_sees_what_overflows_on_any_rank_and_trains_as_with_ddp():
    plain, ours = run_ranks(train_ddp, 2), run_ranks(train_ours, 2, False)
    assert ours == plain
    assert ours[0] == ours[1]
    assert ours[0][0] == [16.0, 16.0, 32.0, 16.0, 16.0, 8.0, 8.0, 16.0]


def test_scaler_of_a_fused_optimizer_does_too():
    first, second = run_ranks(train_ours, 2, True)
    assert first == second
    assert first[0] == [16.0, 16.0, 32.0, 16.0, 16.0, 8.0, 8.0, 16.0]


def step_with_scaler(rank, enabled, fused, scheduled):
    module = mlp()
    optimizer = torch.optim.AdamW(module.parameters(), fused=fused)
    if scheduled:
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    with staged(module) as model:
        with model.step():
            scaler.scale(model(features(rank, 0)).square().mean()).backward()
        scaler.step(optimizer)
    return "stepped"


@pytest.mark.parametrize(("fused", "scheduled"), [(False, False), (True, False), (False, True), (True, True)])
def test_scaler_that_would_never_see_an_overflow_is_refused_at_its_first_step(fused, scheduled):
    for end in run_ranks(step_with_scaler, 2, True, fused, scheduled, outcomes=True, timeout_s=WITHIN_S):
        assert end.kind == "RuntimeError"
        assert 'write merge=straggle.Merge(nonfinite="keep")' in end.message


def test_scaler_that_is_not_enabled_is_not_refused():
    assert run_ranks(step_with_scaler, 2, False, False, False) == ["stepped"] * 2


def lose(rank, who):
    """Two steps in which these ranks have losses that are not finite."""
    module = mlp()
    with warned() as warnings, staged(module) as model:
        for number in range(2):
            with model.step():
                loss = model(features(rank, number)).sum()
                (loss * float("nan") if rank in who else loss).backward()
            module.zero_grad()
    return warnings


@pytest.mark.parametrize(("who", "nobody"), [([1], False), ([0, 1], True)])
def test_gradients_that_are_left_out_are_told_of_once_by_rank_0(who, nobody):
    first, second = run_ranks(lose, 2, who)
    (words,) = first
    assert words.startswith(f"step 0: gradients of ranks {who} were not finite and are left out of the merge")
    assert ("no rank had others" in words) == nobody
    assert 'Merge(nonfinite="keep")' in words
    assert second == []


# after how many gradients each rank is stopped in each step; `None`: never, 0: before its forward pass. In steps 1, 4
# and 5 no rank has any gradient, in steps 2 and 6 only one has some, and in step 3 both lack those of the first layers.
CUTS = [(None, None), (0, 0), (0, 3), (2, 4), (0, 0), (0, 0), (None, 0), (None, None)]
OPTIMIZERS = {
    "sgd": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, weight_decay=0.1),
    "plain loops": lambda own: torch.optim.AdamW(own, lr=0.1, foreach=False),
    "foreach": lambda own: torch.optim.AdamW(own, lr=0.1, foreach=True),
    "fused": lambda own: torch.optim.AdamW(own, lr=0.1, fused=True),
}


def optimizers_of(module, name, parts):
    own = [*module.parameters()]
    return [OPTIMIZERS[name](own[part]) for part in ((slice(0, 4), slice(4, None)) if parts else (slice(None),))]


def new_scaler():
    return torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)


def usual_calls(parameters, optimizers, scaler, unscales, leave_out=lambda: None):
    """What a loop calls after the passes; the norm of all gradients as it clipped them."""
    norm = torch.zeros(())
    if unscales:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
        torch.nn.utils.clip_grad_value_(parameters, 0.5)
    leave_out()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()
    return norm.item()


def state_of(module, optimizers, scaler):
    states = [value for optimizer in optimizers for own in optimizer.state.values() for value in own.values()]
    return digest(module.parameters()), digest(states), scaler.state_dict()


def train_cut(rank, name, parts, unscales):
    module = mlp()
    stopper = Stopper(module)
    optimizers, scaler, seen = optimizers_of(module, name, parts), new_scaler(), []
    with staged(module, merge=Merge(nonfinite="keep")) as model:
        for number, cuts in enumerate(CUTS):
            with model.step() as step:
                stopper.arm(step, cuts[rank])
                scaler.scale(model(features(rank, number)).square().mean()).backward()
            norm = usual_calls([*module.parameters()], optimizers, scaler, unscales)
            seen.append((norm, *state_of(module, optimizers, scaler)))
    return seen


def train_cut_alone(name, parts, unscales):
    """The same in one process: the mean of what the ranks have, and an optimizer finds none of what no rank has."""
    module = mlp()
    parameters, finished, seen = [*module.parameters()], [], []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(finished.append)
    optimizers, scaler = optimizers_of(module, name, parts), new_scaler()
    for number, cuts in enumerate(CUTS):
        found = {parameter: [] for parameter in parameters}
        for rank, cut in enumerate(cuts):
            finished.clear()
            scaler.scale(module(features(rank, number)).square().mean()).backward()
            for parameter in finished[:cut]:
                found[parameter].append(parameter.grad)
            module.zero_grad()
        for parameter, own in found.items():
            parameter.grad = sum(own) / len(own) if own else torch.zeros_like(parameter)

        def leave_out(found=found):
            for parameter, own in found.items():
                parameter.grad = parameter.grad if own else None

        if unscales:
            norm = usual_calls(parameters, optimizers, scaler, True, leave_out)
        else:  # no call to look at all before the optimizers do
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            norm = usual_calls(parameters, optimizers, scaler, False, leave_out)
        seen.append((norm, *state_of(module, optimizers, scaler)))
    return seen


@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("parts", [False, True], ids=["one optimizer", "two optimizers"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_usual_calls_work_on_a_step_in_which_no_rank_has_a_gradient_and_leave_all_as_it_is(name, parts, unscales):
    first, second = run_ranks(train_cut, 2, name, parts, unscales, timeout_s=WITHIN_S)
    assert first == second == train_cut_alone(name, parts, unscales)
    for number, cuts in enumerate(CUTS):
        if cuts == (0, 0):
            assert first[number][0] == 0.0
            assert first[number][1:3] == first[number - 1][1:3]


def train_with_closure(rank, nonfinite):
    module = mlp()
    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=1)
    scheduler, seen = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), []
    with staged(module, merge=Merge(nonfinite=nonfinite)) as model:
        for number in range(4):
            with model.step() as step:
                if number in (1, 2):
                    step.stop()
                model(features(rank, number)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step(lambda: 1.0)
            scheduler.step()
            optimizer.zero_grad()
            seen.append((digest(module.parameters()), scheduler.get_last_lr()))
    return seen


@pytest.mark.parametrize("nonfinite", ["keep", "drop"])
def test_closures_clipping_and_schedulers_work_on_such_a_step(nonfinite):
    first, second = run_ranks(train_with_closure, 2, nonfinite, timeout_s=WITHIN_S)
    assert first == second
    parameters, rates = zip(*first, strict=True)
    assert parameters[0] == parameters[1] == parameters[2] != parameters[3]
    assert rates == ([0.5], [0.25], [0.125], [0.0625])


def look_between(_rank, keeps):
    """What is in ``p.grad`` after a step without gradients, and after the next one if the loop does ``keeps`` there."""
    module = mlp()
    with staged(module, merge=Merge(nonfinite="keep")) as model:
        for number in range(3):
            module.zero_grad()
            with model.step() as step:
                if number > 0:
                    step.stop()
                model(features(0, number)).square().mean().backward()
            if number == 1:
                seen = [parameter.grad.norm().item() for parameter in module.parameters()]
                optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
                if keeps == "a penalty":
                    for parameter in module.parameters():
                        parameter.grad.add_(parameter.detach())  # with a rate of 1, it is stepped to 0
                elif keeps == "frozen":
                    module[0].weight.requires_grad_(False)
                optimizer.step()
                sums = [parameter.abs().sum().item() for parameter in module.parameters()]
        return seen, sums, [parameter.grad is None for parameter in module.parameters()]


def test_what_the_loop_adds_to_the_zeros_of_such_a_step_is_stepped():
    for seen, sums, absent in run_ranks(look_between, 2, "a penalty", timeout_s=WITHIN_S):
        assert seen == sums == [0.0] * 6
        assert absent == [False] * 6


def test_frozen_parameter_has_no_zeros():
    for _, sums, absent in run_ranks(look_between, 2, "frozen", timeout_s=WITHIN_S):
        assert all(sums)
        assert absent == [True] + [False] * 5


def step_seldom(_rank):
    """The loop steps after the first block, and after the third: the second had no gradients, and the third has two."""
    module = mlp()
    stopper, optimizer = Stopper(module), torch.optim.AdamW(module.parameters(), lr=0.1)
    with staged(module, merge=Merge(nonfinite="keep")) as model:
        for number, after in enumerate([None, 0, 2]):
            with model.step() as step:
                stopper.arm(step, after)
                model(features(0, number)).square().mean().backward()
            if number != 1:
                optimizer.step()
                optimizer.zero_grad()
        return [own["step"].item() for own in optimizer.state.values()]


def test_zeros_that_the_loop_keeps_over_blocks_are_no_gradient():
    assert run_ranks(step_seldom, 2, timeout_s=WITHIN_S) == [[1.0] * 4 + [2.0] * 2] * 2


def begin_idle(rank):
    module, scaler = mlp(), new_scaler()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with staged(module, merge=Merge(nonfinite="keep")) as model:
        model.register_state(optimizer=optimizer, scaler=scaler)
        model.idle = rank == 1
        for number in range(4):
            with model.step():
                scaler.scale(model(features(rank, number)).square().mean()).backward()
            usual_calls([*module.parameters()], [optimizer], scaler, True)
        return state_of(module, [optimizer], scaler)


def test_registered_scaler_works_on_a_rank_that_has_not_scaled_a_loss_yet():
    first, second = run_ranks(begin_idle, 2, timeout_s=WITHIN_S)
    assert first == second
    assert first[2]["scale"] == 32.0
