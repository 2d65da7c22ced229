"""What late ranks cost their peers under chaos; ranks are processes of this machine.

python benchmarks/chaos.py stall                     # one of 4 ranks sleeps 2 s every 10 steps: DDP, straggle in turns
python benchmarks/chaos.py long --steps 10000        # random stalls and NaNs: parameters, memory and counters
"""

import argparse
import contextlib
import hashlib
import math
import os
import random
import resource
import statistics
import time
from collections import Counter
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from straggle import FixedDeadline, LateHandling, StagedDataParallel
from straggle.lab.local_ranks import run_on_ranks
from straggle.lab.process_group import gather
from straggle.report import text_table

PLACES = ("data", "forward", "backward", "optimizer")


def digest(module):
    content = b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())
    return hashlib.sha256(content).hexdigest()[:12]


def quantile(values, q):
    return sorted(values)[min(len(values) - 1, math.floor(q * len(values)))]


# -- stalls


class Block(nn.Module):
    """A residual layer that sleeps for its work, and on demand once for longer, in its forward or backward pass."""

    def __init__(self, width, forward_s, backward_s):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.forward_s, self.backward_s = forward_s, backward_s
        self.stall = {"forward": 0.0, "backward": 0.0}

    def forward(self, x):
        time.sleep(self.forward_s + self.stall["forward"])
        y = x + torch.tanh(self.linear(x))
        y.register_hook(lambda _: time.sleep(self.backward_s + self.stall["backward"]))
        return y


class Net(nn.Sequential):
    def __init__(self, depth=8, width=64, compute_s=0.0):
        super().__init__(*(Block(width, 0.3 * compute_s / depth, 0.7 * compute_s / depth) for _ in range(depth)))

    def set_stall(self, place, index, seconds):
        """The next passes stall at this place of this block, or nowhere."""
        for number, block in enumerate(self):
            block.stall = dict.fromkeys(block.stall, 0.0)
            if number == index and place in block.stall:
                block.stall[place] = seconds


class Loop:
    """A training loop as users write it, which can be stalled anywhere."""

    def __init__(self, net, model, rank):
        self.net, self.model = net, model
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        self.generator = torch.Generator().manual_seed(rank)
        self.width = net[0].linear.in_features

    def step(self, place=None, block=0, seconds=0.0, bad=False):
        self.net.set_stall(place, block, seconds)
        x = torch.randn(16, self.width, generator=self.generator)
        if bad:
            x.fill_(math.nan)
        if place == "data":
            time.sleep(seconds)
        with self.model.step() if isinstance(self.model, StagedDataParallel) else contextlib.nullcontext():
            self.model(x).square().mean().backward()
        if place == "optimizer":
            time.sleep(seconds)
        self.optimizer.step()
        self.optimizer.zero_grad()


def draw_stalls(seed, num_steps, every, world_size, num_blocks):
    """For every ``every`` steps, which rank stalls, and in which place and block."""
    draw = random.Random(seed)
    return {
        step: (draw.randrange(world_size), draw.choice(PLACES), draw.randrange(num_blocks))
        for step in range(every // 2, num_steps, every)
    }


def stall(rank, options):
    """Turns of DDP and straggle, with the same stalls."""
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    nets = {"DDP": Net(compute_s=options.compute_s), "straggle": Net(compute_s=options.compute_s)}
    late_handling = LateHandling(max_lag=options.max_lag)
    staged = StagedDataParallel(nets["straggle"], deadline=options.deadline_s, late_handling=late_handling)
    models = {"DDP": DistributedDataParallel(nets["DDP"]), "straggle": staged}
    loops = {name: Loop(nets[name], models[name], rank) for name in models}
    for loop in loops.values():
        for _ in range(3):  # the stages are learned; DDP's buckets are built again
            loop.step()
    peers_s, turns_s, counts = {name: [] for name in models}, {name: [] for name in models}, Counter()
    for turn in range(options.turns):
        stalls = draw_stalls(turn, options.steps, options.every, world_size, len(nets["DDP"]))
        for name, loop in loops.items():
            dist.barrier()
            began = before = time.monotonic()
            for step in range(options.steps):
                sleeper, place, block = stalls.get(step, (-1, None, 0))
                loop.step(*((place, block, options.stall_s) if sleeper == rank else ()))
                now = time.monotonic()
                stood_in = name == "straggle" and staged.last_report.ranks[rank].stood_in
                if sleeper != rank and not stood_in:
                    peers_s[name].append(now - before)
                before = now
                if name == "straggle":
                    counts["late"] += staged.last_report.ranks[rank].late
                    counts["stood in for"] += stood_in
            turns_s[name].append(before - began)
    dist.barrier()
    results = gather((peers_s, turns_s, counts, digest(nets["straggle"])))
    staged.close()
    if rank == 0:
        print_stalls(results, options)


def print_stalls(results, options):
    world_size, num_steps = len(results), options.turns * options.steps
    print(
        f"{world_size} ranks, {1000 * options.compute_s:.0f} ms of work a step, one rank asleep {options.stall_s} s "
        f"every {options.every} steps; deadline {options.deadline_s} s, max_lag {options.max_lag}; "
        f"{options.turns} turns of {options.steps} steps each"
    )
    rows = [("seconds", "peers p50", "peers p99", "peers max", "mean step", "of the slowest rank")]
    for name in ("DDP", "straggle"):
        peers = [seconds for peers_s, *_ in results for seconds in peers_s[name]]
        totals = [sum(turns_s[name]) / num_steps for _, turns_s, *_ in results]
        numbers = [statistics.median(peers), quantile(peers, 0.99), max(peers), statistics.mean(totals), max(totals)]
        rows.append((name, *(f"{number:.3f}" for number in numbers)))
    print(text_table(rows))
    print(
        "peers: steps of ranks that are not asleep in them and not stood in for; "
        "mean step: a rank's complete turn / steps"
    )
    print(f"rank-steps late and stood in for: {[dict(counts) for _, _, counts, _ in results]} of {num_steps} each")
    print(f"parameters under straggle: {sorted({hashed for *_, hashed in results})}")


# -- a long run


def rss_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def draw_chaos(draw, num_blocks):
    """A stall (place, block, seconds, NaNs) for one rank and step."""
    seconds = 0.5 if draw.random() < 0.0005 else draw.uniform(0.0, 0.05) if draw.random() < 0.03 else 0.0
    return draw.choice(PLACES), draw.randrange(num_blocks), seconds, draw.random() < 0.002


def long(rank, options):
    torch.manual_seed(0)
    net = Net()
    staged = StagedDataParallel(
        net,
        deadline=FixedDeadline(options.deadline_s, warmup_steps=5),
        late_handling=LateHandling(grace_s=options.deadline_s / 2, max_lag=32),
    )
    loop, draw = Loop(net, staged, rank), random.Random(rank)
    marks = {max(1, round(options.steps * share)): share for share in (0.1, 0.5, 1.0)}
    injected, counts, hashes, memory, runs = Counter(), Counter(), [], {}, []
    began = time.monotonic()
    for step in range(1, options.steps + 1):
        place, block, seconds, bad = draw_chaos(draw, len(net))
        injected["stalls"] += seconds > 0
        injected["NaNs"] += bad
        loop.step(place, block, seconds, bad)
        own = staged.last_report.ranks[rank]
        counts["late"] += own.late
        counts["truncated"] += own.late and not own.stood_in
        counts["stood in for"] += own.stood_in
        counts["with NaNs"] += own.nonfinite > 0
        counts["skipped"] += staged.last_report.skipped
        runs.append(own.stood_in)
        if step % max(1, options.steps // 20) == 0:
            hashes.append(digest(net))
        if step in marks:
            memory[marks[step]] = rss_mib()
    seconds = time.monotonic() - began
    longest = max((len(list(run)) for stood_in, run in groupby(runs) if stood_in), default=0)
    finite = all(bool(torch.isfinite(parameter).all()) for parameter in net.parameters())
    results = gather((hashes, memory, injected, counts, longest, finite, seconds))
    staged.close()
    if rank == 0:
        print_long(results, options)


def print_long(results, options):
    print(
        f"{len(results)} ranks, {options.steps} steps in {max(seconds for *_, seconds in results):.0f} s; "
        f"deadline {1000 * options.deadline_s:.0f} ms, grace half of it, max_lag 32; no errors"
    )
    names = ("stalls", "NaNs"), ("late", "truncated", "stood in for", "with NaNs", "skipped")
    rows = [("rank", "RSS MiB at 10 %", "50 %", "100 %", *names[0], *names[1], "longest such run", "parameters")]
    for rank, (hashes, memory, injected, counts, longest, finite, _) in enumerate(results):
        cells = [*(f"{memory[share]:.1f}" for share in sorted(memory)), *(str(injected[name]) for name in names[0])]
        cells += [*(str(counts[name]) for name in names[1]), str(longest)]
        rows.append((str(rank), *cells, hashes[-1] + ("" if finite else " not finite")))
    print(text_table(rows))
    agree = sum(len(set(column)) == 1 for column in zip(*(hashes for hashes, *_ in results), strict=True))
    print(f"parameters compared at {len(results[0][0])} moments of the run, the same on all ranks at {agree}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("stall")
    command.add_argument("--ranks", type=int, default=4)
    command.add_argument("--turns", type=int, default=3)
    command.add_argument("--steps", type=int, default=60, help="of each turn")
    command.add_argument("--every", type=int, default=10)
    command.add_argument("--stall-s", type=float, default=2.0)
    command.add_argument("--compute-s", type=float, default=0.1)
    command.add_argument("--deadline-s", type=float, default=0.3)
    command.add_argument("--max-lag", type=int, default=64)
    command = commands.add_parser("long")
    command.add_argument("--ranks", type=int, default=4)
    command.add_argument("--steps", type=int, default=10000)
    command.add_argument("--deadline-s", type=float, default=0.01)
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    run_on_ranks({"stall": stall, "long": long}[options.command], options.ranks, options)
