"""Another workload whose model takes a given time: sleeps stand for an accelerator.

To time many ranks that share a few cores, and would contend for them.
"""

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from straggle.lab.workloads.workload import Batch, Workload

_FORWARD = 1 / 3  # of a pass; backward computes two gradients for each output


class Paced(Workload):
    """``inner``, but a micro-batch takes ``seconds`` longer, two thirds of them in its backward pass.

    It sleeps evenly after the modules that own parameters, and after each gradient; forward passes without gradients,
    as in an evaluation, do not sleep. The time of the model itself is added, and should be short.
    """

    def __init__(self, inner: Workload, *, seconds: float) -> None:
        if not seconds >= 0:
            raise ValueError(f"seconds is {seconds}; give a number of seconds from 0.0")
        self.inner = inner
        self.seconds = seconds

    def model(self) -> nn.Module:
        module = self.inner.model()
        pace(module, self.seconds)
        return module

    @property
    def num_samples(self) -> int:
        return self.inner.num_samples

    def batch(self, indices: Tensor) -> Batch:
        return self.inner.batch(indices)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.inner.loss(model, batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self.inner.evaluate(model)


def pace(module: nn.Module, seconds: float, sleep: Callable[[float], object] = time.sleep) -> None:
    """Make a forward and backward pass of ``module`` sleep for ``seconds``, by hooks that stay."""
    owners = [part for part in module.modules() if next(part.parameters(recurse=False), None) is not None]
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    rest = _Rest(seconds, sleep)

    def after_owner(owner: nn.Module, _args: Any, _output: Any) -> None:
        if owner.training:
            rest.take(_FORWARD * seconds / len(owners))

    def after_gradient(_parameter: Tensor) -> None:
        rest.take((1 - _FORWARD) * seconds / len(parameters))

    for owner in owners:
        owner.register_forward_hook(after_owner)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(after_gradient)  # type: ignore[no-untyped-call]


class _Rest:
    """Sleeps; what a sleep took too long is subtracted from the next ones, at most ``most_s`` of it."""

    def __init__(self, most_s: float, sleep: Callable[[float], object]) -> None:
        self._most_s = most_s
        self._sleep = sleep
        self._owed_s = 0.0

    def take(self, seconds: float) -> None:
        self._owed_s += seconds
        if self._owed_s > 0:
            begin = time.perf_counter()
            self._sleep(self._owed_s)
            self._owed_s = max(-self._most_s, self._owed_s - (time.perf_counter() - begin))
