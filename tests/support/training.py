"""What the tests of the merge train: models whose gradients are known, and a way to be late without a clock."""

from __future__ import annotations

import json
import logging
import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from straggle import Step, StepReport

# a workload for commands whose numbers do not matter: digits would load scikit-learn in each process, for a second
TINY = ("workload=synthetic", "workload.width=16", "workload.depth=4", "workload.num_samples=512")


class Layer(nn.Module):
    """Adds ``weight · (scale * x)`` to the running total: the gradient of each element is ``scale * x``."""

    def __init__(self, numel: int, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self.scale = scale

    def forward(self, total: Tensor, x: Tensor) -> Tensor:
        return total + (self.weight * (self.scale * x)).sum()


class Chain(nn.Module):
    """Layers one after another: number ``i`` has ``2 + i`` elements, each with the gradient ``(i + 1) * x``.

    Backward finishes them in the order of ``finish_order``, the last layer first.
    """

    def __init__(self, num_layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(2 + i, float(i + 1)) for i in range(num_layers))

    def forward(self, x: float) -> Tensor:
        total = torch.zeros(())
        for layer in self.layers:
            total = layer(total, torch.tensor(x))
        return total

    @property
    def finish_order(self) -> list[int]:
        return list(reversed(range(len(self.layers))))


class Stopper:
    """Stops a step after a number of its gradients are finished. Make it before the module is wrapped.

    Its hooks then run before straggle's own, so that the gradient with which it stops is the last one that counts.
    """

    def __init__(self, module: nn.Module) -> None:
        self._step: Step | None = None
        self._left = 0
        for parameter in dict.fromkeys(module.parameters()):
            parameter.register_post_accumulate_grad_hook(self._finished)

    def arm(self, step: Step, after: int | None) -> None:
        """Stop ``step`` after this many gradients; 0 is before its first forward pass, and ``None`` is never."""
        self._step, self._left = step, -1 if after is None else after
        if after == 0:
            step.stop()

    def _finished(self, _parameter: Tensor) -> None:
        self._left -= 1
        if self._left == 0:
            assert self._step is not None
            self._step.stop()


def mlp(seed: int = 0, width: int = 8, depth: int = 3) -> nn.Sequential:
    """A network of ``depth`` layers from 4 features to 2, the same for the same seed."""
    torch.manual_seed(seed)
    sizes = [4, *[width] * (depth - 1), 2]
    layers = [module for i, o in pairwise(sizes) for module in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


class Tied(nn.Module):
    """One matrix is used before and after another, and a skip connection goes around both."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(torch.tanh(self.outer(x)))))


def features(rank: int, step: int, rows: int = 8) -> Tensor:
    """A batch of this rank and step, of shape (rows, 4)."""
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(1000 * step + rank))


def random_stops(rank: int, num_steps: int, num_gradients: int, seed: int = 0) -> list[int | None]:
    """Where the rank stops in each step; half of the time it does not."""
    draw = random.Random(1000 * seed + rank)
    return [draw.randrange(num_gradients + 1) if draw.random() < 0.5 else None for _ in range(num_steps)]


def shared(report: StepReport) -> str:
    """All of a report that must be the same on every rank, comparable where there are NaNs."""
    return repr((report.step, report.deadline_s, report.ranks, report.stages))


def grads(module: nn.Module) -> list[Tensor | None]:
    """The gradients, copied."""
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


class Signals:
    """Lets ranks wait for one another's progress instead of sleeping, over a connection of the test's own."""

    def __init__(self) -> None:
        self._store = dist.distributed_c10d._get_default_store().clone()

    def send(self, name: str) -> None:
        self._store.set(f"signal/{name}", "")

    def wait(self, name: str) -> None:
        self._store.wait([f"signal/{name}"])

    def absent(self, name: str) -> bool:
        return not self._store.check([f"signal/{name}"])


@contextmanager
def warned(logger: str = "straggle.loop.step_warnings") -> Iterator[list[str]]:
    """What is warned of meanwhile."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    yield warnings
    logging.getLogger(logger).removeHandler(handler)


class Ahead:
    """A loader that fetches batches ahead, as one with workers does."""

    def __init__(self, loader: Iterable[Any], num_ahead: int) -> None:
        self._loader, self._num_ahead = loader, num_ahead

    def __iter__(self) -> Iterator[Any]:
        fetched: deque[Any] = deque()
        for batch in self._loader:
            fetched.append(batch)
            if len(fetched) > self._num_ahead:
                yield fetched.popleft()
        yield from fetched


def saved_step(run_dir: Path) -> int:
    """The step of a run's checkpoint, of which there is one."""
    (path,) = run_dir.glob("checkpoint/step*/state.json")
    return int(json.loads(path.read_text())["step"])
