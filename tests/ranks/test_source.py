"""The seam of gradient sources: a model that is sharded inside of each replica is merged by another source alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from straggle import Merge, StagedDataParallel, building
from straggle.backward.hooks import PassObserver
from straggle.loop import model_parts
from straggle.source.replicated import ReplicatedSource
from straggle.source.source import Slot

BATCH, WIDTH = 8, 512  # a bucket for each layer


class Reports:
    """Reports the gradients of shards."""

    def __init__(self, slots: Sequence[Slot], observer: PassObserver) -> None:
        self._observer = observer
        self._hooks: list[RemovableHandle] = [
            slot.parameter.register_post_accumulate_grad_hook(partial(self._ready, index, slot.tensor))
            for index, slot in enumerate(slots)
        ]

    def _ready(self, index: int, shard: Tensor, parameter: Tensor) -> None:
        assert isinstance(parameter.grad, DTensor)
        shard.grad, parameter.grad = parameter.grad.to_local(), None
        self._observer.gradient_ready(index, shard)

    def keep_last(self) -> None:
        """No user has hooks."""

    def renew(self) -> None:
        """The parameters stay."""

    def check_at(self, modules: Sequence[str]) -> None:
        """No rank is late."""

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class ShardedSource(ReplicatedSource):
    """Of a model of ``fully_shard`` of which no rank is late."""

    def renew(self) -> list[nn.Parameter]:
        new = super().renew()
        self.slots[:] = [Slot(name, own.to_local().detach(), own) for name, own in self.named]
        return new

    def attach(self, observer: PassObserver) -> Reports:
        return Reports(self.slots, observer)

    def place(self, gradients: Sequence[Tensor | None]) -> None:
        for own in self.all:
            own.grad = None
        for own, gradient in self.of_parameters({i: g for i, g in enumerate(gradients) if g is not None}):
            own.grad = gradient

    def of_parameters(self, gradients: Mapping[int, Tensor]) -> Sequence[tuple[nn.Parameter, Tensor]]:
        return [(self.all[index], like(self.all[index], gradient)) for index, gradient in gradients.items()]


def like(parameter: DTensor, shard: Tensor) -> DTensor:
    """A gradient of which this rank has this shard."""
    return DTensor.from_local(
        shard, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def data(step: int, rank: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def train_sharded(rank: int, early: bool) -> float:
    """Two replicas of two shards, and one model with the data of all: the largest difference of a parameter."""
    building.ReplicatedSource = ShardedSource
    model_parts.check_module = lambda _sharded: None
    building.make_alike = lambda *_of_a_replica: None
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    plain = copy.deepcopy(net)
    for unit in (*net, net):
        fully_shard(unit, mesh=mesh["shard"])
    net.set_force_sum_reduction_for_comms(True)
    model = StagedDataParallel(net, process_group=mesh["replicate"].get_group(), merge=Merge(nonfinite="keep"))
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, plain))
    for step in range(5):
        with model.step(optimizer=ours if early else None):
            model(data(step, rank)).square().mean().backward()
        if not early:
            ours.step()
        ours.zero_grad()
        plain(torch.cat([data(step, other) for other in range(4)])).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
    model.close()
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    return max((own.full_tensor() - other).abs().max().item() for own, other in pairs)


@pytest.mark.skipif(not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"), reason="gloo has no mean")
@pytest.mark.parametrize("early", [False, True])
def test_sharded_replicas_are_merged_by_a_source_of_shards(early: bool) -> None:
    assert max(run_ranks(train_sharded, 4, early)) < 1e-6
