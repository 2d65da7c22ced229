"""Worlds in which the same step is tested: ranks on the CPU, on a queued device, as members, and sharded replicas.

A scenario is a function ``scenario(here, ...)`` of what a rank has in its world; `World.run` gives what it returns on
each rank. There are two replicas, of one rank each, or of two that shard a copy by FSDP2.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from queued_device import queued_device
from ranks import run_ranks, staged
from sharding import mesh_of, shard
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from straggle import Elastic, StagedDataParallel

REPLICAS = 2


@dataclass(frozen=True)
class World:
    """How a model is wrapped; ``shards``: over how many ranks a replica is sharded."""

    name: str
    shards: int = 1
    is_queued: bool = False
    has_members: bool = False

    @property
    def num_ranks(self) -> int:
        return REPLICAS * self.shards

    def run(
        self,
        scenario: Callable[..., Any],
        *args: Any,
        replicas: int = REPLICAS,
        run: Callable[..., list[Any]] = run_ranks,
    ) -> list[Any]:
        """What ``scenario(here, *args)`` returns on each rank; with ``run=run_forked`` in processes."""
        return run(_here, replicas * self.shards, self, scenario, *args)

    def ranks_of(self, replica: int) -> range:
        return range(self.shards * replica, self.shards * (replica + 1))


WORLDS = {
    world.name: world
    for world in (
        World("cpu"),
        World("queued", is_queued=True),
        World("members", has_members=True),
        World("sharded", shards=2),
    )
}


@dataclass(frozen=True)
class Here:
    """One rank of a world."""

    world: World
    rank: int
    mesh: DeviceMesh | None

    @property
    def replica(self) -> int:
        return self.rank // self.world.shards

    @property
    def is_last(self) -> bool:
        """Of all ranks: the one that is late in most scenarios."""
        return self.rank == self.world.num_ranks - 1

    @contextmanager
    def wrapped(
        self, make: Callable[[], nn.Module], *, sharding: dict[str, Any] | None = None, **options: Any
    ) -> Iterator[Trial]:
        """The model that ``make`` gives, wrapped as in this world, beside a whole one with the same parameters.

        ``sharding``: options of FSDP2, for worlds in which it shards.
        """
        torch.manual_seed(0)
        net = make()
        plain = copy.deepcopy(net)
        if self.mesh is not None:
            shard(net, self.mesh["dp_shard"], **(sharding or {}))
            options["mesh"] = self.mesh["dp_replicate"]
        with self.staged(net, **options) as model:
            yield Trial(self, net, plain, model)

    @contextmanager
    def staged(self, net: nn.Module, **options: Any) -> Iterator[StagedDataParallel]:
        """This model, wrapped as in this world, in which nothing is sharded or all that is to be is."""
        if self.world.has_members:
            options["members"] = Elastic()
        with queued_device() if self.world.is_queued else nullcontext(), staged(net, **options) as model:
            yield model


@dataclass(frozen=True)
class Trial:
    """A wrapped model; ``net`` is what was wrapped, and ``plain`` the same as a whole, in no world."""

    here: Here
    net: nn.Module
    plain: nn.Module
    model: StagedDataParallel

    def gradients(self) -> list[Tensor | None]:
        """Those that lie in ``p.grad``, of all shards; copied."""
        for unit in self.net.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
        return [None if own.grad is None else _whole(own.grad).detach().clone() for own in self.net.parameters()]

    def own_gradients(self) -> list[Tensor | None]:
        """This rank's own shards of them."""
        grads = [own.grad for own in self.net.parameters()]
        return [own.to_local() if hasattr(own, "to_local") else own for own in grads]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.plain.named_parameters()]

    @property
    def numel(self) -> list[int]:
        """Elements of each parameter, of all shards."""
        return [own.numel() for own in self.plain.parameters()]


def _here(rank: int, world: World, scenario: Callable[..., Any], *args: Any) -> Any:
    mesh = mesh_of(REPLICAS, world.shards) if world.shards > 1 else None
    return scenario(Here(world, rank, mesh), *args)


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole
