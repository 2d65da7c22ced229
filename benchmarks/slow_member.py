"""A member whose link is slow for a while: put out and let in again, beside one for which the others wait.

OMP_NUM_THREADS=1 SLOWNET=path/to/slownet.py python benchmarks/slow_member.py
OMP_NUM_THREADS=1 SLOWNET=path/to/slownet.py python benchmarks/slow_member.py --cases half --ways "put out" --log

Four ranks in network namespaces of this machine, with about 5.1 MB of gradients and some work a step that sleeps. From
step 30 on the last rank's link is slow, and later it is back. Both ways take turns, each a job of its own. Medians over
turns, with the least and the most. "Step" is over the median step before. "Gradients" are ranks' gradients per second,
over those before: all of the time for which the link is slow, and its last half. Needs root. Parameters are compared at
the end of each turn.
"""

import argparse
import contextlib
import logging
import math
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from namespaces import Slow, Unavailable, hosts, options_of
from network import LAYERS, MTU, NETWORK, ONE, RANKS, WIDTH, digest_of, join
from sleeping import sleeping_net

import straggle
from straggle.lab.local_ranks import run_on_ranks
from straggle.report import text_table

SLOW_FROM, AFTER = 30, 60  # the first slow step, and steps after the last
WAYS = {"put out": straggle.Elastic(), "waited for": straggle.Elastic(absence_gain=math.inf)}


@dataclass(frozen=True)
class Case:
    """The slow link, the rate of all others (0: no limit), seconds of work a step, and for how many it is slow."""

    slow: dict
    normal_bytes_per_s: float = 0.0
    work_s: float = 0.1
    steps: int = 40


CASES = {
    "1MB/s": Case({"bytes_per_s": 1e6}, steps=20),
    "1MB/s-of-20": Case({"bytes_per_s": 1e6}, 20e6, steps=20),
    "half": Case({"bytes_per_s": 10e6}, 20e6),
    "half-1s-of-work": Case({"bytes_per_s": 10e6}, 20e6, work_s=1.0),
    "50ms": Case({"delay_s": 0.05}),
}


def train(rank, names, case, way, slow_file, log):
    """Each step's seconds, whether the slow rank was out, and what it and all gave; the parameters."""
    if log:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    join(rank, names)
    torch.manual_seed(0)
    model = straggle.StagedDataParallel(sleeping_net(WIDTH, LAYERS, case.work_s), members=WAYS[way])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.register_state(optimizer=optimizer)
    steps, slow_to = [], SLOW_FROM + case.steps
    for number in range(slow_to + AFTER):
        if rank == 0 and number in (SLOW_FROM, slow_to):
            Path(slow_file).touch() if number == SLOW_FROM else Path(slow_file).unlink()
        began = time.perf_counter()
        with model.step():
            model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ranks = model.last_report.ranks
        given = sum(own.reach for own in ranks)
        steps.append((time.perf_counter() - began, ranks[ONE].absent, ranks[ONE].reach, given))
    digest = digest_of(model)
    model.close()
    return steps, digest


def turn(case, way, options):
    """The numbers of one job."""
    with contextlib.ExitStack() as stack:
        slow_file = str(Path(stack.enter_context(tempfile.TemporaryDirectory()), "slow"))
        normal = case.normal_bytes_per_s
        slow = Slow(**case.slow, while_file=slow_file, normal_bytes_per_s=normal)
        links = {ONE: slow, **({None: Slow(bytes_per_s=normal)} if normal else {})}
        where = {"network": NETWORK, "prefix": "sm", "niceness": -10}
        names = stack.enter_context(hosts(RANKS, links, forwarder=options.slownet, mtu=MTU, **where))
        results = run_on_ranks(train, RANKS, names, case, way, slow_file, options.log)
    if len({digest for _, digest in results}) > 1:
        raise RuntimeError("the replicas are not the same")
    return numbers_of(results[0][0], SLOW_FROM + case.steps)


def numbers_of(steps, slow_to):
    def median(some):
        return statistics.median(seconds for seconds, *_ in some)

    def rate(some):
        return sum(given for *_, given in some) / sum(seconds for seconds, *_ in some)

    before, slow = steps[5:SLOW_FROM], steps[SLOW_FROM:slow_to]
    out = [number for number, (_, absent, *_) in enumerate(steps) if absent]
    back = (number for number in range(slow_to, len(steps)) if not steps[number][1] and steps[number][2] == 1.0)
    return {
        "step before, ms": 1e3 * median(before),
        "step in the first 20": median(slow[:20]) / median(before),
        "out after": out[0] - SLOW_FROM if out else math.nan,
        "step while it is out": median([steps[number] for number in out]) / median(before) if out else math.nan,
        "gradients": rate(slow) / rate(before),
        "in the last half": rate(slow[len(slow) // 2 :]) / rate(before),
        "longest step, s": max(seconds for seconds, *_ in slow),
        "back after": next(back, math.inf) - slow_to if out else math.nan,
    }


def spread(values):
    middle, least, most = (f"{value:.{0 if value > 9 else 2}f}" for value in map(float, of_three(values)))
    return "" if middle == "nan" else middle if least == most else f"{middle} ({least} to {most})"


def of_three(values):
    return statistics.median(values), min(values), max(values)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--log", action="store_true", help="what the ranks log")
    options = options_of(parser)
    rows, draw = [], random.Random(0)
    for name in options.cases:
        found = {way: [] for way in options.ways}
        for number in range(options.turns):
            for way in draw.sample(options.ways, len(options.ways)):
                try:
                    found[way].append(turn(CASES[name], way, options))
                except Unavailable as why:
                    sys.exit(f"skipped, {why}")
                print(f"{name}, {way}, turn {number}: {found[way][-1]}", flush=True)
        for way, turns in found.items():
            columns = {column: spread([own[column] for own in turns]) for column in turns[0]}
            rows = rows or [("link", "way", *columns)]
            rows.append((name, way, *columns.values()))
    print(text_table(rows))


if __name__ == "__main__":
    main()
