"""A rank that loads its data slowly, beside one whose layers are as slow: does it set the pace?

torchrun --standalone --nproc-per-node 4 benchmarks/loads.py               # about eight minutes
torchrun --standalone --nproc-per-node 4 benchmarks/loads.py --rounds 1    # a first look

Rank 1 sleeps 0.4 s a step more than the others, whose layers sleep 0.15 s: in its layers, or as it loads a batch. All
ways are taken in turns, with ``AutoDeadline`` and models of their own, so that each round meets the same machine. A
round of a way is as many steps as its loader has batches, with more for what `Epochs` deals again.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from paired import median_ratio
from sleeping import sleeping_net
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from straggle import AutoDeadline, DealtLoader, Epochs, LateLoader, MicroBatches, StagedDataParallel
from straggle.lab.process_group import gather
from straggle.report import text_table

RANKS, SLOW, WIDTH, DEPTH, ROWS = 4, 1, 16, 8, 8
LAYERS = "its layers; a plain loader"


class Data(Dataset):
    """Each batch takes ``batch_s`` to load."""

    def __init__(self, length, batch_s):
        self._length, self._batch_s, self.num_loads = length, batch_s, 0

    def __len__(self):
        return self._length

    def __getitem__(self, number):
        return torch.full((WIDTH,), float(number))

    def __getitems__(self, numbers):
        time.sleep(self._batch_s)
        self.num_loads += 1
        return [self[number] for number in numbers]


def plain(_model, data, workers):
    sampler = DistributedSampler(data, RANKS, dist.get_rank())
    return lambda: DataLoader(data, ROWS, sampler=sampler, num_workers=workers)


def late(model, data, workers):
    loader = plain(model, data, workers)
    return lambda: LateLoader(model, loader())


def epochs(model, data, workers):
    own = Epochs(model, num_samples=len(data), batch_size=ROWS)
    loader = DataLoader(data, batch_sampler=own.sampler, num_workers=workers, persistent_workers=workers > 0)
    return lambda: own.batches(loader)


def dealt(model, data, workers):
    loader = DealtLoader(model, DataLoader(data, ROWS, shuffle=True, num_workers=workers))
    return lambda: loader


def pooled(_model, data, _workers):
    """Half a batch is drawn at a time, and takes half as long."""
    parts = MicroBatches(data, size=ROWS // 2)
    total = RANKS * ROWS
    return lambda: (parts.of(range(first, first + total)) for first in range(0, len(data), total))


WAYS = {
    LAYERS: (plain, 0),
    "its data; a plain loader": (plain, 0),
    "LateLoader": (late, 0),
    "LateLoader, 2 workers": (late, 2),
    "Epochs": (epochs, 0),
    "DealtLoader": (dealt, 0),
    "MicroBatches, drawn from a pool": (pooled, 0),
    "DDP": (plain, 0),
}


class Job:
    """One way: a model and its loader on this rank. ``round`` makes an epoch."""

    def __init__(self, name, options):
        make, workers = WAYS[name]
        slow_s = options.slow_s if dist.get_rank() == SLOW else 0.0
        in_layers = name == LAYERS
        batch_s = 0.0 if in_layers else slow_s / (2 if make is pooled else 1)
        torch.manual_seed(0)
        self.pulls = make is pooled
        layer_s = options.compute_s / (2 if self.pulls else 1) + slow_s * in_layers
        net = sleeping_net(WIDTH, DEPTH, layer_s)
        self.model = DistributedDataParallel(net) if name == "DDP" else StagedDataParallel(net, deadline=AutoDeadline())
        self.data = Data(RANKS * ROWS * options.steps, batch_s)
        self.loader = make(self.model, self.data, workers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.reports = []

    def step(self, batch):
        if isinstance(self.model, DistributedDataParallel):
            self.model(batch).square().mean().backward()
        else:
            with self.model.step() as step:
                for x in step.pull(batch) if self.pulls else (batch,):
                    self.model(x).square().mean().backward()
            self.reports.append(self.model.last_report)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def round(self):
        """Mean seconds of a step, on this rank."""
        dist.barrier()
        if isinstance(self.model, StagedDataParallel):
            self.model.resume()
        began, number = time.monotonic(), 0
        for batch in self.loader():
            self.step(batch)
            number += 1
        seconds = (time.monotonic() - began) / max(1, number)
        if isinstance(self.model, StagedDataParallel):
            self.model.pause()
        return seconds

    def given(self):
        """Of the slow rank's gradients, the share that was merged; of all samples' gradients, that of a step."""
        own = [report.ranks[SLOW].reach for report in self.reports if not report.ranks[SLOW].idle]
        return statistics.mean(own) if own else 1.0


def run(options):
    names = [name for name in WAYS if name == LAYERS or any(word in name for word in options.only)]
    jobs = {name: Job(name, options) for name in names}
    for job in jobs.values():
        if isinstance(job.model, StagedDataParallel):
            job.model.pause()
    seconds = {name: [] for name in names}
    for number in range(1 + options.rounds):
        for name, job in jobs.items():
            own = job.round()
            if number:
                seconds[name].append(own)
    state = {name: [p.detach().sum().item() for p in job.model.parameters()] for name, job in jobs.items()}
    every = gather(state)
    assert all(other == every[0] for other in every), "parameters differ"
    numbers = {name: (job.given(), job.data.num_loads) for name, job in jobs.items()}
    for job in jobs.values():
        if isinstance(job.model, StagedDataParallel):
            job.model.close()
    return seconds, numbers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow-s", type=float, default=0.4)
    parser.add_argument("--compute-s", type=float, default=0.15)
    parser.add_argument("--steps", type=int, default=40, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[""], help="ways with one of these in their name, and the first")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    results = gather(run(options))
    if dist.get_rank() == 0:
        show(results)
    dist.destroy_process_group()


def show(results):
    seconds, numbers = results[0][0], results[SLOW][1]
    rows = [("rank 1 is slow in", "mean step, ms", "over its layers", "quartiles", "given by rank 1", "its loads")]
    for name, own in seconds.items():
        mean_ms = 1e3 * statistics.mean(own)
        given, loads = numbers[name]
        rows.append((name, f"{mean_ms:.0f}", *median_ratio(own, seconds[LAYERS]), f"{given:.1%}", str(loads)))
    print(text_table(rows))


if __name__ == "__main__":
    main()
