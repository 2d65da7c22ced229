"""What a step costs beside DDP's where no rank is late, on the CPU: two ranks of this machine, in turns.

OMP_NUM_THREADS=1 python benchmarks/step_time.py                       # all models
OMP_NUM_THREADS=1 python benchmarks/step_time.py text small --rounds 60
OMP_NUM_THREADS=1 python benchmarks/step_time.py text small --cpu      # CPU time of the thread that trains

DDP is the faster of its kinds, with ``gradient_as_bucket_view=True``. The deadline is never reached.
"""

import argparse
import contextlib
import os
import statistics
import time

import torch
import torch.distributed as dist
from paired import in_turns, median_ratio
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import straggle
from straggle.lab.local_ranks import run_on_ranks
from straggle.lab.workloads.synthetic import Synthetic
from straggle.lab.workloads.text import GPT, Text
from straggle.report import text_table

WAYS = ("DDP", "DDP again", "straggle")


def small():
    """A model of 12 parameters whose step takes a few milliseconds."""
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(192, 192), nn.Tanh())))
    return model, lambda model: model(torch.randn(32, 192)).square().mean()


def of_workload(workload, batch_size):
    def loss(model):
        return workload.loss(model, workload.batch(torch.randint(workload.num_samples, (batch_size,))))

    return workload.model(), loss


def gpt():
    """12 layers of width 384, and 4 x 128 tokens: 21 M parameters in 147 gradients."""

    def loss(model):
        tokens = torch.randint(256, (4, 129))
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return GPT(context=128, width=384, depth=12, heads=6), loss


MODELS = {
    "synthetic": (lambda: of_workload(Synthetic(), 32), 1),
    "text": (lambda: of_workload(Text(), 16), 1),
    "text, 4 micro-batches": (lambda: of_workload(Text(), 4), 4),
    "gpt": (gpt, 1),
    "small": (small, 1),
}


def wrap(way, model):
    if way == "straggle":
        return straggle.StagedDataParallel(model, deadline=1000.0)
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def one_step(model, compute_loss, num_microbatches, clock=time.perf_counter):
    """A function that makes a step and gives its seconds, by ``clock``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    staged = isinstance(model, straggle.StagedDataParallel)

    def step():
        began = clock()
        with model.step(num_microbatches) if staged else contextlib.nullcontext():
            for number in range(1, num_microbatches + 1):
                with contextlib.nullcontext() if staged or number == num_microbatches else model.no_sync():
                    (compute_loss(model) / num_microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()
        return clock() - began

    return step


def steps_of(name, clock):
    """For each way a function that makes a step of this model."""
    make, num_microbatches = MODELS[name]
    steps = {}
    for way in WAYS:
        torch.manual_seed(0)
        model, compute_loss = make()
        steps[way] = one_step(wrap(way, model), compute_loss, num_microbatches, clock)
    return steps


def measure(rank, options):
    rows = [("model", "DDP", "straggle", "median of ratios", "quartiles", "DDP, a second time")]
    for name in options.models:
        clock = time.thread_time if options.cpu else time.perf_counter
        seconds = in_turns(steps_of(name, clock), options.rounds, options.steps)
        medians = [f"{1000 * statistics.median(seconds[way]):.2f} ms" for way in ("DDP", "straggle")]
        again = "{} ({})".format(*median_ratio(seconds["DDP again"], seconds["DDP"]))
        rows.append((name, *medians, *median_ratio(seconds["straggle"], seconds["DDP"]), again))
    if rank == 0:
        print(f"{dist.get_world_size()} ranks, {options.rounds} rounds of {options.steps} steps of each on rank 0")
        print(text_table(rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5, help="of each round and way")
    parser.add_argument("--cpu", action="store_true", help="CPU time of the thread that trains instead of the time")
    options = parser.parse_args()
    options.models = options.models or list(MODELS)
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"unknown models {sorted(unknown)}; there are {', '.join(MODELS)}")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    run_on_ranks(measure, 2, options)


if __name__ == "__main__":
    main()
