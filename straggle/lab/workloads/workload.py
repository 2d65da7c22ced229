"""What is trained: a model, numbered training samples and which of them a rank has, a loss and an evaluation.

Sample numbers instead of an iterator make the data stateless: a run resumes at any step by using the same numbers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from straggle.data.deal import epoch_order

Batch = tuple[Tensor, Tensor]


class Workload(ABC):
    """A model together with its data; the same on every rank, and all tensors on the CPU."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model, initialized from torch's global random state: seed that first, the same on every rank."""

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """How many training samples there are."""

    @abstractmethod
    def batch(self, indices: Tensor) -> Batch:
        """Inputs and targets of the training samples with these numbers (int64, one-dimensional)."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of the batch, a scalar; the batch lies on the model's device."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Scores on held-out data: "loss", and "accuracy" from 0 to 1 if the task has one."""


class LabelledSamples(Workload):
    """Classification of samples that lie in memory: ``training`` and ``validation`` are pairs of inputs and classes."""

    def __init__(self, training: Batch, validation: Batch) -> None:
        self.training, self.validation = training, validation

    @property
    def num_samples(self) -> int:
        return len(self.training[0])

    def batch(self, indices: Tensor) -> Batch:
        x, y = self.training
        return x[indices], y[indices]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return classification_loss(model, batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return classification_scores(model, [self.validation])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each module has its earlier mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of ``model(x)``, logits of shape (..., classes), against class numbers of shape (...)."""
    x, y = batch
    return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def classification_scores(model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    """Mean cross entropy and accuracy over all targets of the batches, computed on the model's device."""
    device = next(model.parameters()).device
    loss, correct, count = 0.0, 0, 0
    with evaluating(model):
        for x, y in batches:
            logits, target = model(x.to(device)).flatten(0, -2), y.to(device).flatten()
            loss += nn.functional.cross_entropy(logits, target, reduction="sum").item()
            correct += int((logits.argmax(-1) == target).sum())
            count += target.numel()
    return {"loss": loss / count, "accuracy": correct / count}


def require_positive(**sizes: int) -> None:
    """Raises ValueError for the first size below 1, by its name."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")


class Shard:
    """One rank's share of the training samples, by micro-batch number and without state to save.

    Each epoch is shuffled and dealt out without overlap. Equally, by `indices`: micro-batch ``i`` of rank ``r`` in an
    epoch is ``order[(i * world_size + r) * batch_size :][:batch_size]``, so that all ranks' micro-batches number ``i``
    together are one global batch, however many ranks share it. Or in parts of any size, by `part`: step ``i`` of an
    epoch has ``order[i * total :][:total]``, and each rank a slice of these. What is left of an epoch when no full
    micro-batch is left for every rank is dropped; the next epoch drops other samples.
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
