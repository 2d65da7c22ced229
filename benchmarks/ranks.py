"""What straggle costs beside DDP with many ranks: sleeping work, healthy and with one rank that is always late.

OMP_NUM_THREADS=1 python benchmarks/ranks.py                           # 8, 16, 32 and 64 ranks, about seven minutes
OMP_NUM_THREADS=1 python benchmarks/ranks.py --ranks 8 16 --rounds 3

A step sleeps 0.4 s, in 16 layers; a late rank takes twice as long. DDP, StagedDataParallel with QuantileDeadline, and
the same with the last rank late take turns of five steps in one process group. A step with a late rank ends after its
deadline, 1.2 times the median; "over its deadline" is what comes on top: a layer's sleep is not interrupted. CPU is of
all threads of a rank. "of the machine": the CPU of all ranks in a step over what the cores have in that time. Near 1
the machine is the limit, not the library. Requests to the job's store, and the stand-in's CPU, are those of one rank
in a step.
"""

import argparse
import contextlib
import math
import os
import statistics
import threading
import time

import torch
import torch.distributed as dist
from sleeping import sleeping_net
from torch.nn.parallel import DistributedDataParallel

import straggle
from straggle.lab.jobs import gather
from straggle.lab.local_ranks import run_on_ranks
from straggle.merge.store import JobStore
from straggle.report import text_table

DDP, HEALTHY, LATE = "DDP", "straggle", "straggle, one rank late"
WAYS = (DDP, HEALTHY, LATE)
LAYERS, WIDTH, STEPS = 16, 64, 5
STAND_IN = "straggle-stand-in"


class Requests:
    """Counts this rank's requests to the store of the job."""

    def __init__(self):
        self.number = 0
        JobStore.ask, JobStore.post = self._counted(JobStore.ask), self._counted(JobStore.post)

    def _counted(self, method):
        def counting(*args, **keys):
            self.number += 1
            return method(*args, **keys)

        return counting


def stand_in_s():
    """CPU seconds of the stand-ins of this process; only one of them works at a time."""
    threads = [thread for thread in threading.enumerate() if thread.name == STAND_IN]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threads)


class Way:
    """A model in its wrapper, and for each round the seconds, CPU seconds, stand-in's CPU and requests of a step."""

    def __init__(self, name, work_s):
        torch.manual_seed(0)
        slow = 2.0 if name == LATE and dist.get_rank() == dist.get_world_size() - 1 else 1.0
        net = sleeping_net(WIDTH, LAYERS, slow * work_s)
        self.staged = name != DDP
        deadline = straggle.QuantileDeadline(0.5, slack=1.2, warmup_steps=2)
        wrap = (lambda net: straggle.StagedDataParallel(net, deadline=deadline)) if self.staged else _ddp
        self.model = wrap(net)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        self.rounds, self.late, self.deadlines_s = [], 0, []
        if self.staged:
            self.model.pause()

    def turn(self, requests):
        dist.barrier()
        if self.staged:
            self.model.resume()
        before = (time.perf_counter(), time.process_time(), stand_in_s(), requests.number)
        for _ in range(STEPS):
            self.step()
        after = (time.perf_counter(), time.process_time(), stand_in_s(), requests.number)
        self.rounds.append([(later - earlier) / STEPS for earlier, later in zip(before, after, strict=True)])
        dist.barrier()
        if self.staged:
            self.model.pause()

    def step(self):
        with self.model.step() if self.staged else contextlib.nullcontext():
            self.model(torch.randn(4, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.staged and dist.get_rank() == 0:  # building it is no part of the step, and all ranks share the cores
            report = self.model.last_report
            self.late += dist.get_world_size() - 1 in report.late_ranks
            self.deadlines_s.append(report.deadline_s)


def _ddp(net):
    return DistributedDataParallel(net, gradient_as_bucket_view=True)


def measure(_rank, options):
    """For each way and round the numbers of a step, each the mean over ranks (seconds: rank 0's own)."""
    requests = Requests()
    ways = {name: Way(name, options.work_s) for name in WAYS}
    for number in range(1 + options.rounds):
        for name in WAYS[number % 3 :] + WAYS[: number % 3]:
            ways[name].turn(requests)
    found = {}
    for name, way in ways.items():
        every = gather(way.rounds[1:])
        found[name] = [
            [every[0][number][0], *(statistics.fmean(own[number][part] for own in every) for part in (1, 2, 3))]
            for number in range(options.rounds)
        ]
        found[name, "deadline"] = statistics.median(way.deadlines_s or [math.nan])
        found[name, "late"] = way.late / (STEPS * (1 + options.rounds))
    for way in ways.values():
        if way.staged:
            way.model.close()
    return found


def rows_of(ranks, found, cores):
    ddp_s = [round_[0] for round_ in found[DDP]]
    for name in WAYS:
        seconds, cpu_s, own_s, requests = (list(column) for column in zip(*found[name], strict=True))
        ratios = [one / other for one, other in zip(seconds, ddp_s, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        yield (
            str(ranks),
            name,
            f"{1e3 * statistics.median(seconds):.0f} ms",
            "1" if name == DDP else f"{middle:.3f} ({low:.3f} to {high:.3f})",
            "" if name != LATE else f"{1e3 * (statistics.median(seconds) - found[name, 'deadline']):.0f} ms",
            f"{1e3 * statistics.fmean(cpu_s):.1f} ms",
            f"{ranks * statistics.fmean(cpu_s) / cores / statistics.fmean(seconds):.2f}",
            f"{1e3 * statistics.fmean(own_s):.2f} ms",
            f"{statistics.fmean(requests):.2f}",
            f"{found[name, 'late']:.0%}",
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work-s", type=float, default=0.4)
    options = parser.parse_args()
    head = (
        "ranks",
        "",
        "step",
        "over DDP's (quartiles)",
        "over its deadline",
        "CPU of a rank",
        "of the machine",
        "stand-in's CPU",
    )
    rows = [(*head, "store requests", "last rank late in")]
    cores = len(os.sched_getaffinity(0))
    for ranks in options.ranks:
        began = time.monotonic()
        rows += rows_of(ranks, run_on_ranks(measure, ranks, options)[0], cores)
        print(f"{ranks} ranks took {math.ceil(time.monotonic() - began)} s", flush=True)
    print(text_table(rows))


if __name__ == "__main__":
    main()
