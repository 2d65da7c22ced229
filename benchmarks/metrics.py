"""What metrics cost: the training thread's part, the thread behind it, and step times with and without, in turns.

python benchmarks/metrics.py                                                     # one rank
torchrun --standalone --nproc-per-node 2 benchmarks/metrics.py --rounds 60 --width 512
"""

import argparse
import statistics
import time
import urllib.request

import torch
import torch.distributed as dist
from paired import median_ratio
from torch import nn

import straggle
from straggle.lab.jobs import process_group
from straggle.merge.step_record import StepRecord
from straggle.merge.table import Table
from straggle.observe.metrics import MetricsExporter, StepMetrics

STEPS = 10  # in a turn


def micros(seconds):
    """The median in microseconds, and the 99th percentile."""
    return (
        f"{1e6 * statistics.median(seconds):.1f} us, 99 % below {1e6 * statistics.quantiles(seconds, n=100)[98]:.1f} us"
    )


def timed(function, *arguments):
    begin = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin


def of_many_ranks(record, world_size):
    """The same step, had ``world_size`` ranks made it."""
    rows = record.table.rows
    tiled = Table(rows.repeat(-(-world_size // len(rows)), 1)[:world_size], len(record.plan.stages))
    return StepRecord(record.step, record.seconds, record.deadline_s, record.plan, tiled, record.names)


def measure(rounds, width):
    module = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(width, width), nn.Tanh())))
    model = straggle.StagedDataParallel(module, deadline=60.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(32, width)
    exporter = MetricsExporter(model)
    exporter._hook.remove()
    hook_s, records, turns = [], [], {False: [], True: []}

    def watched(record):
        begin = time.perf_counter()
        exporter._records.put(
            StepRecord(record.step, record.seconds, record.deadline_s, record.plan, record.table, record.names)
        )
        hook_s.append(time.perf_counter() - begin)
        records.append(record)

    def turn():
        for _ in range(STEPS):
            with model.step() as step:
                loss = model(x).square().mean()
                step.log(loss=loss)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    turn()
    for number in range(rounds):
        for on in (number % 2 == 0, number % 2 == 1):  # in turns, and each first in every other round
            handle = model.register_step_hook(watched) if on else None
            dist.barrier()
            turns[on].append(timed(turn) / STEPS)
            if handle is not None:
                handle.remove()
    if dist.get_rank() == 0:
        report(model, exporter, hook_s, records, turns)
    dist.barrier()
    exporter.close()
    model.close()


def report(model, exporter, hook_s, records, turns):
    rows = len(records[-1].plan.stages)
    print(f"{dist.get_world_size()} ranks, {rows} stages, {len(records)} steps with and without metrics")
    print(f"  training thread, each step:  {micros(hook_s)}")
    for world_size in (dist.get_world_size(), 8, 64):
        metrics = StepMetrics(model, samples_per_step=32)
        seconds = [timed(metrics.observe, of_many_ranks(record, world_size)) for record in records]
        print(f"  thread behind, {world_size:3} ranks:    {micros(seconds)}")
    scrapes = [timed(lambda: urllib.request.urlopen(exporter.url).read()) for _ in range(100)]
    print(f"  a scrape:                    {micros(scrapes)}")
    with_s, without_s = (statistics.median(turns[on]) for on in (True, False))
    ratio, quartiles = median_ratio(turns[True], turns[False])
    print(
        f"  step: {1e3 * with_s:.2f} ms with, {1e3 * without_s:.2f} ms without, "
        f"ratio of medians {with_s / without_s:.3f}, "
        f"median of ratios {ratio} (quartiles {quartiles})"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--width", type=int, default=512)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with process_group():
        measure(arguments.rounds, arguments.width)
