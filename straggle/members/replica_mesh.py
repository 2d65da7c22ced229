"""The ranks of one replica, which are started together, and meet without those of the other replicas."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

REPLICA_SIZE = "STRAGGLE_REPLICA_SIZE"  # set by `straggle launch --replica-size`
_OF_ALL_S = 60.0  # for a collective of all ranks of the job, which never meet


def replica_mesh() -> DeviceMesh:
    """The mesh of this rank's replica, over which to shard a model whose replicas leave and come back (`Elastic`).

    It takes the place of ``init_process_group()`` in a script under ``straggle launch --replica-size``, and each
    replica makes its own, whenever it is started: collectives of the user's are for ``replica_mesh().get_group()``,
    because those of all ranks end in an error. Uses gloo. Raises ``RuntimeError`` without that launcher, or if there is
    a process group already.
    """
    if not (size := int(os.environ.get(REPLICA_SIZE, "0"))):
        raise RuntimeError(
            "replica_mesh() needs to know how many ranks a replica has, which are started together: start the script "
            "by `straggle launch --nproc-per-node N --replica-size S`"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "replica_mesh() forms the process groups of this rank's replica, and there is one of all ranks already: "
            "leave init_process_group() out"
        )
    from torch.distributed.device_mesh import DeviceMesh  # imports DTensor, which takes most of a second

    store, rank, world_size = next(rendezvous("env://"))
    first = rank // size * size
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0  # the same for all ranks of a replica
    corner = dist.PrefixStore(f"straggle/replica{rank // size}/start{start}", store)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=corner, rank=rank, world_size=world_size, timeout=timedelta(seconds=_OF_ALL_S)
    )
    group = dist.new_group(list(range(first, first + size)), use_local_synchronization=True)
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",))
