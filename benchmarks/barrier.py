"""What tells every member that all have the gradients: gloo's barrier, beside a small allreduce, in turns.

OMP_NUM_THREADS=1 python benchmarks/barrier.py                        # 2 and 4 ranks, less than a minute
OMP_NUM_THREADS=1 python benchmarks/barrier.py --ranks 8 --turns 500

The allreduce is as large as the telemetry of these ranks. Times are from the launch to the end, on rank 0; CPU is of
all threads of its process.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

from straggle.lab.local_ranks import run_on_ranks
from straggle.merge.groups import GlooCollectives, gloo_group
from straggle.merge.telemetry import row_length
from straggle.report import text_table

STAGES, WARMUP = 8, 10


def measure(rank, turns):
    """For each way its seconds, and its CPU seconds, of every turn."""
    store = dist.PrefixStore("barrier", dist.distributed_c10d._get_default_store())
    group = GlooCollectives(gloo_group(store, rank, dist.get_world_size(), 60.0))
    telemetry = torch.zeros(dist.get_world_size() * row_length(STAGES))
    ways = {"allreduce": lambda: group.all_reduce(telemetry), "barrier": group.barrier}
    found = {name: [] for name in ways}
    for _ in range(WARMUP + turns):
        for name, launch in ways.items():
            began = time.perf_counter(), time.process_time()
            launch().wait()
            found[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return {name: list(zip(*times[WARMUP:], strict=True)) for name, times in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--turns", type=int, default=300)
    options = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    rows = [("ranks", "", "median", "fastest tenth", "CPU of a rank, mean")]
    for ranks in options.ranks:
        for name, (seconds, cpu_s) in run_on_ranks(measure, ranks, options.turns)[0].items():
            tenth, median = statistics.quantiles(seconds, n=10)[0], statistics.median(seconds)
            numbers = (f"{1e6 * value:.0f} us" for value in (median, tenth, statistics.fmean(cpu_s)))
            rows.append((str(ranks), name, *numbers))
    print(text_table(rows))


if __name__ == "__main__":
    main()
