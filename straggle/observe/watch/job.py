"""What kind of job a watched model is of: who merges its gradients, where its ranks wait, and what cannot be known."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from straggle.backward.stages import trainable
from straggle.merge.wire.groups import job_rank, job_size, ranks_of_job
from straggle.parallel import StagedDataParallel

DATA_PARALLEL = ("DDP", "loop")  # kinds in which each rank has a model by itself
_LOOP = "What comes between a backward pass and the optimizer's step counts as waiting for the merge, as clipping does."
_SHARDED = (
    "Ranks wait for one another inside of the passes, one rank here and another there: a step takes longer than any "
    "rank's own work, and what a deadline would be worth is not known. In evaluations waiting seems to be work."
)
_GROUP = "Ranks are counted within their process group here: they are ranks {} of the job."


@dataclass(frozen=True)
class Job:
    """``module``: whose call is the forward pass; ``merge``: see `Recorder`; ``unknown``: sentences.

    ``replica_ranks``: how many ranks have one copy of the model together. ``group``: the ranks of the job that merge
    their gradients with this one, if these are not all.
    """

    kind: str
    module: nn.Module
    rank: int
    world_size: int
    merge: str
    replica_ranks: int = 1
    unknown: tuple[str, ...] = ()
    group: tuple[int, ...] = ()

    @property
    def is_sharded(self) -> bool:
        """Whether ranks wait for one another inside of their passes."""
        return self.kind not in DATA_PARALLEL

    @property
    def head(self) -> dict[str, Any]:
        """What a file has about it."""
        own = {"job": self.kind, "replica_ranks": self.replica_ranks, "unknown": self.unknown}
        return {"rank": self.rank, "world_size": self.world_size, **own}


def job_of(model: Any) -> Job:
    """The job that this model is trained in; raises ``TypeError`` or ``ValueError`` if it cannot be watched."""
    if isinstance(model, DistributedDataParallel):
        return _of_ddp(model)
    module = _module_of(model)
    _refuse(module)
    on_ranks = dist.is_available() and dist.is_initialized()
    rank, world_size = (job_rank(), job_size()) if on_ranks else (0, 1)  # of all replicas (`init_replica`)
    meshes = [parameter for parameter in module.parameters() if hasattr(parameter, "device_mesh")]
    if not meshes:
        alone = world_size == 1
        return Job("loop", module, rank, world_size, "outside" if alone else "wait", unknown=() if alone else (_LOOP,))
    covered = max(own.device_mesh.size() for own in meshes)
    merge, unknown = ("outside", ()) if covered == world_size else ("wait", (_LOOP,))
    kind = "FSDP2" if units_of(module) else "tensor parallel"
    unknown = (_SHARDED, *unknown)
    return Job(kind, module, rank, world_size, merge, max(map(_num_shards, meshes)), unknown)


def _of_ddp(model: DistributedDataParallel) -> Job:
    group = model.process_group
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if world_size == job_size():
        return Job("DDP", model.module, rank, world_size, "pass")
    ranks = tuple(ranks_of_job(dist.get_process_group_ranks(group)))
    unknown = (_GROUP.format(list(ranks)),)
    return Job("DDP", model.module, rank, world_size, "pass", unknown=unknown, group=ranks)


def units_of(module: nn.Module) -> list[nn.Module]:
    """Its units of FSDP2; torch's module for it takes most of a second to import, which who has none does not need."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return [child for child in module.modules() if isinstance(child, kind)]


def _module_of(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch({type(model).__name__}): give the model, which is an nn.Module")
    if not isinstance(model, StagedDataParallel):
        return model
    if any(hasattr(parameter, "device_mesh") for parameter in model.module.parameters()):
        return model.module
    raise TypeError(
        f"watch({type(model).__name__}): it has reports of its own; use model.last_report, or give advise the trace of "
        "straggle train"
    )


def _refuse(module: nn.Module) -> None:
    old = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    if any(isinstance(child, old) for child in module.modules()):
        raise TypeError(
            f"watch({type(module).__name__}): it waits inside of its passes where that cannot be seen; use "
            "fully_shard() instead of FullyShardedDataParallel"
        )
    if units_of(module):
        from straggle.source.fsdp2 import check_version  # imports what FSDP2 does

        check_version()
    if not trainable(module):
        raise ValueError(f"watch({type(module).__name__}): no parameter is trained; give the model that is")


def _num_shards(parameter: Any) -> int:
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_shard())
