"""Ranks under plain DDP with `straggle.watch`, of which rank 1 is made slow: what E10 and E11 run.

torchrun --nproc-per-node 4 -m experiments._watched FOLDER STEPS BLOCK KIND SECONDS [SECONDS ...]

In turns of BLOCK steps, rank 1's backward pass takes so many SECONDS more. A layer sleeps, as a stand-in for an
accelerator, so that ranks that share few cores do not contend; the additional seconds are spent by KIND: spin, which
needs a core of its own, or sleep. With FOLDER come each rank's DDP timers, as `ddp<r>.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from straggle.advise.timings import Timings, read_timings
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


def train(folder: Path, steps: int, block: int, kind: str, seconds: Sequence[float]) -> None:
    """The loop of one rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
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
    timers = {key: value for key, value in model._get_ddp_logging_data().items() if key.startswith("avg_")}  # type: ignore[no-untyped-call]
    (folder / f"ddp{rank}.json").write_text(json.dumps(timers))
    dist.barrier()
    dist.destroy_process_group()


def run_watched(folder: Path, steps: int, block: int, kind: str, seconds: Sequence[float]) -> Timings:
    """Run it on four ranks, and read what the watch wrote."""
    root = str(Path(__file__).parents[1])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["-m", "experiments._watched", str(folder), str(steps), str(block), kind, *map(str, seconds)]
    env = {**loopback, **kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return read_timings(folder)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], [float(word) for word in sys.argv[5:]])
