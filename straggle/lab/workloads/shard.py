"""Which samples a rank trains on: each epoch is shuffled and dealt out to the ranks without overlap.

Equally, by `Shard.indices`: micro-batch ``i`` of rank ``r`` in an epoch is
``order[(i * world_size + r) * batch_size :][:batch_size]``, so that all ranks' micro-batches number ``i`` together are
one global batch, however many ranks share it. Or in parts of any size, by `Shard.part`: step ``i`` of an epoch has
``order[i * total :][:total]``, and each rank a slice of these.
"""

from torch import Tensor

from straggle.data.deal import epoch_order
from straggle.lab.workloads.workload import require_positive


class Shard:
    """One rank's share of the training samples, by micro-batch number and without state to save.

    What is left of an epoch when no full micro-batch is left for every rank is dropped; the next epoch
    drops other samples.
    """

    def __init__(self, num_samples: int, *, rank: int, world_size: int, batch_size: int, seed: int) -> None:
        require_positive(world_size=world_size, batch_size=batch_size)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; with world_size={world_size} it must be from 0 to {world_size - 1}")
        if num_samples < world_size * batch_size:
            raise ValueError(
                f"{num_samples} samples are fewer than one batch of {batch_size} for each of {world_size} ranks; "
                "use a smaller batch_size, fewer ranks or more data"
            )
        self.num_samples = num_samples
        self.rank = rank
        self.world_size = world_size
        self.batch_size = batch_size
        self.seed = seed
        self._cached: tuple[int, Tensor] | None = None

    def indices(self, position: int) -> Tensor:
        """Sample numbers of this rank's micro-batch number ``position``, counted from 0 over all epochs of the run."""
        if position < 0:
            raise ValueError(f"position is {position}; micro-batches are counted from 0")
        total, first = self.world_size * self.batch_size, self.rank * self.batch_size
        return self.part(position, total=total, first=first, count=self.batch_size)

    def part(self, step: int, *, total: int, first: int, count: int) -> Tensor:
        """Sample numbers ``first`` to ``first + count`` of the ``total`` that step ``step`` has over all ranks.

        What is left of an epoch after its full steps is dropped, as with `indices`.
        """
        if not 0 <= first <= first + count <= total <= self.num_samples:
            raise ValueError(
                f"samples {first} to {first + count} of a step of {total}, in an epoch of {self.num_samples}: "
                "the part must lie in the step, and the step in the epoch"
            )
        epoch, number = divmod(step, self.num_samples // total)
        start = number * total + first
        return self._order(epoch)[start : start + count]

    def _order(self, epoch: int) -> Tensor:
        """The epoch's permutation of all samples: the same on every rank."""
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, epoch_order(self.num_samples, self.seed, epoch))
        return self._cached[1]
