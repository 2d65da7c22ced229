"""A member whose link is narrow for a while: what its peers' steps take, and when it takes part again.

OMP_NUM_THREADS=1 SLOWNET=path/to/slownet.py python benchmarks/slow_member.py
OMP_NUM_THREADS=1 SLOWNET=path/to/slownet.py python benchmarks/slow_member.py --normal-mb-per-s 20 --slow-mb-per-s 10

Four ranks in network namespaces of this machine, with about 5.1 MB of gradients and 0.1 s of work a step that sleeps.
From step 40 on the last rank's link carries 1 MB/s each way, and in step 100 it is back (or other rates, and steps).
Needs root. Parameters are compared at the end, unless the link is not back by then.
"""

import argparse
import contextlib
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from namespaces import Slow, Unavailable, hosts, options_of
from network import LAYERS, MTU, NETWORK, ONE, RANKS, WIDTH, WORK_S, digest_of, join
from sleeping import sleeping_net

import straggle
from straggle.lab.local_ranks import run_on_ranks

SLOW_FROM, STEPS = 40, 160


def train(rank, names, slow_file, options):
    """Each step's seconds, where the slow rank was, and what it gave; how the members changed; the parameters."""
    if options["log"]:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    join(rank, names)
    torch.manual_seed(0)
    net = sleeping_net(WIDTH, LAYERS, WORK_S)
    model = straggle.StagedDataParallel(net, members=straggle.Elastic(link_gain=options["link_gain"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.register_state(optimizer=optimizer)
    changes, steps = [], []
    model.register_members_hook(lambda report: changes.append((report.step, str(report))))
    for number in range(STEPS):
        if rank == 0 and number in (SLOW_FROM, options["slow_to"]):
            Path(slow_file).touch() if number == SLOW_FROM else Path(slow_file).unlink()
        began = time.perf_counter()
        with model.step():
            model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        own = model.last_report.ranks[ONE]
        steps.append((time.perf_counter() - began, own.absent, own.reach))
    digest = digest_of(model)
    model.close()
    return {"steps": steps, "changes": changes, "digest": digest}


def measured(options):
    with contextlib.ExitStack() as stack:
        slow_file = str(Path(stack.enter_context(tempfile.TemporaryDirectory()), "slow"))
        normal = 1e6 * options.normal_mb_per_s
        slow = Slow(bytes_per_s=1e6 * options.slow_mb_per_s, while_file=slow_file, normal_bytes_per_s=normal)
        links = {ONE: slow, **({None: Slow(bytes_per_s=normal)} if normal else {})}
        made = hosts(RANKS, links, forwarder=options.slownet, mtu=MTU, network=NETWORK, prefix="lf")
        return run_on_ranks(train, RANKS, stack.enter_context(made), slow_file, vars(options))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--normal-mb-per-s", type=float, default=0.0, help="of all links (default: no limit)")
    parser.add_argument("--slow-mb-per-s", type=float, default=1.0, help="of the last rank's link, for a while")
    parser.add_argument("--link-gain", type=float, default=1.1, help="of Elastic (inf: the rank stays a member)")
    parser.add_argument("--slow-to", type=int, default=100, help="step from which on the link is back")
    parser.add_argument("--log", action="store_true", help="what the ranks log")
    options = options_of(parser)
    try:
        results = measured(options)
    except Unavailable as why:
        sys.exit(f"skipped, {why}")
    steps, slow_to = results[0]["steps"], min(options.slow_to, STEPS)
    if len({own["digest"] for own in results}) > 1 and slow_to < STEPS:
        sys.exit("the replicas are not the same")
    for number, what in results[0]["changes"]:
        print(f"step {number}: {what}")
    before = statistics.median(seconds for seconds, _, _ in steps[5:SLOW_FROM])
    back = next((number for number in range(slow_to, STEPS) if steps[number][1:] == (False, 1.0)), STEPS)
    print(f"median step before: {1e3 * before:.0f} ms; the others in turn as ratios to that")
    for words, begin, end in (
        ("the first 20 steps with the narrow link", SLOW_FROM, SLOW_FROM + 20),
        ("the next 20 steps", SLOW_FROM + 20, SLOW_FROM + 40),
        ("the next ones until the link is back", SLOW_FROM + 40, slow_to),
        ("from when the link is back until the rank takes part", slow_to, back),
        ("after that", back, STEPS),
    ):
        if not (seconds := [own for own, _, _ in steps[begin:end]]):
            continue
        median, longest = statistics.median(seconds) / before, max(seconds)
        print(f"{words}: {median:.2f}, {sum(seconds):.1f} s together, the longest {longest:.2f} s")
    if out := [number for number, (_, absent, _) in enumerate(steps) if absent]:
        usual = statistics.median(steps[number][0] for number in out) / before
        print(f"out in {len(out)} steps, {out[0]} to {out[-1]}: {usual:.2f}")
    if back < STEPS:
        print(f"a member again with all of its gradients {back - slow_to} steps after its link is back")


if __name__ == "__main__":
    main()
