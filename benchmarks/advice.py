"""What `advise` promises of a plain DDP job, and what comes when its policy is used: four ranks, their times in turns.

torchrun --standalone --nproc-per-node 4 benchmarks/advice.py                         # every scenario, quiet
torchrun --standalone --nproc-per-node 4 benchmarks/advice.py slow_rank --busy        # with a busy loop on each core

First DDP is watched for --steps steps; then DDP and the policy that was advised take turns of ten steps. Where nothing
is advised, QuantileDeadline(0.5, slack=1.2) shows what would have come.
"""

import argparse
import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from hydra.utils import instantiate

import straggle
from straggle.advise.answer import answer
from straggle.commands.config import load
from straggle.lab.jobs import DdpJob, StagedJob, process_group

SCENARIOS = ("slow_rank", "random_delay", "pace")  # of conf/faults; in "pace" no rank is slow
TURN = 10  # steps
INSTEAD = "straggle.QuantileDeadline(0.5, slack=1.2)"


def from_rank0(value):
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def mean_s(job, begin, steps):
    """Seconds of a step, when all ranks take as many."""
    dist.barrier()
    begin_s = time.perf_counter()
    for step in range(begin, begin + steps):
        job.step(step)
    dist.barrier()
    return (time.perf_counter() - begin_s) / steps


def watched(config, workload, device, steps):
    """What is advised after ``steps`` steps of DDP."""
    with tempfile.TemporaryDirectory() as own:
        folder = from_rank0(own)
        job = DdpJob(config, workload, device)
        watch = straggle.watch(job.model, folder)
        mean_s(job, 0, steps)
        watch.close()
        job.close()
        dist.barrier()
        given = from_rank0(answer(Path(folder)) if dist.get_rank() == 0 else None)
        dist.barrier()
    return given


def compared(config, workload, device, code, steps):
    """Seconds of a step under DDP and under the policy, and the share of the gradients that it dropped."""
    ddp, own = DdpJob(config, workload, device), StagedJob(config, workload, device)
    own.model.close()
    own.model = straggle.StagedDataParallel(own.module, deadline=eval(code))
    records, seconds = own.records(), {"ddp": [], "own": []}
    for begin in range(0, steps, TURN):
        own.pause()
        seconds["ddp"].append(mean_s(ddp, begin, TURN))
        own.resume()
        seconds["own"].append(mean_s(own, begin, TURN))
    dropped = statistics.fmean(record.report.dropped_share for record in records)
    ddp.close()
    own.close()
    # the first turns, in which policies and caches warm up, are left out of both
    return statistics.fmean(seconds["ddp"][1:]), statistics.fmean(seconds["own"][1:]), dropped


@contextlib.contextmanager
def busy(cores):
    loops = [multiprocessing.get_context("fork").Process(target=spin, args=(os.getpid(),)) for _ in range(cores)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()


def spin(parent):
    while os.getppid() == parent:  # whatever becomes of it
        pass


def measure(scenario, steps, cores, device):
    config = load("train", [f"faults={scenario}"])
    workload = instantiate(config.workload)
    with busy(cores if dist.get_rank() == 0 else 0):
        given = watched(config, workload, device, steps)
        code = given.best.code if given.best else INSTEAD
        ddp_s, own_s, dropped = compared(config, workload, device, code, steps)
    if dist.get_rank() == 0:
        gain = next(gain for gain in given.gains if gain.code == code)
        low, high, value = (f"{share:.0%}" for share in (gain.saved.low, gain.saved.high, gain.saved.value))
        advised = code.replace("straggle.", "") if given.best else "nothing"
        print(
            f"| {scenario} | {'busy' if cores else 'quiet'} | {advised} | {value} ({low} to {high}) | "
            f"{1 - own_s / ddp_s:.0%} | {1000 * ddp_s:.0f} ms | {gain.dropped.value:.1%}, {dropped:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", default=SCENARIOS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--busy", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with process_group() as device:
        for scenario in given.scenarios:
            measure(scenario, given.steps, os.cpu_count() if given.busy else 0, device)
