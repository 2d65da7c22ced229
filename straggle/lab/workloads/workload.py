"""What is trained: a model, numbered training samples, a loss and an evaluation.

Sample numbers instead of an iterator make the data stateless: a run resumes at any step by using the same numbers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

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
