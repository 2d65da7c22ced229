"""Which samples each logical rank trains on: from one pool for all ranks, or from its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from straggle.lab.workloads.shard import Shard
from straggle.lab.workloads.workload import Batch, Workload


class Samples(ABC):
    """Deals samples out to ranks."""

    @abstractmethod
    def indices(self, step: int) -> Tensor:
        """Sample numbers of a step, of shape (ranks, batch_size)."""


@final
class FromOnePool(Samples):
    """Every epoch is shuffled and dealt out, as `straggle train` does: all ranks' samples are alike."""

    def __init__(self, workload: Workload, num_ranks: int, batch_size: int, *, seed: int) -> None:
        self._shards = [
            Shard(workload.num_samples, rank=rank, world_size=num_ranks, batch_size=batch_size, seed=seed)
            for rank in range(num_ranks)
        ]

    def indices(self, step: int) -> Tensor:
        return torch.stack([shard.indices(step) for shard in self._shards])


@final
class OfTheirOwn(Samples):
    """Each rank has a fixed part of the samples and goes through it in a new order each epoch.

    ``sorted_share``: the share of each part that comes from the samples sorted by class (for sequences, by their
    position in the text); the rest is random. At 0 the parts are alike, at 1 each rank has as few classes as possible.
    Raises ``ValueError`` if a part is smaller than a batch.
    """

    def __init__(
        self, workload: Workload, num_ranks: int, batch_size: int, *, seed: int, sorted_share: float = 0.0
    ) -> None:
        if not 0 <= sorted_share <= 1:
            raise ValueError(f"sorted_share={sorted_share}: a share lies between 0 and 1")
        self._batch_size = batch_size
        self._seed = seed
        order = torch.randperm(workload.num_samples, generator=torch.Generator().manual_seed(seed))
        cut = round(sorted_share * len(order))
        by_class = order[:cut][_classes(workload, order[:cut]).argsort(stable=True)]
        parts = zip(by_class.tensor_split(num_ranks), order[cut:].tensor_split(num_ranks), strict=True)
        self.parts = [torch.cat(part) for part in parts]
        if (smallest := min(len(part) for part in self.parts)) < batch_size:
            raise ValueError(
                f"{num_ranks} ranks have {smallest} samples each, fewer than batch_size={batch_size}: use fewer ranks"
            )

    def indices(self, step: int) -> Tensor:
        return torch.stack([self._of_rank(rank, step) for rank in range(len(self.parts))])

    def _of_rank(self, rank: int, step: int) -> Tensor:
        part = self.parts[rank]
        epoch, batch = divmod(step, len(part) // self._batch_size)
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) * 1_009 + rank)
        order = torch.randperm(len(part), generator=generator)
        return part[order[batch * self._batch_size :][: self._batch_size]]


def samples_of(
    workload: Workload, num_ranks: int, batch_size: int, *, seed: int, sorted_share: float | None
) -> Samples:
    """`OfTheirOwn` with this ``sorted_share``, or `FromOnePool` where there is none."""
    if sorted_share is None:
        return FromOnePool(workload, num_ranks, batch_size, seed=seed)
    return OfTheirOwn(workload, num_ranks, batch_size, seed=seed, sorted_share=sorted_share)


def batch_of(workload: Workload, samples: Samples, step: int) -> Batch:
    """All ranks' inputs and targets of a step, each with the dimensions (ranks, samples) first."""
    indices = samples.indices(step)
    x, y = workload.batch(indices.flatten())
    return x.view(*indices.shape, *x.shape[1:]), y.view(*indices.shape, *y.shape[1:])


def _classes(workload: Workload, indices: Tensor) -> Tensor:
    """The key to sort samples by: their class, or their number if a sample has more than one target."""
    if len(indices) == 0:
        return indices
    targets = workload.batch(indices)[1]
    return targets if targets.dim() == 1 else indices
