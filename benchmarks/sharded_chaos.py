"""Sharded replicas (FSDP2) under delays, stalls and errors: parameters and optimizer states are equal, bit for bit.

OMP_NUM_THREADS=1 python benchmarks/sharded_chaos.py --replicas 3 --shards 2 --steps 2000

In a step a rank sleeps in each of its blocks (15 in 100 steps), or for 80 ms before or in the step (5 in 100 each), or
for 0.6 s (3 in 1,000); in 5 of 100 a replica has an error in a backward pass, which its loop catches. Replicas are
compared 20 times, each time after ten steps without any of it, in which all catch up. Status 1 if any differ.
"""

import argparse
import random
import sys
import time
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import straggle
from straggle.lab.local_ranks import run_on_ranks

WIDTH, DEPTH, COMPARISONS, CALM = 32, 6, 20, 10


class CaughtError(Exception):
    """An error of the user's in a backward pass."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.sleep_s, self.fails = 0.0, False

    def forward(self, x):
        time.sleep(self.sleep_s)
        y = self.up(x)
        y.register_hook(self.backward_begins)
        return x + self.down(torch.tanh(y))

    def backward_begins(self, _gradient):
        time.sleep(self.sleep_s)
        if self.fails:
            raise CaughtError


def is_equal(tensors, group):
    """Whether this rank's shards are those of the ranks that have the same ones."""
    mine = torch.cat([tensor.to_local().flatten() for tensor in tensors])
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(theirs, mine, group=group)
    return bool(mine.isfinite().all()) and all(torch.equal(mine, other) for other in theirs)


def chaos(rank, options):
    """What happened on this rank, and how many comparisons found parameters and states equal."""
    shape = (options.replicas, options.shards)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 8))
    for unit in (*net[:-1], net):
        fully_shard(unit, mesh=mesh["dp_shard"])
    late_handling = straggle.LateHandling(grace_s=0.02, max_lag=8)
    model = straggle.StagedDataParallel(net, mesh=mesh["dp_replicate"], deadline=0.04, late_handling=late_handling)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.003)
    own, alike = random.Random(rank), random.Random(7)  # of this rank, and the same on all
    seen, every = Counter(), options.steps // COMPARISONS
    for number in range(options.steps):
        is_calm = number % every >= every - CALM
        chance = 1.0 if is_calm else own.random()
        fails, replica, block = alike.random() < 0.05 and not is_calm, alike.randrange(shape[0]), alike.randrange(DEPTH)
        for at, each in enumerate(net[:-1]):
            each.sleep_s = 0.006 if 0.003 <= chance < 0.15 else 0.0
            each.fails = fails and rank // options.shards == replica and at == block
        seen["slow"] += 0.003 <= chance < 0.15
        seen["stalled"] += chance < 0.003 or 0.15 <= chance < 0.25
        time.sleep(0.6 if chance < 0.003 else 0.08 if 0.15 <= chance < 0.20 else 0.0)
        inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(64 * number + rank))
        with model.step():
            time.sleep(0.08 if 0.20 <= chance < 0.25 else 0.0)
            try:
                model(inputs).square().mean().backward()
            except CaughtError:
                seen["errors"] += 1
        seen["late"] += any(each.late for each in model.last_report.ranks)
        seen["stood in"] += any(each.stood_in for each in model.last_report.ranks)
        optimizer.step()
        optimizer.zero_grad()
        if number % every == every - 1:
            group = mesh["dp_replicate"].get_group()
            with model.pause():
                parameters = list(net.parameters())
                states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
                seen["parameters equal"] += is_equal(parameters, group)
                seen["states equal"] += is_equal(states, group)
    model.close()
    return dict(seen)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    given = parser.parse_args()
    began = time.monotonic()
    found = run_on_ranks(chaos, given.replicas * given.shards, given)
    print(f"{given.replicas} x {given.shards}, {given.steps} steps in {time.monotonic() - began:.0f} s")
    for number, each in enumerate(found):
        print(f"rank {number}: " + ", ".join(f"{name} {count}" for name, count in each.items()))
    equal = {each[name] for each in found for name in ("parameters equal", "states equal")}
    sys.exit(int(equal != {COMPARISONS}))
