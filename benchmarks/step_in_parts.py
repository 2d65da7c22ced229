"""What stepping the optimizer during the merge gains, on the CPU: two ranks of this machine, in turns.

OMP_NUM_THREADS=1 python benchmarks/step_in_parts.py                        # all models and optimizers
OMP_NUM_THREADS=1 python benchmarks/step_in_parts.py synthetic --optimizers momentum --rounds 20

"At the end" has ``optimizer.step()`` after the block, "in parts" ``model.step(optimizer=optimizer)``, both with
``Merge(nonfinite="keep")``. DDP has ``gradient_as_bucket_view=True``. The deadline is never reached.
"""

import argparse
import contextlib
import os
import statistics
import time

import torch
import torch.distributed as dist
from paired import in_turns, median_ratio
from step_time import MODELS
from torch.nn.parallel import DistributedDataParallel

import straggle
from straggle.lab.local_ranks import run_on_ranks
from straggle.report import text_table

WAYS = ("DDP", "at the end", "in parts")
OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
}
ONE_MESSAGE = ("small", "text, 4 micro-batches")  # nothing to overlap, or as in text


def one_step(way, name, kind):
    """A function that makes a step and gives its seconds."""
    torch.manual_seed(0)
    make, num_microbatches = MODELS[name]
    module, compute_loss = make()
    if way == "DDP":
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    else:
        model = straggle.StagedDataParallel(module, deadline=1000.0, merge=straggle.Merge(nonfinite="keep"))
    optimizer = OPTIMIZERS[kind](model.parameters())

    def block():
        if way == "DDP":
            return contextlib.nullcontext()
        return model.step(num_microbatches, optimizer=optimizer if way == "in parts" else None)

    def step():
        began = time.perf_counter()
        with block():
            for number in range(1, num_microbatches + 1):
                last = number == num_microbatches
                with model.no_sync() if way == "DDP" and not last else contextlib.nullcontext():
                    (compute_loss(model) / num_microbatches).backward()
        if way != "in parts":
            optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    return step


def measure(rank, options):
    rows = [("model", "optimizer", "DDP", "at the end over DDP", "in parts over DDP", "in parts over at the end")]
    for name in options.models:
        for kind in options.optimizers:
            steps = {way: one_step(way, name, kind) for way in WAYS}
            seconds = in_turns(steps, options.rounds, options.steps)
            pairs = (("at the end", "DDP"), ("in parts", "DDP"), ("in parts", "at the end"))
            ratios = ["{} ({})".format(*median_ratio(seconds[way], seconds[base])) for way, base in pairs]
            rows.append((name, kind, f"{1000 * statistics.median(seconds['DDP']):.2f} ms", *ratios))
    if rank == 0:
        print(f"{dist.get_world_size()} ranks, {options.rounds} rounds of {options.steps} steps of each on rank 0")
        print(text_table(rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [name for name in MODELS if name not in ONE_MESSAGE]
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: {default}")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="of each round and way")
    options = parser.parse_args()
    options.models = options.models or default
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    run_on_ranks(measure, 2, options)


if __name__ == "__main__":
    main()
