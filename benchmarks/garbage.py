"""What collecting garbage together is worth, on a model that makes garbage: the same steps two ways, in turns.

torchrun --standalone --nproc-per-node 4 benchmarks/garbage.py
torchrun --standalone --nproc-per-node 8 benchmarks/garbage.py --runs 7

A rank holds ``--held`` dictionaries, as of a tokenizer or an index, and each step makes ``--made`` more that refer to
themselves and are let go 20 steps later. Python then collects all of them about every ``held / 4 / made`` steps, on
each rank in steps of its own. ``--every`` is how often they are collected together. Steps sleep, so that ranks which
share few cores do not contend for more than the collections.
"""

import argparse
import gc
import os
import statistics
import time
from collections import deque

import torch
import torch.distributed as dist
from paired import median_ratio
from torch import nn

import straggle
from straggle.lab.jobs import process_group
from straggle.observe.console import print_table


def cyclic():
    """A dictionary that only a collection frees."""
    made = {}
    made["self"] = made
    return made


class Loop:
    """A training loop that makes garbage."""

    def __init__(self, arguments):
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        self.model = straggle.StagedDataParallel(self.net)
        self.sleep_s, self.made = arguments.step_ms / 1e3, arguments.made
        self.x = torch.randn(8, 64)
        self.held = [{"number": number, "more": []} for number in range(arguments.held // 2)]
        # each rank is elsewhere between two collections of its own
        self.recent = deque([[cyclic() for _ in range(1 + dist.get_rank() * arguments.made // 4)]], maxlen=20)

    def steps(self, number):
        """Seconds of each of so many steps."""
        seconds = []
        for _ in range(number):
            began_at = time.perf_counter()
            with self.model.step():
                self.recent.append([cyclic() for _ in range(self.made)])
                time.sleep(self.sleep_s)
                self.model(self.x).square().mean().backward()
            seconds.append(time.perf_counter() - began_at)
        return seconds


def in_turns(arguments):
    """Mean seconds of a step in each run, by way, and what the collections took."""
    loop = Loop(arguments)
    loop.steps(50)
    ways, collections = {"Python decides": [], "together": []}, []
    for _ in range(arguments.runs):
        ways["Python decides"].append(statistics.fmean(loop.steps(arguments.steps)))
        garbage = straggle.CollectGarbage(loop.model, every=arguments.every)
        loop.steps(2 * arguments.every)  # the two collections with which it begins
        ways["together"].append(statistics.fmean(loop.steps(arguments.steps)))
        collections.append(garbage.seconds / garbage.count)
        garbage.close()
        gc.collect()
    return ways, collections


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150, help="of each turn")
    parser.add_argument("--every", type=int, default=25, help="steps between two collections together")
    parser.add_argument("--held", type=int, default=200_000)
    parser.add_argument("--made", type=int, default=2_000)
    parser.add_argument("--step-ms", type=float, default=50.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with process_group():
        ways, collections = in_turns(arguments)
        if dist.get_rank() == 0:
            ratio, quartiles = median_ratio(ways["together"], ways["Python decides"])
            print_table(
                f"{dist.get_world_size()} ranks",
                ["garbage", "step, median of runs", "least", "most"],
                [
                    [name, *(f"{1e3 * s:.1f} ms" for s in (statistics.median(runs), min(runs), max(runs)))]
                    for name, runs in ways.items()
                ],
            )
            print(f"together, over what Python decides: {ratio} ({quartiles})")
            print(f"a collection of rank 0 took {1e3 * statistics.median(collections):.1f} ms")


if __name__ == "__main__":
    main()
