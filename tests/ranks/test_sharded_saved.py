"""A sharded model is saved by ``torch.distributed.checkpoint`` and goes on in a mesh of another shape."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import Raised, run_ranks, staged
from sharding import Blocks, batch, pair
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from straggle import MovingAverage, StagedDataParallel
from straggle.commands.saved.checkpoint import Checkpoint
from straggle.stop_signal import StopSignal

pytestmark = pytest.mark.slow  # FSDP2 on four ranks, several times

SAVED_AT, NUM_STEPS = 2, 4
ALL_ROWS = 24  # of a step: each rank has an equal part


def train(rank: int, size: int, replicas: int, folder: str, from_step: int, to_step: int) -> list[torch.Tensor]:
    """Some steps, from the checkpoint and to it if there is one; the parameters as a whole."""
    both = pair(replicas=replicas, shards=size // replicas)
    with staged(both.net, mesh=both.mesh["dp_replicate"]) as model:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        if from_step:
            load(model, optimizer, folder)
        for number in range(from_step, to_step):
            rows = batch(number, 0, ALL_ROWS).chunk(size)[rank]
            with model.step():
                model(rows).square().mean().backward()
            assert model.last_report.step == number
            optimizer.step()
            optimizer.zero_grad()
        if not from_step and folder:
            dcp.save(parts_of(model, optimizer), checkpoint_id=folder)
        return [own.full_tensor() for own in both.net.parameters()]


def parts_of(model: StagedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    states = get_state_dict(model.module, optimizer)
    return {"model": states[0], "optimizer": states[1], "straggle": model.shared_state}


def load(model: StagedDataParallel, optimizer: torch.optim.Optimizer, folder: str) -> None:
    parts = parts_of(model, optimizer)
    dcp.load(parts, checkpoint_id=folder)
    states = {"model_state_dict": parts["model"], "optim_state_dict": parts["optimizer"]}
    set_state_dict(model.module, optimizer, **states)


def test_sharded_model_goes_on_in_a_mesh_of_another_shape(tmp_path: Path) -> None:
    folder = str(tmp_path)
    expected = run_ranks(train, 4, 4, 2, "", 0, NUM_STEPS)[0]
    run_ranks(train, 4, 4, 2, folder, 0, SAVED_AT)
    for size, replicas in ((4, 1), (4, 4), (6, 3)):
        for ours in run_ranks(train, size, size, replicas, folder, SAVED_AT, NUM_STEPS):
            for own, other in zip(ours, expected, strict=True):
                torch.testing.assert_close(own, other, rtol=0, atol=1e-6)


def steps(model: StagedDataParallel, optimizer: torch.optim.Optimizer, rank: int, size: int, numbers: range) -> None:
    for number in numbers:
        rows = batch(number, 0, ALL_ROWS).chunk(size)[rank]
        with model.step():
            model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def of_the_command(rank: int, size: int, replicas: int, folder: Path, saves: bool) -> tuple[list[torch.Tensor], int]:
    """Steps before the command's checkpoint, or after it; the parameters as a whole, and how many are remembered."""
    both = pair(replicas=replicas, shards=size // replicas)
    with staged(both.net, mesh=both.mesh["dp_replicate"], estimator=MovingAverage()) as model:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        if saves:
            steps(model, optimizer, rank, size, range(SAVED_AT))
            Checkpoint(folder).save(SAVED_AT, model, optimizer)
        else:
            assert Checkpoint(folder).load(model, optimizer) == SAVED_AT
            assert model.history.num_steps == SAVED_AT
        num_remembered = len(model.estimator.memory)
        steps(model, optimizer, rank, size, range(SAVED_AT, NUM_STEPS))
        return [own.full_tensor() for own in both.net.parameters()], num_remembered


def test_checkpoint_of_the_command_goes_on_in_this_mesh_and_in_another(tmp_path: Path) -> None:
    expected, num_remembered = run_ranks(of_the_command, 4, 4, 2, tmp_path, True)[0]
    assert num_remembered == len(expected)
    for size, replicas in ((4, 2), (4, 1), (6, 3)):
        for ours, remembered in run_ranks(of_the_command, size, size, replicas, tmp_path, False):
            assert remembered == (num_remembered if (size, replicas) == (4, 2) else 0)
            for own, other in zip(ours, expected, strict=True):
                torch.testing.assert_close(own, other, rtol=0, atol=1e-6)


def loading(rank: int, folder: Path, sharded: bool) -> None:
    if sharded:
        both = pair()
        net, options = both.net, {"mesh": both.mesh["dp_replicate"]}
    else:
        net, options = Blocks(), {}
    with staged(net, estimator=MovingAverage(), **options) as model:
        Checkpoint(folder).load(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))


def test_checkpoint_that_is_damaged_or_of_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    run_ranks(of_the_command, 4, 4, 2, tmp_path, True)
    ends = run_ranks(loading, 4, tmp_path, False, outcomes=True)
    assert all("is of a model that is sharded over several ranks, and this run's is one" in end.message for end in ends)
    run_ranks(loading, 4, tmp_path, True)  # as it was made
    (shard,) = tmp_path.glob("step*/shards/__2_*")
    shard.write_bytes(shard.read_bytes()[:-1])
    ends = run_ranks(loading, 4, tmp_path, True, outcomes=True)
    assert all(isinstance(end, Raised) and f"{shard} of step {SAVED_AT} is damaged" in end.message for end in ends)


def remembering(rank: int) -> list[int]:
    """How many elements are remembered before what is the same on all ranks is loaded, and after it."""
    both, numbers = pair(), []
    with staged(both.net, mesh=both.mesh["dp_replicate"], estimator=MovingAverage()) as model:
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 4, range(2))
        state = model.shared_state.state_dict()
        for _ in range(2):
            numbers.append(sum(own.numel() for own in model.estimator.memory.values()))
            model.estimator.memory.clear()
            model.shared_state.load_state_dict(state)
    return numbers


def test_no_rank_gets_the_memory_of_another_ranks_shards() -> None:
    for before, after in run_ranks(remembering, 4):
        assert before > 0
        assert after == 0


def until_asked(rank: int) -> tuple[int, float]:
    """Rank 1 alone is asked to end, in step 4; the last step, and the mean of what the ranks logged in the first."""
    both = pair()
    with staged(both.net, mesh=both.mesh["dp_replicate"]) as model, StopSignal() as stop:
        for number in range(60):
            if (rank, number) == (1, 4):
                signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)  # type: ignore[operator, misc]
            with model.step() as step:
                stop.tell(step)
                step.log(rank=rank)
                model(batch(number, rank)).square().mean().backward()
            mean = model.last_report.scalars["rank"]
            if stop.agreed(model.last_report):
                break
        return model.last_report.step, mean


def test_all_ranks_of_all_replicas_end_after_the_same_step_and_have_the_same_scalars() -> None:
    assert run_ranks(until_asked, 4) == [(4, 1.5)] * 4
