"""Which ranks shard one copy of a model, and which models and meshes cannot be merged so."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from straggle.backward.stages import trainable
from straggle.source.fsdp2 import check_reduction, check_version, is_copied, offloads, places_of, shard_of, units_of


def ranks_in_a_row(module: nn.Module) -> list[int]:
    """The ranks over which ``module`` is sharded on this rank, if no mesh has the ranks of several replicas.

    Those follow from the size of one: the first ranks of the job, the next ones, and so on. Raises ``ValueError`` if
    they are others, or the module is not sharded as a whole.
    """
    check_version()
    over = {name: _ranks(own.device_mesh) for name, own in module.named_parameters() if isinstance(own, DTensor)}
    name, replica = max(over.items(), key=lambda item: len(item[1]))
    size, rank, world = len(replica), dist.get_rank(), dist.get_world_size()
    ranks = list(range(first := rank // size * size, first + size))
    if sorted(replica) != ranks or world % size:
        raise ValueError(
            f"parameter {name} is sharded over ranks {sorted(replica)} of {world}, and without mesh= all replicas "
            "are as many ranks, one after the other: write fully_shard(..., mesh=straggle.replica_mesh())"
        )
    _check_units(module, size)
    return ranks


def ranks_of_replica(module: nn.Module, mesh: DeviceMesh) -> list[int]:
    """The ranks over which ``module`` is sharded on this rank; ``mesh`` has the ranks with the same shards.

    Raises ``ValueError`` if the two do not divide the job's ranks, or the module is not sharded as a whole.
    """
    check_version()
    over = {name: _ranks(own.device_mesh) for name, own in trainable(module) if isinstance(own, DTensor)}
    if not over:
        raise ValueError(
            f"{type(module).__name__} has no sharded parameter, and mesh= is for models that have (fully_shard, "
            "parallelize_module): write process_group=mesh.get_group(), or leave it out"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh= has the dimensions {mesh.mesh_dim_names or mesh.ndim}: give the one over which replicas are "
            'copies, such as mesh["dp_replicate"]'
        )
    name, replica = max(over.items(), key=lambda item: len(item[1]))
    _check_meshes(name, replica, _ranks(mesh))
    _check_units(module, len(replica))
    return sorted(replica)


def _ranks(mesh: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist())


def _check_meshes(name: str, replica: set[int], copies: set[int]) -> None:
    if replica & copies != {dist.get_rank()}:
        raise ValueError(
            f"parameter {name} is sharded over ranks {sorted(replica)}, and mesh= has ranks {sorted(copies)}: they "
            'must have this rank in common and no other. Write fully_shard(..., mesh=mesh["dp_shard"]) for what is '
            'inside of a replica, and StagedDataParallel(model, mesh=mesh["dp_replicate"]) for the merge over replicas'
        )
    if (number := len(replica) * len(copies)) != (world := dist.get_world_size()):
        raise ValueError(
            f"mesh= has {len(copies)} replicas of {len(replica)} ranks, and the job has {world} ranks, not {number}: "
            "each rank must be in one replica, and a replica has the entire model (no pipeline stages)"
        )


def _check_units(module: nn.Module, num_ranks: int) -> None:
    """If FSDP shards it, then all of it, as it reduces no other gradients, and each element is on one rank.

    Merges of different ranks may differ in who was stood in for, and copies of an element on some ranks would differ.
    """
    if not (units := units_of(module)):
        return
    if plain := [name for name, own in trainable(module) if not isinstance(own, DTensor)]:
        raise ValueError(
            f"parameter {plain[0]} is in no unit of fully_shard(), which reduces no gradient for it: call "
            "fully_shard() on the entire model as well, after its blocks, and leave ignored_params out"
        )
    if copied := [name for name, own in trainable(module) if is_copied(own, num_ranks)]:
        raise ValueError(
            f"parameter {copied[0]} is not sharded over all ranks of a replica, which have copies of its elements: use "
            "fully_shard() alone, over all of them"
        )
    if offloads(units):
        raise ValueError(
            "fully_shard(offload_policy=CPUOffloadPolicy()) keeps gradients where their device cannot merge them: "
            "leave offload_policy out"
        )
    check_reduction(units, num_ranks)


def name_of_place(module: nn.Module, at: int) -> str:
    """What the number stands for at which a unit's hooks let an observer check."""
    units = places_of(module)
    if not 1 <= at <= 2 * len(units):
        return "before the forward pass of the model"
    unit, is_backward = units[(at - 1) // 2], at % 2 == 0
    name = next(name for name, child in module.named_modules() if child is unit) or type(module).__name__
    return f"before the {'backward' if is_backward else 'forward'} pass of {name}"


def copied_inside(module: nn.Module, num_ranks: int) -> list[tuple[str, Tensor]]:
    """What each rank of a replica has all of: its buffers, and some parameters if FSDP does not shard it."""
    buffers = [(f"buffer {name}", buffer) for name, buffer in module.named_buffers()]
    parameters = [(f"parameter {name}", own) for name, own in module.named_parameters() if is_copied(own, num_ranks)]
    return [(name, shard_of(own)) for name, own in (*buffers, *parameters)]
