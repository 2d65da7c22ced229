"""Models that FSDP2 shards inside of each replica, and the same models whole, for tests of four ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

WIDTH = 8


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    """Blocks between two layers that no block has; a bias of 3 elements is not as long on each rank."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@dataclass
class Pair:
    """The same model sharded, in a mesh of replicas, and whole."""

    net: nn.Module
    plain: nn.Module
    mesh: DeviceMesh

    def gap(self) -> float:
        """The largest difference between a parameter of the two."""
        for unit in self.net.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
        pairs = zip(self.net.parameters(), self.plain.parameters(), strict=True)
        return max((own.full_tensor() - other).abs().max().item() for own, other in pairs)  # type: ignore[attr-defined]


def mesh_of(replicas: int = 2, shards: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("dp_replicate", "dp_shard"))


def shard(net: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Each block is a unit, and so is the rest of the model."""
    for block in net.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def pair(make: Callable[[], nn.Module] = Blocks, replicas: int = 2, shards: int = 2, **options: Any) -> Pair:
    """Both, with equal parameters on all ranks."""
    torch.manual_seed(0)
    net, mesh = make(), mesh_of(replicas, shards)
    plain = copy.deepcopy(net)
    return Pair(shard(net, mesh["dp_shard"], **options), plain, mesh)


def batch(step: int, rank: int, rows: int = 6) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def sum_only(net: nn.Module) -> nn.Module:
    """For FSDP2 without straggle: gloo has no mean."""
    for unit in net.modules():
        if isinstance(unit, FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)
    return net
