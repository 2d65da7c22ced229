"""What a step costs beside DDP's where no rank is late, on the CPU: ranks of this machine, in turns.

OMP_NUM_THREADS=1 python benchmarks/step_time.py                           # all models but the one that sleeps
OMP_NUM_THREADS=1 python benchmarks/step_time.py text small --rounds 60
OMP_NUM_THREADS=1 python benchmarks/step_time.py text small --cpu          # CPU time of the thread that trains
OMP_NUM_THREADS=1 python benchmarks/step_time.py small --ends              # CPU time of entering and leaving a step
OMP_NUM_THREADS=1 python benchmarks/step_time.py synthetic --members       # beside straggle with members, too
OMP_NUM_THREADS=1 python benchmarks/step_time.py text small --watched      # beside DDP with straggle.watch, too
OMP_NUM_THREADS=1 python benchmarks/step_time.py sleeping --ranks 16       # 0.4 s of sleep, as cores are few

DDP is the faster of its kinds, with ``gradient_as_bucket_view=True``. The deadline is never reached.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from paired import in_turns, median_ratio
from sleeping import sleeping_net
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import straggle
from straggle.lab.local_ranks import run_on_ranks
from straggle.lab.workloads.synthetic import Synthetic
from straggle.lab.workloads.text import GPT, Text
from straggle.report import text_table

WAYS = ("DDP", "DDP again", "straggle")
MEMBERS, WATCHED = "straggle, members", "DDP, watched"


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


def sleeping():
    return sleeping_net(64, 16, 0.4), lambda model: model(torch.randn(4, 64)).square().mean()


MODELS = {
    "synthetic": (lambda: of_workload(Synthetic(), 32), 1),
    "text": (lambda: of_workload(Text(), 16), 1),
    "text, 4 micro-batches": (lambda: of_workload(Text(), 4), 4),
    "gpt": (gpt, 1),
    "small": (small, 1),
    "sleeping": (sleeping, 1),
}
COMPUTING = [name for name in MODELS if name != "sleeping"]


def wrap(way, model):
    if way.startswith("DDP"):
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if way == WATCHED:
            straggle.watch(model, tempfile.mkdtemp())
        return model
    return straggle.StagedDataParallel(model, deadline=1000.0, members=straggle.Elastic() if way == MEMBERS else None)


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


def measure(rank, options):
    clock = time.thread_time if options.cpu else time.perf_counter
    ways = (*WAYS, *((MEMBERS,) if options.members else ()), *((WATCHED,) if options.watched else ()))
    rows = [("model", "DDP", *(title for way in ways[1:] for title in (way, "over DDP", "quartiles")))]
    for name in options.models:
        make, num_microbatches = MODELS[name]
        models, steps = {}, {}
        for way in ways:
            torch.manual_seed(0)
            model, compute_loss = make()
            models[way] = wrap(way, model)
            steps[way] = one_step(models[way], compute_loss, num_microbatches, clock)
        seconds = in_turns(steps, options.rounds, options.steps)
        cells = {way: f"{1000 * statistics.median(own):.2f} ms" for way, own in seconds.items()}
        ratios = (cell for way in ways[1:] for cell in (cells[way], *median_ratio(seconds[way], seconds["DDP"])))
        rows.append((name, cells["DDP"], *ratios))
        for way in {MEMBERS, WAYS[-1]} & set(ways):
            models[way].close()
    if rank == 0:
        print(f"{dist.get_world_size()} ranks, {options.rounds} rounds of {options.steps} steps of each on rank 0")
        print(text_table(rows))


def measure_ends(rank, options):
    """CPU time of the two ends of a step, with emptied caches, as they are after a pass and after a wait."""
    other = torch.zeros(2**20)
    for name in options.models:
        make, _ = MODELS[name]
        model, compute_loss = make()
        model, ends = wrap("straggle", model), []
        for _ in range(options.rounds * options.steps):
            step = model.step()
            other.add_(1)
            times = [time.thread_time()]
            step.begin()
            times.append(time.thread_time())
            compute_loss(model).backward()
            other.add_(1)
            times.append(time.thread_time())
            step.end()
            ends.append((times[1] - times[0], time.thread_time() - times[2]))
            model.zero_grad()
        if rank == 0:
            entering, leaving = (1e6 * statistics.median(own) for own in zip(*ends, strict=True))
            print(f"{name}: entering a step takes {entering:.0f} microseconds of CPU, leaving it {leaving:.0f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: {COMPUTING}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5, help="of each round and way")
    parser.add_argument("--cpu", action="store_true", help="CPU time of the thread that trains instead of the time")
    parser.add_argument("--members", action="store_true", help="beside straggle with members, too")
    parser.add_argument("--watched", action="store_true", help="beside DDP with straggle.watch, too")
    parser.add_argument("--ends", action="store_true", help="CPU time of entering and leaving a step, and nothing else")
    options = parser.parse_args()
    options.models = options.models or COMPUTING
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"unknown models {sorted(unknown)}; there are {', '.join(MODELS)}")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    run_on_ranks(measure_ends if options.ends else measure, options.ranks, options)


if __name__ == "__main__":
    main()
