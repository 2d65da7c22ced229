"""What dealing samples out by speed is worth where a rank is always slow: the same step four ways, in turns.

torchrun --standalone --nproc-per-node 4 benchmarks/rebalance.py
torchrun --standalone --nproc-per-node 4 benchmarks/rebalance.py --overhead-ms 40 --steps 300
torchrun --standalone --nproc-per-node 4 benchmarks/rebalance.py --microbatches

All ranks are waited for, or late ranks are stopped; each with equal shares and with `straggle.Rebalance`. The faults
are those of conf/faults/slow_rank.yaml: the last rank takes twice as long, and stalls for a second every 60 steps.
Layers sleep for each sample, a third of it forward, so that ranks which share few cores do not contend for them.
"""

import argparse
import time
from statistics import fmean

import torch
import torch.distributed as dist
from sleeping import sleeping_net

import straggle
from straggle.lab.faults import FaultInjector, Slowdown, Stall
from straggle.lab.jobs import process_group
from straggle.observe.console import print_table
from straggle.observe.fairness import fairness_of

BLOCK = 10
LAYERS = 8
SAMPLE_S = 0.0004  # of a layer
EQUAL = 32  # samples of a rank


class Way:
    """One of the four: a model of its own, and what became of its steps."""

    def __init__(self, arguments, deadline, rebalanced):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        net = sleeping_net(16, LAYERS, arguments.overhead_ms / 1e3, SAMPLE_S)
        faults = {"slow": Slowdown(2.0, ranks=[world_size - 1])}
        if arguments.stalls:
            faults["stall"] = Stall(30, seconds=1.0, rank=world_size - 1, every=60)
        self.faults = FaultInjector(net, faults, rank=rank)
        self.model = straggle.StagedDataParallel(
            net, deadline=deadline, stages=LAYERS, late_handling=straggle.LateHandling(max_lag=64)
        )
        self.unit = EQUAL // 8 if arguments.microbatches else 1
        self.rebalance = straggle.Rebalance(self.model, total=world_size * EQUAL // self.unit)
        if not rebalanced:
            self.rebalance.close()
        self.split = arguments.microbatches
        self.step_s, self.reports = [], []
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def turn(self, first, steps):
        """Some steps; whatever a rank has to catch up with at the end of the turn counts too."""
        dist.barrier()
        before = time.perf_counter()
        for number in range(first, first + steps):
            self.step(number)
            now = time.perf_counter()
            self.step_s.append(now - before)
            before = now
        dist.barrier()
        self.step_s[-1] += time.perf_counter() - before

    def step(self, number):
        self.faults.step(number)
        first, count = self.rebalance.share()
        everything = torch.randn(self.unit * sum(self.rebalance.shares), 16, generator=torch.manual_seed(number))
        x = everything[self.unit * first : self.unit * (first + count)]
        parts = x.split(self.unit) if self.split else [x]
        with self.model.step(num_microbatches=len(parts)) as step:
            step.weight = count
            for part in parts:
                (self.model(part).square().mean() / len(parts)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.reports.append(self.model.last_report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--overhead-ms", type=float, default=8.0, help="of a pass, whatever its samples")
    parser.add_argument("--microbatches", action="store_true", help="shift micro-batches of 4 instead of samples")
    parser.add_argument("--no-stalls", dest="stalls", action="store_false", help="the rank is slow and nothing else")
    arguments = parser.parse_args()
    with process_group():
        measure(arguments)


def measure(arguments) -> None:
    ways = {
        "wait for all": Way(arguments, None, False),
        "wait for all, rebalanced": Way(arguments, None, True),
        "deadline": Way(arguments, straggle.QuantileDeadline(0.5, 1.1), False),
        "deadline, rebalanced": Way(arguments, straggle.QuantileDeadline(0.5, 1.1), True),
    }
    names = list(ways)
    for first in range(0, arguments.steps, BLOCK):
        turn = first // BLOCK % len(names)  # who begins changes from turn to turn
        for name in names[turn:] + names[:turn]:
            ways[name].turn(first, BLOCK)
    if dist.get_rank() == 0:
        show(ways, arguments.steps)
    same = torch.cat([p.detach().flatten() for way in ways.values() for p in way.model.parameters()])
    copies = [torch.zeros_like(same) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, same)
    if dist.get_rank() == 0:
        print("parameters on all ranks:", "identical" if all(torch.equal(same, c) for c in copies) else "DIFFERENT")
    for way in ways.values():
        way.model.close()


def show(ways, steps) -> None:
    start = 60  # the shares are found by then
    waiting = fmean(ways["wait for all"].step_s[start:])
    rows = []
    for name, way in ways.items():
        kept = way.reports[start:]
        fairness, mean = fairness_of(kept), fmean(way.step_s[start:])
        rows.append(
            (
                name,
                f"{1e3 * mean:.0f} ms",
                f"{mean / waiting:.3f}",
                f"{fmean(report.dropped_share for report in kept):.1%}",
                f"{fairness.depth_bias:.1%}",
                f"{fairness.input_index:.2f}",
                f"{fairness.input_least:.0%}",
            )
        )
    columns = ("", "step, mean", "ratio", "dropped", "depth bias", "fairness at input", "least at input")
    schedules = {name: way.rebalance.schedule for name, way in ways.items() if len(way.rebalance.schedule) > 1}
    print_table(f"{steps} steps in turns of {BLOCK}, the first {start} left out", columns, rows, schedules)


if __name__ == "__main__":
    main()
