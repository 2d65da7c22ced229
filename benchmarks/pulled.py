"""What it is worth that ranks draw a step's micro-batches while it runs: the same steps five ways, in turns.

torchrun --standalone --nproc-per-node 4 benchmarks/pulled.py
torchrun --standalone --nproc-per-node 4 benchmarks/pulled.py --runs 2 --block 6
torchrun --standalone --nproc-per-node 8 benchmarks/pulled.py --scenarios slow random

Each rank has 8 micro-batches of 20 ms on average, a third of it forward. They sleep, so that ranks which share few
cores do not contend for them. All ways have as many micro-batches in a step over all ranks. Scenarios: `none`, no rank
is slow; `slow`, the last rank takes twice as long; `random`, a rank is held up before a step for 0.32 of a step's time,
with chance 0.44; `stall`, the last rank stands still for a second before every 60th step (--stall-every); `stuck`, it
does so in its third micro-batch.

A ratio is to the static split that waits for all ranks. The spread is that of the blocks: as many turns as --runs says,
each of --block steps, after one that is left out. A step's seconds end with the slowest rank's.
"""

import argparse
import random
import time
from itertools import islice
from statistics import fmean

import torch
import torch.distributed as dist
from sleeping import sleeping_net

import straggle
from straggle.lab.process_group import process_group
from straggle.observe.console import print_table

LAYERS, WIDTH, ROWS = 4, 64, 4
PARTS = 8  # micro-batches of a rank
SCENARIOS = ("none", "slow", "random", "stall", "stuck")
DELAY, CHANCE = 0.32 / 0.99, 0.44  # of a step's time, as DropCompute's authors have it
STALL_S = 1.0


class Way:
    """One way to make a step of all ranks' micro-batches, here by a static split; ``step_s`` as this rank sees it."""

    def __init__(self, arguments, scenario):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.is_last = self.rank == self.world_size - 1
        self.scenario, self.part_s, self.stall_every = scenario, arguments.part_ms / 1e3, arguments.stall_every
        torch.manual_seed(0)
        slow = 2 if scenario == "slow" and self.is_last else 1
        self.net = sleeping_net(WIDTH, LAYERS, slow * self.part_s)
        self.model = self.wrapped()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.chance = random.Random(self.rank)
        self.step_s, self.reports, self.number, self.begun = [], [], 0, 0
        self.net.register_forward_pre_hook(lambda *_: self.stand_still())

    def wrapped(self):
        return straggle.StagedDataParallel(self.net, deadline=None)

    def passes(self, parts):
        with self.model.step(num_microbatches=PARTS):
            for x in islice(parts, self.rank * PARTS, (self.rank + 1) * PARTS):
                (loss_of(self.model, x) / PARTS).backward()

    def turn(self, steps):
        dist.barrier()
        for _ in range(steps):
            began_at = time.perf_counter()
            self.begun = 0
            self.hold_up()
            generator = torch.manual_seed(self.number)
            self.passes(torch.randn(PARTS * self.world_size, ROWS, WIDTH, generator=generator))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step_s.append(time.perf_counter() - began_at)
            self.reports.append(self.model.last_report)
            self.number += 1
        began_at = time.perf_counter()
        dist.barrier()  # what a rank has to catch up with counts too
        self.step_s[-1] += time.perf_counter() - began_at

    def hold_up(self):
        if self.scenario == "random" and self.chance.random() < CHANCE:
            time.sleep(DELAY * PARTS * self.part_s)
        if self.scenario == "stall" and self.stalls():
            time.sleep(STALL_S)

    def stand_still(self):
        """Before a forward pass."""
        self.begun += 1
        if self.scenario == "stuck" and self.begun == 3 and self.stalls():
            time.sleep(STALL_S)

    def stalls(self):
        return self.is_last and self.number % self.stall_every == self.stall_every // 2


class StoppedAtDeadline(Way):
    def wrapped(self):
        return straggle.StagedDataParallel(self.net, deadline=straggle.AutoDeadline())


class Rebalanced(Way):
    def wrapped(self):
        model = super().wrapped()
        self.rebalance = straggle.Rebalance(model, total=PARTS * self.world_size)
        return model

    def passes(self, parts):
        first, count = self.rebalance.share()
        with self.model.step(num_microbatches=count) as step:
            step.weight = count
            for x in parts[first : first + count]:
                (loss_of(self.model, x) / count).backward()


class Pulled(Way):
    def passes(self, parts):
        with self.model.step() as step:
            for x in step.pull(parts):
                loss_of(self.model, x).backward()


class PulledToDeadline(Pulled):
    """Cuts off the micro-batch that the last rank is in, once all others have finished; no other is cut.

    And not before a rank had time for one micro-batch more than its equal share. It is not waited for until the end of
    the stage that it is in: the others submit for it after a quarter of a micro-batch.
    """

    def wrapped(self):
        all_but_one = straggle.LateHandling(quorum=self.world_size - 1, grace_s=self.part_s / 4)
        deadline = straggle.FixedDeadline((PARTS + 1) * self.part_s)
        return straggle.StagedDataParallel(self.net, deadline=deadline, late_handling=all_but_one)


WAYS = {
    "static split": Way,
    "deadline": StoppedAtDeadline,
    "Rebalance": Rebalanced,
    "pulled": Pulled,
    "pulled, deadline": PulledToDeadline,
}


def loss_of(model, x):
    return model(x).square().mean()


def measure(arguments, scenario):
    ways = {name: way(arguments, scenario) for name, way in WAYS.items()}
    for turn in range(arguments.runs + 1):
        for name in list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]:
            ways[name].turn(arguments.block)
    blocks = {name: blocks_of(way.step_s, arguments) for name, way in ways.items()}
    same = identical(ways.values())
    for way in ways.values():
        way.model.close()
    if dist.get_rank() == 0:
        title = (
            f"{scenario}: {dist.get_world_size()} ranks, {PARTS} micro-batches of {arguments.part_ms:g} ms each, "
            f"{arguments.runs} blocks of {arguments.block} steps; parameters on all ranks {same}"
        )
        columns = ("", "step, mean", "ratio", "of blocks", "dropped", "drawn by each")
        kept = {name: way.reports[arguments.block :] for name, way in ways.items()}
        print_table(title, columns, [row(name, blocks, kept[name]) for name in ways])


def row(name, blocks, reports):
    ratios = sorted(own / base for own, base in zip(blocks[name], blocks["static split"], strict=True))
    parts = zip(*([rank.parts for rank in report.ranks] for report in reports), strict=True)
    return (
        name,
        f"{1e3 * fmean(blocks[name]):.1f} ms",
        f"{fmean(blocks[name]) / fmean(blocks['static split']):.3f}",
        f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
        f"{fmean(report.dropped_share for report in reports):.2%}",
        ", ".join(f"{fmean(own):.1f}" for own in parts) if name.startswith("pulled") else "",
    )


def blocks_of(step_s, arguments):
    """The mean step of each block but the first, of the slowest rank."""
    own = torch.tensor(step_s, dtype=torch.float64).view(arguments.runs + 1, arguments.block).mean(1)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return own[1:].tolist()


def identical(ways):
    same = torch.cat([p.detach().flatten() for way in ways for p in way.net.parameters()])
    copies = [torch.zeros_like(same) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, same)
    return "identical" if all(torch.equal(same, other) for other in copies) else "DIFFERENT"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--block", type=int, default=12, help="steps of one way before it is the next one's turn")
    parser.add_argument("--part-ms", type=float, default=20.0, help="of a micro-batch")
    parser.add_argument("--stall-every", type=int, default=60, help="steps from one stall to the next")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with process_group():
        for scenario in arguments.scenarios:
            measure(arguments, scenario)


if __name__ == "__main__":
    main()
