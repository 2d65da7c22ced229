"""Ranks under plain DDP with `straggle.watch`, with rank 1 made slow: what E10 and E11 run.

A layer sleeps, as a stand-in for an accelerator, so that ranks that share few cores do not contend.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from straggle.advise.timings import Timings, read_timings
from straggle.lab.local_ranks import run_on_ranks
from straggle.observe.watch import watch

RANKS, SLOW = 4, 1
LAYERS, FORWARD_S, BACKWARD_S, WIDTH = 8, 0.004, 0.008, 64
_SPREAD = 0.1  # of a layer's time, from step to step


class _Spend(torch.autograd.Function):
    """Takes time in both passes, and does nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _Layer) -> Tensor:
        ctx.layer = layer
        time.sleep(FORWARD_S * layer.pace())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        layer: _Layer = ctx.layer
        time.sleep(BACKWARD_S * layer.pace())
        spend(layer.extra_s, layer.kind)
        return gradient, None


class _Layer(nn.Module):
    def __init__(self, rank: int, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.extra_s, self.kind = 0.0, "sleep"
        self._random = torch.Generator().manual_seed(100 * rank + number)

    def pace(self) -> float:
        """A factor on the layer's time, around 1."""
        return float(torch.exp(_SPREAD * torch.randn((), generator=self._random)))

    def forward(self, x: Tensor) -> Tensor:
        spent: Tensor = _Spend.apply(self.linear(x), self)  # type: ignore[no-untyped-call]
        return torch.tanh(spent)


def spend(seconds: float, kind: str) -> None:
    """Be busy, or asleep, for so long."""
    if kind == "sleep":
        time.sleep(seconds)
        return
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def _train(rank: int, folder: Path, steps: int, block: int, kind: str, seconds: Sequence[float]) -> Mapping[str, float]:
    """The loop of one rank; its DDP timers."""
    torch.manual_seed(0)
    layers = [_Layer(rank, number) for number in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched = watch(model, folder)
    slow = layers[LAYERS // 2]
    slow.kind = kind
    for step in range(steps):
        slow.extra_s = seconds[step // block % len(seconds)] if rank == SLOW else 0.0
        model(torch.randn(16, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    watched.close()
    return {key: value for key, value in model._get_ddp_logging_data().items() if key.startswith("avg_")}  # type: ignore[no-untyped-call]


def run_watched(
    steps: int, block: int, kind: str, seconds: Sequence[float]
) -> tuple[Timings, list[Mapping[str, float]]]:
    """What the watch of four ranks wrote, and each rank's DDP timers.

    In turns of ``block`` steps, rank 1's backward pass takes some of the ``seconds`` more. These are spent by ``kind``:
    spin, which needs a core of its own, or sleep.
    """
    with TemporaryDirectory() as folder:
        timers = run_on_ranks(_train, RANKS, Path(folder), steps, block, kind, list(seconds))
        return read_timings(Path(folder)), timers
