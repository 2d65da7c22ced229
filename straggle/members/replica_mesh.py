"""The ranks of one replica, which are started together, and meet without those of the other replicas."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from straggle.merge.wire.groups import begin_as_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

REPLICA_SIZE = "STRAGGLE_REPLICA_SIZE"  # set by `straggle launch --replica-size`
_OF_ALL_S = 60.0  # for a collective of all ranks of the job, which never meet


@dataclass(frozen=True)
class ReplicaPlace:
    """Which of the job's ``num_replicas`` replicas this rank is in: replica ``replica``, from 0."""

    replica: int
    num_replicas: int


def replica_mesh() -> DeviceMesh:
    """The mesh of this rank's replica, over which to shard a model whose replicas leave and come back (`Elastic`).

    It takes the place of ``init_process_group()`` in a script under ``straggle launch --replica-size``, and each
    replica makes its own, whenever it is started: collectives of the user's are for ``replica_mesh().get_group()``,
    because those of all ranks end in an error. Uses gloo. Raises ``RuntimeError`` without that launcher, or if there is
    a process group already.
    """
    size, corner, rank, world_size = _begin("replica_mesh()")
    from torch.distributed.device_mesh import DeviceMesh  # imports DTensor, which takes most of a second

    first = rank // size * size
    dist.init_process_group(
        "gloo", store=corner, rank=rank, world_size=world_size, timeout=timedelta(seconds=_OF_ALL_S)
    )
    group = dist.new_group(list(range(first, first + size)), use_local_synchronization=True)
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",))


def init_replica() -> ReplicaPlace:
    """Begin with the ranks of this rank's replica as the default group, and say which of the replicas it is.

    For a program that makes meshes and saves checkpoints over the default group, and that is to run inside of each
    replica as it is (`Elastic`): ``torch.distributed.get_rank()`` and ``get_world_size()`` count this replica's ranks
    from here on. Otherwise as `replica_mesh`, in whose place it is.
    """
    size, corner, rank, world_size = _begin("init_replica()")
    dist.init_process_group("gloo", store=corner, rank=rank % size, world_size=size)
    begin_as_part(rank // size * size, world_size)
    return ReplicaPlace(rank // size, world_size // size)


def _begin(name: str) -> tuple[int, Any, int, int]:
    """How many ranks a replica has, its corner of the job's store, this rank of the job, and how many the job has."""
    if not (size := int(os.environ.get(REPLICA_SIZE, "0"))):
        raise RuntimeError(
            f"{name} needs to know how many ranks a replica has, which are started together: start the script "
            "by `straggle launch --nproc-per-node N --replica-size S`"
        )
    if dist.is_initialized():
        raise RuntimeError(
            f"{name} forms the process groups of this rank's replica, and there is one already: leave "
            "init_process_group() out"
        )
    store, rank, world_size = next(rendezvous("env://"))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0  # the same for all ranks of a replica
    corner = dist.PrefixStore(f"straggle/replica{rank // size}/start{start}", store)  # type: ignore[attr-defined]
    return size, corner, rank, world_size
