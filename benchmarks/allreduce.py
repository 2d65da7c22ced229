"""What an allreduce takes by itself, from the moment at which the last rank comes to it: gloo, ranks of this machine.

python benchmarks/allreduce.py                          # 4 and 8 ranks, 4 KB
python benchmarks/allreduce.py --ranks 2 --elements 1000000

To be held against what a step takes beside its slowest rank's work, which `experiments E4` reports.
"""

import argparse
import time

import torch
import torch.distributed as dist

from straggle.lab.local_ranks import run_on_ranks

PERIOD_S = 0.1
LAST_S = 0.03  # after the others


def measure(rank, options, ranks, seconds):
    """All but the last rank come at the begin of a period."""
    numbers = torch.ones(options.elements)
    begin = [time.monotonic() + PERIOD_S]  # one machine, one clock
    dist.broadcast_object_list(begin, 0)
    for period in range(options.rounds):
        last_at = begin[0] + PERIOD_S * period + LAST_S
        own_at = last_at if rank == ranks - 1 else last_at - LAST_S
        time.sleep(max(0.0, own_at - time.monotonic()))
        dist.all_reduce(numbers)
        if rank == 0:
            seconds[period] = time.monotonic() - last_at


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--elements", type=int, default=1000, help="of four bytes")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    print("| ranks | elements | median, ms | quartiles |\n| --- | --- | --- | --- |")
    for ranks in options.ranks:
        seconds = torch.zeros(options.rounds).share_memory_()
        run_on_ranks(measure, ranks, options, ranks, seconds)
        low, middle, high = (1e3 * seconds[5:]).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        print(f"| {ranks} | {options.elements} | {middle:.1f} | {low:.1f} to {high:.1f} |", flush=True)


if __name__ == "__main__":
    main()
