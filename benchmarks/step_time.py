"""What a step costs beside DDP's where no rank is late, on the CPU: two ranks of this machine, in turns.

OMP_NUM_THREADS=1 python benchmarks/step_time.py                       # all models
OMP_NUM_THREADS=1 python benchmarks/step_time.py text small --rounds 60
OMP_NUM_THREADS=1 python benchmarks/step_time.py text small --cpu      # CPU time of the thread that trains
OMP_NUM_THREADS=1 python benchmarks/step_time.py text --bare 1 8       # beside the least that hooks in Python can do
OMP_NUM_THREADS=1 python benchmarks/step_time.py small --ends          # CPU time of entering and leaving a step
OMP_NUM_THREADS=1 python benchmarks/step_time.py synthetic --alone     # each way in jobs of its own, and fresh pages

DDP is the faster of its kinds, with ``gradient_as_bucket_view=True``. The deadline is never reached.
"""

import argparse
import contextlib
import os
import resource
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


class BareHooks(nn.Module):
    """What nothing in Python can be faster than: hooks that copy each gradient, and launch so many messages.

    No presence, no weights, no lateness, no look for NaN. ``p.grad`` is a view of what was merged, as under DDP.
    """

    def __init__(self, module, num_messages):
        super().__init__()
        self.module = module
        parameters = list(module.parameters())[::-1]
        most, messages = sum(map(torch.numel, parameters)) / num_messages, [[]]
        for parameter in parameters:
            if sum(map(torch.numel, messages[-1])) >= most:
                messages.append([])
            messages[-1].append(parameter)
        self.counts = list(map(len, messages))
        self.left, self.works, self.views = [], [], []
        scale = torch.tensor(1 / dist.get_world_size())
        for number, own in enumerate(messages):
            flat = torch.zeros(sum(map(torch.numel, own)))
            for parameter, part in zip(own, flat.split(list(map(torch.numel, own))), strict=True):
                self.views.append((parameter, view := part.view_as(parameter)))
                parameter.register_post_accumulate_grad_hook(self.hook(number, flat, view, scale))

    def hook(self, number, flat, view, scale):
        def finished(parameter):
            gradient, parameter.grad = parameter.grad, None
            torch.mul(gradient, scale, out=view)
            self.left[number] -= 1
            if not self.left[number]:
                self.works.append(dist.all_reduce(flat, async_op=True))

        return finished

    def forward(self, *args):
        return self.module(*args)

    @contextlib.contextmanager
    def step(self, _num_microbatches):
        self.left, self.works = list(self.counts), []
        yield
        for work in self.works:
            work.wait()
        for parameter, view in self.views:
            parameter.grad = view


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
    if way.startswith("bare"):
        return BareHooks(model, int(way.split()[-1]))
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def one_step(model, compute_loss, num_microbatches, clock=time.perf_counter):
    """A function that makes a step and gives its seconds, by ``clock``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    staged = isinstance(model, (straggle.StagedDataParallel, BareHooks))

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


def steps_of(name, clock, ways=WAYS):
    """For each way a function that makes a step of this model."""
    make, num_microbatches = MODELS[name]
    steps = {}
    for way in ways:
        torch.manual_seed(0)
        model, compute_loss = make()
        steps[way] = one_step(wrap(way, model), compute_loss, num_microbatches, clock)
    return steps


def measure(rank, options):
    bare = [f"bare {number}" for number in options.bare]
    titles = [f"bare hooks, messages: {number}" for number in options.bare]
    rows = [("model", "DDP", "straggle", "median of ratios", "quartiles", "DDP, a second time", *titles)]
    for name in options.models:
        clock = time.thread_time if options.cpu else time.perf_counter
        seconds = in_turns(steps_of(name, clock, (*WAYS, *bare)), options.rounds, options.steps)
        medians = [f"{1000 * statistics.median(seconds[way]):.2f} ms" for way in ("DDP", "straggle")]
        others = ["{} ({})".format(*median_ratio(seconds[way], seconds["DDP"])) for way in ("DDP again", *bare)]
        rows.append((name, *medians, *median_ratio(seconds["straggle"], seconds["DDP"]), *others))
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


def alone(_rank, name, way, num_steps):
    """Median seconds of a step, and the pages that are fresh in it."""
    step = steps_of(name, time.perf_counter, [way])[way]
    for _ in range(20):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    seconds = [step() for _ in range(num_steps)]
    return statistics.median(seconds), (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / num_steps


def measure_alone(options):
    """Jobs of one way each, in turns: what is in memory of the other changes neither."""
    rows = [("model", "DDP", "straggle", "median of ratios", "quartiles", "DDP, fresh pages a step", "straggle's")]
    for name in options.models:
        jobs = {"DDP": [], "straggle": []}
        for _ in range(options.rounds):
            for way, own in jobs.items():
                own.append(run_on_ranks(alone, 2, name, way, options.steps)[0])
        (ddp, its_pages), (straggles, pages) = (list(zip(*own, strict=True)) for own in jobs.values())
        medians = [f"{1000 * statistics.median(own):.2f} ms" for own in (ddp, straggles)]
        numbers = [" ".join(f"{number:.0f}" for number in own) for own in (its_pages, pages)]
        rows.append((name, *medians, *median_ratio(straggles, ddp), *numbers))
    print(f"2 ranks, {options.rounds} jobs of {options.steps} steps of each")
    print(text_table(rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5, help="of each round and way")
    parser.add_argument("--cpu", action="store_true", help="CPU time of the thread that trains instead of the time")
    parser.add_argument("--bare", type=int, nargs="*", default=[], help="hooks that do next to nothing, by messages")
    parser.add_argument("--ends", action="store_true", help="CPU time of entering and leaving a step, and nothing else")
    parser.add_argument(
        "--alone", action="store_true", help="jobs of one way each: as many as rounds, of so many steps"
    )
    options = parser.parse_args()
    options.models = options.models or list(MODELS)
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"unknown models {sorted(unknown)}; there are {', '.join(MODELS)}")
    if options.bare and (several := [name for name in options.models if MODELS[name][1] > 1]):
        parser.error(f"--bare has no micro-batches: leave out {', '.join(several)}")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if options.alone:
        measure_alone(options)
    else:
        run_on_ranks(measure_ends if options.ends else measure, 2, options)


if __name__ == "__main__":
    main()
