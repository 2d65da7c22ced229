"""Where a loop is slow is named rightly: a case for each place in it, watched under DDP and staged."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_forked, staged
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import straggle
from straggle.advise.slow import find_slow_ranks
from straggle.advise.timings import read_timings
from straggle.observe.trace import TraceWriter

STEPS, SLEEP_S = 12, 0.03
# where rank 1 sleeps, the phase that is named, and where the loop calls a collective of its own
PLACES = {
    "data": ("data", ""),
    "prepare": ("data", ""),
    "forward": ("forward", ""),
    "backward": ("backward", ""),
    "between": ("outside", ""),
    "optimizer": ("optimizer", ""),
    "loop_end": ("loop_end", ""),
    "evaluation": ("outside", ""),
    "data before a collective": ("data", "loop_end"),
    "loop_end before a collective": ("loop_end", "loop_end"),
    "between before a collective": ("outside", "between"),
}


class Slow(torch.autograd.Function):
    """Sleeps in the passes, where it is called for."""

    @staticmethod
    def forward(ctx, x, loop):
        ctx.loop = loop
        loop.at("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.loop.at("backward")
        return gradient, None


class Loop:
    """One rank's loop, which sleeps in one place of it."""

    def __init__(self, place, collective, is_slow):
        self.place, self.collective, self.is_slow = place.split()[0], collective, is_slow
        self.optimizer = SimpleNamespace()

    def at(self, place):
        if self.is_slow and self.place == place:
            time.sleep(SLEEP_S)
        if self.collective == place:
            dist.all_reduce(torch.ones(1))


class Samples(Dataset):
    def __init__(self, loop):
        self.loop = loop

    def __len__(self):
        return 2 * STEPS

    def __getitem__(self, index):
        if index % 2 == 0:
            self.loop.at("data")
        return torch.ones(4) * index


class Layers(nn.Module):
    def __init__(self, loop):
        super().__init__()
        self.first, self.last, self.loop = nn.Linear(4, 8), nn.Linear(8, 2), loop

    def forward(self, x):
        if not torch.is_grad_enabled():
            self.loop.at("evaluation")
            return self.last(self.first(x))
        return self.last(Slow.apply(self.first(x), self.loop))


class SlowOptimizer(torch.optim.SGD):
    def __init__(self, parameters, loop):
        super().__init__(parameters, lr=0.1)
        self.loop = loop

    def step(self, closure=None):
        self.loop.at("optimizer")
        return super().step(closure)


def train(model, loop, compute):
    optimizer = SlowOptimizer(model.parameters(), loop)
    for x in DataLoader(Samples(loop), batch_size=2):
        loop.at("prepare")
        compute(x)
        loop.at("between")
        optimizer.step()
        optimizer.zero_grad()
        if loop.place == "evaluation":
            with torch.no_grad():
                model(x)
        loop.at("loop_end")


def watched(rank, folder):
    for place, (_, collective) in PLACES.items():
        loop = Loop(place, collective, rank == 1)
        model = DistributedDataParallel(Layers(loop), broadcast_buffers=False)
        with straggle.watch(model, folder / place):
            train(model, loop, lambda x, model=model: model(x).square().mean().backward())


def with_steps(rank, folder):
    for place, (_, collective) in PLACES.items():
        loop = Loop(place, collective, rank == 1)
        (folder / place).mkdir(exist_ok=True)
        name = "trace.jsonl" if rank == 0 else f"of_rank{rank}.jsonl"
        with staged(Layers(loop)) as model, TraceWriter(folder / place / name) as trace:
            model.register_step_hook(lambda record, trace=trace: trace.write(record.report))

            def compute(x, model=model):
                with model.step():
                    model(x).square().mean().backward()

            train(model, loop, compute)


@pytest.mark.slow
@pytest.mark.parametrize("job", [watched, with_steps])
def test_each_place_in_which_a_loop_is_slow_is_named(job, tmp_path):
    run_forked(job, 3, tmp_path)
    for place, (phase, _) in PLACES.items():
        (found,) = find_slow_ranks(read_timings(tmp_path / place)).ranks
        assert (found.rank, found.named[0]) == (1, phase), (place, found)
