"""Time to a loss where one rank's link is slow: beside DDP, and beside DDP of the three other ranks alone.

export OMP_NUM_THREADS=1 SLOWNET=path/to/slownet.py
python benchmarks/network_loss.py --cases half --data own --seeds 0 1       # one part, 5 to 8 minutes
python benchmarks/network_loss.py --cases one-1MB/s --data own --seeds 0    # one part
python benchmarks/network_loss.py --only-table                              # of the parts that were made

Four ranks in network namespaces, one of them with the slow link of that case of `network.py`. Handwritten digits, by
linear layers of 5.2 MB and 0.1 s of work a step that sleeps, as there; 8 samples of each rank a step. Each rank has a
quarter of the samples: a random one (alike), or of the samples sorted by their class (own), so that no other rank has
the slow rank's digits. The ways run one after the other over the same links, each as long as the others, in an order
that the seed draws. The loss is on held-out samples; its evaluation is not timed. Needs root.
"""

import argparse
import contextlib
import functools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from namespaces import Unavailable, hosts, options_of
from network import CASES, MTU, NETWORK, ONE, RANKS, agreed_end, join, tried_twice
from sleeping import Layer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import straggle
from straggle.lab.interleaved import seconds_to
from straggle.lab.local_ranks import run_on_ranks
from straggle.lab.workloads.digits import Digits
from straggle.report import text_table

WIDTH, LAYERS, WORK_S = 560, 4, 0.1
SAMPLES, RATE = 8, 1e-3
SECONDS = {"half": 45.0, "one-1MB/s": 100.0}  # of each way
TARGETS = {"half": (0.6, 0.4), "one-1MB/s": (1.0, 0.4)}
EVALUATE_S = 0.5  # between two evaluations, at least

WAYS = {
    "DDP": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
    "DDP of three": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
    "links": lambda module: straggle.StagedDataParallel(module, links=straggle.LinkPolicy()),
    "links, members": lambda module: straggle.StagedDataParallel(
        module, links=straggle.LinkPolicy(), members=straggle.Elastic()
    ),
}
DATA = ("alike", "own")


def digits_net(features, classes):
    layers = (Layer(WIDTH, WORK_S / LAYERS) for _ in range(LAYERS))
    return nn.Sequential(nn.Flatten(), nn.Linear(features, WIDTH), *layers, nn.Linear(WIDTH, classes))


def own_samples(workload, data, seed, rank):
    """The numbers of a rank's samples: a quarter of them all, by their class or at random."""
    classes = workload.training[1]
    order = classes.sort(stable=True).indices
    if data == "alike":
        order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))
    return order.tensor_split(RANKS)[rank]


def train(rank, names, way, data, seed, seconds, folder):
    """Seconds and losses of rank 0, the seconds of each step, and of the slow rank's gradients what came."""
    join(rank, names)
    workload = Digits()
    samples = own_samples(workload, data, seed, rank)
    torch.manual_seed(seed)
    module = digits_net(workload.training[0][0].numel(), 10)
    model = WAYS[way](module)
    is_staged = isinstance(model, straggle.StagedDataParallel)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
    if is_staged:
        model.register_state(optimizer=optimizer)
    draw = torch.Generator().manual_seed(RANKS * seed + rank)
    end = agreed_end(dist.FileStore(f"{folder}/end"), "end")
    passed_s, step_s, came, at_s, losses = 0.0, [], [], [], []
    number = 0
    with contextlib.suppress(straggle.JobDone):  # of a rank that is out when the others are done
        while number != end(number, passed_s > seconds):
            batch = workload.batch(samples[torch.randint(len(samples), (SAMPLES,), generator=draw)])
            began = time.perf_counter()
            with model.step() if is_staged else contextlib.nullcontext():
                workload.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            step_s.append(time.perf_counter() - began)
            passed_s += step_s[-1]
            number += 1
            came.append(model.last_report.ranks[ONE].reach if is_staged else float(len(names) == RANKS))
            if rank == 0 and passed_s - (at_s[-1] if at_s else -EVALUATE_S) >= EVALUATE_S:
                at_s.append(passed_s)
                losses.append(workload.evaluate(module)["loss"])
    if rank == 0:
        at_s.append(passed_s)
        losses.append(workload.evaluate(module)["loss"])
    if is_staged:
        model.close()
    return {"step_s": step_s, "came": came, "at_s": at_s, "losses": losses}


def run(case, data, seed, options):
    """For each way, what rank 0 has seen."""
    found, seconds = {}, options.seconds or SECONDS[case]
    for way in random.Random(seed).sample(options.ways, len(options.ways)):
        name = f"{case}, {data}, seed {seed}, {way}"
        found[way] = tried_twice(name, functools.partial(trained, case, way, data, seed, seconds, options.slownet))
        print(f"{name}: {len(found[way]['step_s'])} steps", flush=True)
    return found


def trained(case, way, data, seed, seconds, slownet):
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        made = hosts(RANKS, CASES[case].links, forwarder=slownet, mtu=MTU, network=NETWORK, prefix="nt")
        names = stack.enter_context(made)
        names = names[:ONE] if way == "DDP of three" else names
        return run_on_ranks(train, len(names), names, way, data, seed, seconds, folder)[0]


def table(case, data, runs):
    """Of all seeds: the median, and the least and the most."""
    targets = TARGETS[case]
    to_losses = (f"s to a loss of {target}" for target in targets)
    head = ("seeds", "steps", "median step, ms", "came", *to_losses, "loss at the end")
    rows = [(f"{case}, {data}", *head)]
    for way, ours in runs.items():
        if not ours:
            continue
        reached = [[seconds_to(own["losses"], own["at_s"], target) for own in ours] for target in targets]
        cells = [
            str(len(ours)),
            spread([len(own["step_s"]) for own in ours], "{:.0f}"),
            spread([1e3 * statistics.median(own["step_s"]) for own in ours], "{:.0f}"),
            spread([statistics.fmean(own["came"]) for own in ours], "{:.2f}"),
            *(spread([float("inf") if s is None else s for s in times], "{:.1f}") for times in reached),
            spread([own["losses"][-1] for own in ours], "{:.2f}"),
        ]
        rows.append((way, *cells))
    print(text_table(rows), flush=True)


def spread(values, form):
    middle, least, most = (form.format(v) for v in (statistics.median(values), min(values), max(values)))
    text = middle if least == most else f"{middle} ({least} to {most})"
    return text.replace("inf", "never")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(SECONDS), choices=list(SECONDS))
    parser.add_argument("--data", nargs="+", default=DATA, choices=DATA)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, help="of each way (default: by the case)")
    parser.add_argument("--folder", type=Path, default=Path("runs/network_loss"))
    parser.add_argument("--only-table", action="store_true", help="run nothing")
    options = options_of(parser)
    for case in options.cases:
        for data in options.data:
            folder = options.folder / case.replace("/", "-") / data
            for seed in () if options.only_table else options.seeds:
                try:
                    found = run(case, data, seed, options)
                except Unavailable as why:
                    sys.exit(f"skipped, {why}")
                for way, own in found.items():
                    (folder / way).mkdir(parents=True, exist_ok=True)
                    (folder / way / f"{seed}.json").write_text(json.dumps(own))
            runs = {way: [json.loads(p.read_text()) for p in sorted((folder / way).glob("*.json"))] for way in WAYS}
            table(case, data, runs)


if __name__ == "__main__":
    main()
