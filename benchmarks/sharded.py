"""A sharded job beside FSDP2's own replicas, nobody late: four ranks of this machine, as two replicas of two.

OMP_NUM_THREADS=1 python benchmarks/sharded.py            # peak memory, each way in processes of its own; Linux only
OMP_NUM_THREADS=1 python benchmarks/sharded.py --time     # of a step, in turns; each pass of a unit sleeps for 20 ms

``watched``: FSDP2 with `straggle.watch`.
"""

import argparse
import contextlib
import statistics
import tempfile
import time

import torch
from memory import reset_peak, resident
from paired import in_turns, median_ratio
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import straggle
from straggle.lab.local_ranks import run_on_ranks
from straggle.report import text_table

WIDTH, DEPTH, UNIT_S, WAYS = 1024, 10, 0.02, ("FSDP2", "straggle")
WATCHED = "watched"
AFTER = (14, 50, 100)  # steps


class Block(nn.Linear):
    sleep_s = 0.0

    def forward(self, x):
        time.sleep(self.sleep_s)
        y = torch.tanh(super().forward(x))
        y.register_hook(lambda _: time.sleep(self.sleep_s))
        return x + y


def one_step(way):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = nn.Sequential(*(Block(WIDTH, WIDTH) for _ in range(DEPTH)), nn.Linear(WIDTH, 3))
    for unit in (*model[:-1], model):
        fully_shard(unit, mesh=mesh["dp_shard"] if way == "straggle" else mesh)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    wrapped = straggle.StagedDataParallel(model, mesh=mesh["dp_replicate"]) if way == "straggle" else model
    if way == WATCHED:
        straggle.watch(model, tempfile.mkdtemp())
    optimizer, x = torch.optim.AdamW(model.parameters(), foreach=True), torch.randn(32, WIDTH)

    def step():
        began = time.monotonic()
        with wrapped.step() if way == "straggle" else contextlib.nullcontext():
            wrapped(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.monotonic() - began

    return step


def memory(_rank, way):
    step = one_step(way)
    reset_peak()
    return [(step(), resident("VmHWM"))[1] for _ in range(AFTER[-1])]


def times(_rank, rounds):
    Block.sleep_s = UNIT_S
    return in_turns({way: one_step(way) for way in (*WAYS, WATCHED)}, rounds, 4)


def table(rounds):
    runs = [[run_on_ranks(memory, 4, way) for way in WAYS] for _ in range(rounds)]
    for steps in AFTER:
        native, ours = (statistics.median(own[steps - 1] for run in runs for own in run[way]) for way in (0, 1))
        yield str(steps), f"{native:.0f} MB", f"{ours:.0f} MB", f"{ours / native:.3f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    if (options := parser.parse_args()).time:
        native, *others = run_on_ranks(times, 4, options.rounds)[0].items()
        print(f"FSDP2: {1e3 * statistics.median(native[1]):.1f} ms")
        rows = [(way, f"{1e3 * statistics.median(own):.1f} ms", *median_ratio(own, native[1])) for way, own in others]
        print(text_table([("", "step", "ratio", "quartiles"), *rows]))
    else:
        print(text_table([("steps", *WAYS, "ratio"), *table(options.rounds)]))
