"""What a rank costs that is stalled now and then, under each deadline: mean step over that without a stall.

python benchmarks/clock.py                          # six ranks of this machine, about four minutes

The ranks' work is sleep, so that a few cores suffice. In every ``--every`` steps rank 1 is stalled once for 0.5 to 2
steps, in its data, forward or backward time. A turn of each deadline has a turn without stalls beside it.
"""

import argparse
import random
import statistics
import time

import torch
import torch.distributed as dist
from chaos import Loop, Net, digest

from straggle import AutoDeadline, LateHandling, QuantileDeadline, StagedDataParallel, WaitForAll
from straggle.lab.jobs import gather
from straggle.lab.local_ranks import run_on_ranks
from straggle.report import text_table

STALLED = 1
PLACES = ("data", "forward", "backward")


def policies():
    return {
        "WaitForAll()": WaitForAll(),
        "QuantileDeadline(0.5, slack=1.02)": QuantileDeadline(0.5, slack=1.02),
        "QuantileDeadline(0.5, slack=1.1)": QuantileDeadline(0.5, slack=1.1),
        "AutoDeadline()": AutoDeadline(),
    }


def draw_stalls(seed, options, num_blocks):
    """Step, place, block and seconds of each stall."""
    draw = random.Random(seed)
    return {
        first + draw.randrange(options.every // 2): (
            draw.choice(PLACES),
            draw.randrange(num_blocks),
            draw.uniform(0.5, 2.0) * options.compute_s,
        )
        for first in range(0, options.steps, options.every)
    }


def run(rank, options):
    """For each deadline: seconds with and without stalls, the stalled rank's gradients, its longest step, a digest."""
    results, handling = {}, LateHandling(grace_s=options.grace_s)
    for name, policy in policies().items():
        torch.manual_seed(0)
        net = Net(compute_s=options.compute_s)
        loop = Loop(net, StagedDataParallel(net, deadline=policy, late_handling=handling), rank)
        for _ in range(15):  # the policies learn
            loop.step()
        seconds, reach, longest_s = {"stalled": 0.0, "free": 0.0}, [], 0.0
        for turn in range(options.turns):
            for kind in seconds:
                stalls = draw_stalls(turn, options, len(net)) if kind == "stalled" and rank == STALLED else {}
                dist.barrier()
                began = before = time.monotonic()
                for step in range(options.steps):
                    loop.step(*stalls.get(step, ()))
                    now = time.monotonic()
                    if kind == "stalled":
                        reach.append(loop.model.last_report.ranks[STALLED].reach)
                        longest_s = max(longest_s, now - before)
                    before = now
                seconds[kind] += time.monotonic() - began
        results[name] = (seconds["stalled"], seconds["free"], statistics.mean(reach), longest_s, digest(net))
        loop.model.close()
    return gather(results)


def print_results(ranks, options):
    steps = options.turns * options.steps
    rows = [("deadline", "step, no stall", "mean step over it", "rank's gradients", "longest step over it", "alike")]
    for name in policies():
        of_ranks = [results[name] for results in ranks]
        stalled, free = (max(result[column] for result in of_ranks) / steps for column in (0, 1))
        peers_s = max(result[3] for rank, result in enumerate(of_ranks) if rank != STALLED)
        alike = len({result[4] for result in of_ranks}) == 1
        kept = f"{of_ranks[0][2]:.3f}"
        rows.append((name, f"{1000 * free:.0f} ms", f"{stalled / free:.3f}", kept, f"{peers_s / free:.2f}", str(alike)))
    print(text_table(rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=6)
    parser.add_argument("--compute-s", type=float, default=0.3)
    parser.add_argument("--grace-s", type=float, default=0.01)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    print_results(run_on_ranks(run, options.ranks, options)[0], options)


if __name__ == "__main__":
    main()
