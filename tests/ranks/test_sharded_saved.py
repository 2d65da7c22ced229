"""A sharded model is saved by ``torch.distributed.checkpoint`` and goes on in a mesh of another shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks, staged
from sharding import batch, pair
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from straggle import StagedDataParallel

SAVED_AT, NUM_STEPS = 3, 6
ALL_ROWS = 24  # of a step: each rank has an equal part


def train(rank: int, size: int, replicas: int, folder: str, from_step: int, to_step: int) -> list[torch.Tensor]:
    """Some steps, from the checkpoint and to it if there is one; the parameters as a whole."""
    both = pair(replicas=replicas, shards=size // replicas)
    with staged(both.net, mesh=both.mesh["dp_replicate"]) as model:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
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


@pytest.mark.slow
def test_sharded_model_goes_on_in_a_mesh_of_another_shape(tmp_path: Path) -> None:
    folder = str(tmp_path)
    expected = run_ranks(train, 4, 4, 2, "", 0, NUM_STEPS)[0]
    run_ranks(train, 4, 4, 2, folder, 0, SAVED_AT)
    for size, replicas in ((4, 2), (4, 1), (4, 4), (6, 3)):
        for ours in run_ranks(train, size, size, replicas, folder, SAVED_AT, NUM_STEPS):
            for own, other in zip(ours, expected, strict=True):
                torch.testing.assert_close(own, other, rtol=0, atol=1e-6)
