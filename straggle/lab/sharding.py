"""A workload's model, of which several ranks together have one copy: FSDP2's own replicas, or straggle's."""

from __future__ import annotations

import time
from typing import final

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


@final
class Sharded:
    """Each copy of the model is on ``shards`` ranks: its ``blocks`` are units of FSDP2, and the rest is the root's."""

    def __init__(self, shards: int) -> None:
        if shards < 2:
            raise ValueError(f"shards is {shards}; give at least 2 ranks for a copy, or parallel=none")
        self.shards = shards

    def replicas(self, num_ranks: int) -> int:
        """How many copies so many ranks have; raises ``ValueError`` if they cannot be dealt out to them."""
        if num_ranks % self.shards:
            raise ValueError(
                f"{num_ranks} ranks cannot be dealt out to replicas of {self.shards}: start "
                f"{self.shards * (num_ranks // self.shards + 1)} (WORKERS), or set parallel.shards"
            )
        return num_ranks // self.shards

    def check_launched(self, replica_size: int) -> None:
        """Raise ``ValueError`` if the launcher starts others together than the ranks that shard a copy."""
        if replica_size != self.shards:
            raise ValueError(
                f"parallel.shards={self.shards}, and {replica_size} rank(s) of a replica were started together: start "
                f"the run by ./launch.sh or by `straggle launch --replica-size {self.shards}`"
            )

    def mesh(self, device: str) -> DeviceMesh:
        """All ranks of the job, as replicas by shards."""
        shape = (self.replicas(dist.get_world_size()), self.shards)
        return init_device_mesh(device, shape, mesh_dim_names=("dp_replicate", "dp_shard"))

    @staticmethod
    def shard(module: nn.Module, mesh: DeviceMesh) -> None:
        """Shard in place; over a mesh of two dimensions FSDP2 reduces gradients over the first one, too."""
        for unit in (*blocks_of(module), module):
            fully_shard(unit, mesh=mesh)
            assert isinstance(unit, FSDPModule)
            if mesh.device_type == "cpu":
                unit.set_force_sum_reduction_for_comms(True)  # gloo has no mean


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The units of a workload's model; raises ``ValueError`` if it has none."""
    if not isinstance(blocks := getattr(module, "blocks", None), (nn.ModuleList, nn.Sequential)):
        raise ValueError(f"{type(module).__name__} has no blocks to shard: choose workload=text, or parallel=none")
    return list(blocks)


class WorkClock:
    """Seconds that this process has computed or slept by `sleep`, and none in which it waited for other ranks.

    Faults in proportion to a rank's work must not count what it waits inside of its replica: if each rank slept in
    proportion to its wait for the others, all would wait for one another longer and longer.
    """

    def __init__(self) -> None:
        self._slept_s = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._slept_s

    def sleep(self, seconds: float) -> None:
        """Sleep, and count it."""
        began = time.perf_counter()
        time.sleep(seconds)
        self._slept_s += time.perf_counter() - began


def is_sharded(module: nn.Module) -> bool:
    """Whether several ranks have one copy of it."""
    return isinstance(module, FSDPModule)


def whole(parameter: Tensor) -> Tensor:
    """All of a parameter; collective if it is sharded."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
