"""The models of the experiments on learning."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch import Tensor, nn

from straggle.lab.workloads.workload import Batch, Workload


@final
class WithModel(Workload):
    """``inner``, but another model is trained on it."""

    def __init__(self, inner: Workload, make_model: Callable[[], nn.Module]) -> None:
        self._inner = inner
        self._make_model = make_model

    def model(self) -> nn.Module:
        return self._make_model()

    @property
    def num_samples(self) -> int:
        return self._inner.num_samples

    def batch(self, indices: Tensor) -> Batch:
        return self._inner.batch(indices)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._inner.loss(model, batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self._inner.evaluate(model)


class Centred(nn.Module):
    """Pixels from 0 to 1 as rows of numbers from -1 to 1."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x.flatten(1) - 1


def digits_mlp() -> nn.Module:
    """Three layers on the 64 pixels of a digit, with the sizes and the scaling of Lang et al. 2024."""
    return nn.Sequential(Centred(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))
