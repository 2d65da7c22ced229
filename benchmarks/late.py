"""What a late step costs beyond its deadline: from the moment at which a rank is late to that at which the step ends.

python benchmarks/late.py                           # four and eight ranks of this machine, about two minutes

The ranks' work is sleep, so that a few cores suffice; the last rank takes three times as long. It is late either when
its deadline is over, as a quorum has waited for long, or when a quorum has finished, as its deadline was over before:
it then has to learn of that, through the job's store. All clocks are this machine's monotonic one.
"""

import argparse
import math
import statistics
import time

import torch
import torch.distributed as dist
from chaos import Net

from straggle import FixedDeadline, LateHandling, StagedDataParallel
from straggle.backward.hooks import DeadlineReached
from straggle.lab.local_ranks import run_on_ranks
from straggle.lab.process_group import gather
from straggle.report import text_table

DEPTH, WIDTH = 64, 16
SKIP = 5  # steps of warm-up


def kinds(options, ranks):
    """Of each kind of step: deadline, how much slower the last rank is, and how many ranks are a quorum."""
    return {
        "no rank late": (1000.0, 1.0, None),
        "late as the deadline is over": (1.6 * options.compute_s, 3.0, None),
        "late as a quorum has finished": (0.5 * options.compute_s, 3.0, ranks - 1),
    }


def step_times(model, x):
    """When the rank entered the step, finished its work (or was stopped) and left; and whether it finished."""
    entered_at, finished = time.monotonic(), True
    with model.step():
        try:
            model(x).square().mean().backward()
        except DeadlineReached:
            finished = False
            raise
        finally:
            done_at = time.monotonic()
    return entered_at, done_at, time.monotonic(), finished


def run(rank, options):
    """For each kind, each rank's `step_times` of every step; beside it the seconds of requests to the job's store."""
    results, size = {}, dist.get_world_size()
    for name, (deadline_s, slower, quorum) in kinds(options, size).items():
        torch.manual_seed(0)
        factor = slower if rank == size - 1 else 1.0
        net = Net(depth=DEPTH, width=WIDTH, compute_s=factor * options.compute_s)
        handling = LateHandling(quorum=quorum, grace_s=0.2)
        model = StagedDataParallel(net, deadline=FixedDeadline(deadline_s), late_handling=handling)
        x = torch.randn(4, WIDTH)
        results[name] = [step_times(model, x) for _ in range(SKIP + options.steps)][SKIP:]
        model.close()
    return gather((results, request_times(options.steps)))


def request_times(number):
    """Seconds of one request to the job's store, while all ranks ask."""
    store, seconds = dist.distributed_c10d._get_default_store(), []
    dist.barrier()
    for _ in range(number):
        began = time.monotonic()
        store.add("late/probe", 1)
        seconds.append(time.monotonic() - began)
        time.sleep(0.005)
    return seconds


def in_parts(steps, deadline_s, quorum):
    """Of one step, each rank's times: seconds from being late to stopping (NaN: no rank was), and to the end from then.

    A step in which the last rank's work was not stopped, where it should have been, gives ``None``.
    """
    entered_at, done_at, left_at, finished = zip(*steps, strict=True)
    late_rank = len(steps) - 1
    if math.isinf(deadline_s):
        stopped_s = math.nan
    elif finished[late_rank]:
        return None
    else:
        quorum_at = sorted(at for at, own in zip(done_at, finished, strict=True) if own)[quorum - 1]
        stopped_s = done_at[late_rank] - max(entered_at[late_rank] + deadline_s, quorum_at)
    return stopped_s, statistics.median(left_at) - max(done_at)


def spread(seconds):
    low, middle, high = statistics.quantiles(seconds, n=4)
    return f"{1e3 * middle:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})"


def rows_of(ranks, results, options):
    requests = [seconds for _, own in results for seconds in own]
    for name, (deadline_s, slower, quorum) in kinds(options, ranks).items():
        per_step = list(zip(*(times[name] for times, _ in results), strict=True))
        wanted_s = deadline_s if slower > 1 else math.inf
        parts = [in_parts(step, wanted_s, quorum or -(-ranks // 2)) for step in per_step]
        seen = [part for part in parts if part is not None]
        stop = spread([part[0] for part in seen]) if slower > 1 else ""
        merge = spread([part[1] for part in seen])
        yield str(ranks), name, stop, merge, spread(requests), f"{len(seen)} of {len(parts)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--compute-s", type=float, default=0.15)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    rows = [("ranks", "step", "late to stopped, ms", "last work to end, ms", "a request to the store, ms", "steps")]
    for ranks in options.ranks:
        rows += rows_of(ranks, run_on_ranks(run, ranks, options)[0], options)
    print(text_table(rows))


if __name__ == "__main__":
    main()
