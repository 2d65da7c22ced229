"""Two versions of `straggle/members/state_wire.py`, and torch.save of all: how long a healing's part takes, in turns.

python benchmarks/two_wires.py OLD.py NEW.py ROUNDS
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import quantiles
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

LIMIT = timedelta(seconds=60)


def of_adam(shapes: list[tuple[int, ...]]) -> dict[str, Any]:
    """A model's state and Adam's after a step."""
    model = nn.ParameterDict({f"weight{i}": torch.randn(shape) for i, shape in enumerate(shapes)})
    optimizer = torch.optim.Adam(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    return {
        "module": {name: p.detach() for name, p in model.items()},
        "registered": {"optimizer": optimizer.state_dict()},
    }


STATES = {
    "50 MB, 10 tensors": lambda: {"module": {f"w{i}": torch.randn(1024, 1280) for i in range(10)}},
    "200 MB, a model and Adam": lambda: of_adam([(1024, 1024)] * 16),
    "5,000 tensors of 64 numbers": lambda: {"module": {f"w{i}": torch.randn(64) for i in range(5000)}},
    "400 small layers and Adam": lambda: of_adam([(32, 32)] * 400),
}


class AllOfTorch:
    """The complete state as `torch.save` writes it, sent as the data of the other's."""

    def __init__(self, wire: ModuleType) -> None:
        self._wire = wire

    def encode(self, state: Any, room: torch.Tensor) -> Any:
        memory = room.numpy()
        end = 0

        class Room(io.RawIOBase):
            def write(self, piece: Any) -> int:
                nonlocal end
                view = memoryview(piece).cast("B")
                memory[end : end + len(view)] = view
                end += len(view)
                return len(view)

        torch.save(state, Room())
        return self._wire.Encoded(self._wire.encode(0).header, room[:end])

    def send(self, *arguments: Any) -> None:
        self._wire.send(*arguments)

    def receive(self, group: Any, peer: int, max_bytes: int) -> Any:
        kept = self._wire.decode
        self._wire.decode = lambda _, data: torch.load(io.BytesIO(memoryview(data.numpy())), weights_only=True)
        try:
            return self._wire.receive(group, peer, max_bytes=max_bytes)
        finally:
            self._wire.decode = kept


def loaded(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def quartiles(values: list[float]) -> str:
    first, middle, last = quantiles(values, n=4)
    return f"{middle:.3f} ({first:.3f} to {last:.3f})"


def main() -> None:
    torch.set_num_threads(1)
    old, new = loaded(sys.argv[1]), loaded(sys.argv[2])
    wires = {"old": old, "new": new, "torch.save": AllOfTorch(new)}
    rounds, file = int(sys.argv[3]), tempfile.mktemp()
    rank = 0 if (child := os.fork()) else 1
    group = dist.ProcessGroupGloo(dist.FileStore(file, 2), rank, 2, LIMIT)
    for name, make in STATES.items():
        state, room = make(), torch.zeros(450_000_000, dtype=torch.uint8)
        copies, healings = {own: list[float]() for own in wires}, {own: list[float]() for own in wires}
        of_cpu, cpu_s = {own: list[float]() for own in wires}, torch.zeros(1)
        for turn in range(rounds):
            order = list(wires)[turn % 3 :] + list(wires)[: turn % 3]
            for own in order:
                began_at, cpu_at = time.perf_counter(), time.process_time()
                if rank:
                    wires[own].receive(group, 0, max_bytes=2**40)
                    group.send([torch.tensor([time.process_time() - cpu_at])], 0, 1).wait()
                    continue
                encoded = wires[own].encode(state, room)
                copies[own].append(time.process_time() - cpu_at)
                wires[own].send(encoded, group, 1)
                group.recv([cpu_s], 1, 1).wait()
                healings[own].append(time.perf_counter() - began_at)
                of_cpu[own].append(time.process_time() - cpu_at + cpu_s.item())
        if not rank:
            for what, seconds in (("CPU of the copy", copies), ("CPU of both", of_cpu), ("seconds", healings)):
                for own in ("new", "torch.save"):
                    ratios = [a / b for a, b in zip(seconds[own], seconds["old"], strict=True)]
                    print(
                        f"{name}: {what}, {own} over old: {quartiles(ratios)}; old {quartiles(seconds['old'])} s",
                        flush=True,
                    )
    if not rank:
        os.waitpid(child, 0)
    else:
        os._exit(0)


main()
