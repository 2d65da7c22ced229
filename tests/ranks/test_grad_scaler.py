"""A GradScaler sees what overflows, as with DDP, or is refused at its first step; what is left out is reported once."""

import pytest
import torch
from ranks import digest, run_ranks, staged
from torch.nn.parallel import DistributedDataParallel
from training import features, mlp, warned

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
