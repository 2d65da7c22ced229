"""A loop of sharded replicas that draw their micro-batches, and what one process makes of the same.

Each rank of a replica computes its own samples of a micro-batch, with random numbers of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from whole_steps import PARTS, Counter, Made, Net, loss_of, optimizer_of, samples_of

from straggle import Elastic, StagedDataParallel
from straggle.pools.pulling import random_numbers_of

SHARDS = 2
Shards = list[list[float]]


def sharded(net: Net, mesh: DeviceMesh, in_layer: Callable[[], None], **options: Any) -> Net:
    """Each layer is a unit; ``in_layer()`` takes its time forward and backward."""
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, **options)
        layer.register_forward_hook(lambda _layer, _args, output: _slow(output, in_layer))
    return fully_shard(net, mesh=mesh, **options)


def _slow(output: Tensor, in_layer: Callable[[], None]) -> Tensor:
    in_layer()
    if output.requires_grad:
        output.register_hook(lambda _: in_layer())
    return output


def mesh_of(*, members: bool) -> tuple[DeviceMesh, dict[str, Any]]:
    """The mesh of this rank's replica, and the options of a model that is sharded over it."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if not members:
        both = init_device_mesh("cpu", (size // SHARDS, SHARDS), mesh_dim_names=("dp_replicate", "dp_shard"))
        return both["dp_shard"], {"mesh": both["dp_replicate"]}
    first = rank // SHARDS * SHARDS
    group = torch.distributed.new_group(list(range(first, first + SHARDS)), use_local_synchronization=True)
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",)), {"members": Elastic(1, 1.0)}


def train(
    rank: int,
    in_layer: Callable[[], None],
    *,
    end: Callable[[int], bool],
    members: bool = True,
    seeded: bool = True,
    told: Callable[[], bool] = lambda: False,
    made: Callable[[int], None] = lambda _: None,
    fsdp: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Shards, int, list[Made]]:
    """This rank's shards of the parameters, the steps that were made, and those of them that this process made."""
    mesh, own = mesh_of(members=members)
    net = sharded(Net(), mesh, in_layer, **(fsdp or {}))
    model = StagedDataParallel(net, links=False, **own, **options)
    optimizer, counter, seen = optimizer_of(net), Counter(), list[Made]()
    model.register_state(optimizer=optimizer, counter=counter)
    shard = rank % SHARDS
    while not end(counter.steps):
        parts = [samples[shard::SHARDS] for samples in samples_of(counter.steps)]
        with model.step() as step:
            if told() and step.departure is not None:
                step.departure.ask()
            for numbers in step.pull(parts, seed=counter.steps if seeded else None):
                loss_of(model, numbers).backward()
        optimizer.step()
        optimizer.zero_grad()
        report = model.last_report
        assert report is not None
        was_out = report.ranks[rank // SHARDS].absent
        seen.append(Made(counter.steps, report.pool_attempts, report.dropped_share, was_out))
        counter.steps += 1
        made(counter.steps)
        if step.departure is not None and step.departure.ends_after(report.step):
            break
    result = [own.to_local().detach().flatten().tolist() for own in net.parameters()]
    model.close()
    return result, counter.steps, seen


def alone(steps: int) -> list[Tensor]:
    """The parameters of one process that computes all of each step."""
    module = Net()
    optimizer = optimizer_of(module)
    for step in range(steps):
        for number, samples in enumerate(samples_of(step)):
            for part in range(SHARDS):
                with random_numbers_of(step, number, part):
                    (loss_of(module, samples[part::SHARDS]) / PARTS / SHARDS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [own.detach() for own in module.parameters()]


def assert_equal(rank: int, own: Shards, expected: list[Tensor]) -> None:
    """To the rounding of sums in another order."""
    for one, whole in zip(own, expected, strict=True):
        chunks = torch.chunk(whole, SHARDS)
        other = chunks[rank % SHARDS].flatten() if rank % SHARDS < len(chunks) else whole.flatten()[:0]
        torch.testing.assert_close(torch.tensor(one, dtype=torch.float64), other, rtol=1e-7, atol=1e-9)
