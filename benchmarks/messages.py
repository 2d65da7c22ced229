"""What the messages of a step cost: measured beside DDP's, and as `straggle.policies.merge_time` predicts it.

OMP_NUM_THREADS=1 SLOWNET=path/to/slownet.py python benchmarks/messages.py --cases two-50ms-large four-50ms-large
OMP_NUM_THREADS=1 SLOWNET=path/to/slownet.py python benchmarks/messages.py --alone

Ranks in network namespaces of this machine, which needs root. Work sleeps, and the ways take turns in one job.
``uncut``: straggle with each bucket in one message, however large. ``predicted``: the step by the model, from the links
that were made, without what the ranks and the forwarder of these namespaces compute. ``--alone``: some equal messages
of four ranks at a time, and nothing else: seconds until the last one is merged.
"""

import argparse
import contextlib
import math
import random
import statistics
import sys
import tempfile
import time
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from message_plans import joined
from namespaces import Slow, Unavailable, enter, hosts, options_of
from network import check_replicas
from paired import median_ratio
from sleeping import sleeping_net
from torch.nn.parallel import DistributedDataParallel

import straggle
from straggle.backward.stages import plan_stages
from straggle.lab.local_ranks import run_on_ranks
from straggle.merge import buffers
from straggle.merge.groups import gloo_group
from straggle.policies.links import Link
from straggle.policies.merge_time import MESSAGES_AT_A_TIME, Message, largest_message_bytes, merged_at
from straggle.report import text_table

MB = 2**20
LAYERS = 15  # and one
WORK_S = 0.3
MTU = 9000
WAYS = ("DDP", "uncut", "straggle")


@dataclass(frozen=True)
class Case:
    """``megabytes`` of gradients on so many ranks, all of whose links are ``slow``; turns of each way, and steps.

    ``large``: megabytes of them in one layer, the first one. ``slow`` is ``None`` without namespaces.
    """

    ranks: int
    megabytes: int
    slow: Slow | None
    large: int = 0
    turns: int = 3
    steps: int = 2


CASES = {
    "two-loopback": Case(2, 100, None, turns=6, steps=4),
    "four-loopback": Case(4, 100, None, turns=6, steps=4),
    "two-50ms": Case(2, 40, Slow(delay_s=0.05)),
    "two-50ms-large": Case(2, 40, Slow(delay_s=0.05), large=20),
    "four-50ms-large": Case(4, 40, Slow(delay_s=0.05), large=20),
}


class Large(torch.nn.Module):
    """As many parameters as an embedding has, all with a gradient, which backward finishes last."""

    def __init__(self, megabytes):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(megabytes * MB // 4))

    def forward(self, x):
        return x + self.weight.mean()


def net(case):
    width = int(((case.megabytes - case.large) * MB / 4 / (LAYERS + 1)) ** 0.5)
    layers = sleeping_net(width, LAYERS, WORK_S)
    return (torch.nn.Sequential(Large(case.large), *layers) if case.large else layers), width


def uncut(_):
    return sys.maxsize


class Way:
    """One way of training, and the seconds of its steps."""

    def __init__(self, name, case):
        torch.manual_seed(0)
        module, self.width = net(case)
        self.name, self.is_ddp = name, name == "DDP"
        self.uses = uncut if name == "uncut" else largest_message_bytes
        buffers.largest_message_bytes = self.uses
        wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
        self.model = wrapped if self.is_ddp else straggle.StagedDataParallel(module)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.seconds = []

    def step(self):
        buffers.largest_message_bytes = self.uses  # asked for when buffers are made
        began = time.perf_counter()
        with contextlib.nullcontext() if self.is_ddp else self.model.step():
            self.model(torch.randn(2, self.width)).square().mean().backward()
        seconds = time.perf_counter() - began
        self.optimizer.step()
        self.optimizer.zero_grad()
        return seconds

    def turn(self, steps):
        dist.barrier()
        self.step()
        self.seconds.append(statistics.median(self.step() for _ in range(steps)))


def measure(rank, case, names, folder):
    if names:
        dist.destroy_process_group()
        enter(names[rank])
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store"), rank=rank, world_size=case.ranks)
    ways = [Way(name, case) for name in WAYS]
    for way in ways:
        for _ in range(3):
            way.step()
    draw = random.Random(0)
    for number in range(case.turns):
        for way in draw.sample(ways, len(ways)):
            way.turn(case.steps)
            check_replicas(way.model, f"{way.name}, turn {number}")
    return {way.name: way.seconds for way in ways}


def predicted_s(case, way):
    """A step by the model: until its last message is merged."""
    module = net(case)[0]
    sizes = [stage.nbytes for stage in plan_stages(module, len(module)).stages]
    ready = [WORK_S / 3 + 2 / 3 * WORK_S * min(1.0, number / LAYERS) for number in range(len(sizes))]
    if way == "DDP":
        counts = joined(sizes, [1] * len(sizes), [MB, 25 * MB])
    else:
        ends = list(accumulate(sum(stage.nbytes for stage in bucket) for bucket in plan_stages(module).buckets()))
        reached = [bisect_left(ends, end) for end in accumulate(sizes)]  # in which bucket each layer is
        counts = [reached.count(bucket) for bucket in range(len(ends))]
    messages, end = [], 0
    for count in counts:
        end += count
        num_bytes = sum(sizes[end - count : end])
        parts = math.ceil(num_bytes / largest_message_bytes(case.ranks)) if way == "straggle" else 1
        messages += [Message(num_bytes / parts, ready[end - 1])] * parts
    links = [Link(case.slow.delay_s, case.slow.bytes_per_s or math.inf)] * case.ranks
    return max(merged_at(messages, links, at_a_time=2 if way == "DDP" else MESSAGES_AT_A_TIME))


def measured(case, options):
    with contextlib.ExitStack() as stack:
        folder, names = stack.enter_context(tempfile.TemporaryDirectory()), None
        if case.slow is not None:
            made = hosts(case.ranks, {None: case.slow}, forwarder=options.slownet, mtu=MTU)
            names = stack.enter_context(made)
        return run_on_ranks(measure, case.ranks, case, names, folder)[0]


ALONE = [(1e-4, 1), (1, 1), (8, 1), (16, 1), (32, 1), (4, 8), (8, 4)]  # megabytes of each, and how many
ALONE_RANKS = 4
ALONE_LINKS = (Slow(delay_s=0.02), Slow(delay_s=0.02, bytes_per_s=20e6))


def measure_alone(rank, names, folder):
    dist.destroy_process_group()
    enter(names[rank])
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store"), rank=rank, world_size=ALONE_RANKS)
    group = gloo_group(dist.FileStore(f"{folder}/messages"), rank, ALONE_RANKS, 30.0)
    found = []
    for megabytes, count in ALONE:
        tensors, seconds = [torch.ones(int(megabytes * MB / 4)) for _ in range(count)], []
        for _ in range(4):
            group.barrier().wait()
            began = time.perf_counter()
            for work in [group.allreduce([tensor]) for tensor in tensors]:
                work.wait()
            seconds.append(time.perf_counter() - began)
        found.append(statistics.median(seconds[1:]))
    return found


def alone(options):
    rows = [("links", "messages", "measured, s", "predicted, s")]
    for slow in ALONE_LINKS:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            names = stack.enter_context(hosts(ALONE_RANKS, {None: slow}, forwarder=options.slownet, mtu=MTU))
            seconds = run_on_ranks(measure_alone, ALONE_RANKS, names, folder)[0]
        links = [Link(slow.delay_s, slow.bytes_per_s or math.inf)] * ALONE_RANKS
        words = f"{1000 * slow.delay_s:g} ms" + (f", {slow.bytes_per_s / 1e6:g} MB/s" if slow.bytes_per_s else "")
        for (megabytes, count), own_s in zip(ALONE, seconds, strict=True):
            predicted = max(merged_at([Message(megabytes * MB)] * count, links))
            rows.append((words, f"{count} of {megabytes:g} MB", f"{own_s:.3f}", f"{predicted:.3f}"))
    print(text_table(rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--alone", action="store_true", help="messages without anything else")
    options = options_of(parser)
    if options.alone:
        alone(options)
        return
    rows = [("case", "way", "step, ms", "over DDP", "over uncut", "predicted, ms")]
    for name in options.cases:
        case = CASES[name]
        try:
            found = measured(case, options)
        except Unavailable as why:
            print(f"{name}: skipped, {why}", flush=True)
            continue
        for way, seconds in found.items():
            ratios = ["{} ({})".format(*median_ratio(seconds, found[base])) for base in WAYS[:2]]
            predicted = f"{1000 * predicted_s(case, way):.0f}" if case.slow else ""
            rows.append((name, way, f"{1000 * statistics.median(seconds):.0f}", *ratios, predicted))
            print(*rows[-1], sep=" | ", flush=True)
    print(text_table(rows))


if __name__ == "__main__":
    main()
