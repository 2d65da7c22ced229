"""Time to a loss where one rank is always slow: its deadline alone, and with samples dealt out by speed.

torchrun --standalone --nproc-per-node 4 benchmarks/rebalance_loss.py                     # about a quarter of an hour
torchrun --standalone --nproc-per-node 4 benchmarks/rebalance_loss.py --seeds 1 --tasks digits --data alike

The last of the ranks takes twice as long for a sample. Text (a GPT of two blocks) and digits (six convolutions);
samples alike (each step's are dealt out of one pool), or each rank's own (a quarter of the text, or of the digits
sorted by class, which no other rank has: a slow rank then takes fewer of its own in a step). Three ways take turns of
ten steps: wait for all, AutoDeadline, AutoDeadline with `straggle.Rebalance`. Layers sleep for each sample, so that
ranks which share few cores do not contend for them. The loss is on held-out data, after each turn, and is not timed.
The target is the best loss of the way whose best one is the highest. 95 % intervals are over seeds.
"""

import argparse
import math
import time
from statistics import fmean

import torch
import torch.distributed as dist
from sleeping import Nap
from torch import nn

import straggle
from experiments._intervals import mean_interval
from straggle.data.deal import epoch_order
from straggle.lab.interleaved import seconds_to
from straggle.lab.jobs import process_group
from straggle.lab.workloads.digits import Digits
from straggle.lab.workloads.text import Text
from straggle.report import text_table

BLOCK, EQUAL, SLOW = 10, 8, 2.0
SAMPLE_S = 0.005  # of a rank that is not slow, forward and backward
WAIT, ALONE, DEALT = "wait for all", "deadline", "deadline, dealt by speed"
WAYS = {WAIT: (None, False), ALONE: (straggle.AutoDeadline, False), DEALT: (straggle.AutoDeadline, True)}


class SleepingLayers:
    """Each layer takes its part of ``sample_s`` for a sample, while the model trains."""

    def __init__(self, module, sample_s):
        layers = [part for part in module.modules() if next(part.parameters(recurse=False), None) is not None]
        layers = [part for part in layers if not isinstance(part, nn.Embedding)]
        self._seconds = sample_s / len(layers)
        for layer in layers:
            layer.register_forward_hook(self._sleep)

    def _sleep(self, layer, _inputs, output):
        return Nap.apply(output, self._seconds * len(output)) if layer.training else output


def workload_of(task):
    return (
        Digits(channels=8) if task == "digits" else Text(context=16, width=32, depth=2, heads=4, validation_windows=256)
    )


class Samples:
    """Which samples a rank has; ``own``: of its own part of them, in order of their class or of the text."""

    def __init__(self, workload, own, seed):
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._own, self._seed = own, seed
        self._numbers = torch.arange(workload.num_samples)
        if own and isinstance(workload, Digits):
            self._numbers = workload.training[1].sort(stable=True).indices
        if own:
            self._numbers = self._numbers.tensor_split(self._ranks)[self._rank]
        self._taken = 0  # of its own

    def take(self, step, first, count):
        """``count`` samples, in an own part the next ones, otherwise from number ``first`` of the step's."""
        begin = self._taken if self._own else step * self._ranks * EQUAL + first
        self._taken += count
        epochs = {number // len(self._numbers) for number in (begin, begin + count - 1)}
        order = {epoch: epoch_order(len(self._numbers), self._seed, epoch) for epoch in epochs}
        places = [divmod(number, len(self._numbers)) for number in range(begin, begin + count)]
        return self._numbers[torch.stack([order[epoch][place] for epoch, place in places])]


class Way:
    """One way to train, with its clock, its losses and what it dropped."""

    def __init__(self, name, workload, own, seed):
        deadline, by_speed = WAYS[name]
        torch.manual_seed(seed)
        self.workload, self.module = workload, workload.model()
        slow = SLOW if dist.get_rank() == dist.get_world_size() - 1 else 1.0
        SleepingLayers(self.module, SAMPLE_S * slow)
        self.model = straggle.StagedDataParallel(
            self.module, deadline=deadline and deadline(), late_handling=straggle.LateHandling(max_lag=64)
        )
        self.rebalance = straggle.Rebalance(self.model, total=dist.get_world_size() * EQUAL)
        if not by_speed:
            self.rebalance.close()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=3e-3)
        self.samples = Samples(workload, own, seed)
        self.end_s, self.losses, self.dropped, self.number = [0.0], [math.inf], [], 0
        self.model.pause()

    def turn(self):
        dist.barrier()
        self.model.resume()
        begin = time.perf_counter()
        for _ in range(BLOCK):
            self.step()
        dist.barrier()
        self.end_s.append(self.end_s[-1] + time.perf_counter() - begin)
        self.model.pause()
        self.losses.append(self.workload.evaluate(self.module)["loss"] if dist.get_rank() == 0 else math.nan)

    def step(self):
        first, count = self.rebalance.share()
        batch = self.workload.batch(self.samples.take(self.number, first, count))
        with self.model.step() as step:
            step.weight = count
            self.workload.loss(self.model, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.dropped.append(self.model.last_report.dropped_share)
        self.number += 1


def run(workload, own, seed, steps):
    """For each way the seconds to the target, the mean step, the share dropped and the last share of the slow rank."""
    ways = {name: Way(name, workload, own, seed) for name in WAYS}
    names = list(ways)
    for turn in range(steps // BLOCK):
        for name in names[turn % 3 :] + names[: turn % 3]:
            ways[name].turn()
    target = max(min(way.losses) for way in ways.values())
    found = {
        name: (
            seconds_to(way.losses[1:], way.end_s[1:], target),
            way.end_s[-1] / steps,
            fmean(way.dropped),
            way.rebalance.shares[-1] / EQUAL,
            way.losses[-1],
        )
        for name, way in ways.items()
    }
    for way in ways.values():
        way.model.close()
    return found


def table(task, data, runs):
    rows = [("", "to the loss, over the deadline's", "step, over waiting's", "dropped", "share", "last loss")]
    for name in WAYS:
        to_loss = mean_interval([math.log(one[name][0] / one[ALONE][0]) for one in runs])
        between = f" ({math.exp(to_loss.low):.2f} to {math.exp(to_loss.high):.2f})" if len(runs) > 1 else ""
        ratio = f"{math.exp(to_loss.value):.3f}{between}"
        rows.append(
            (
                name,
                "1" if name == ALONE else ratio,
                f"{fmean(one[name][1] / one[WAIT][1] for one in runs):.3f}",
                f"{fmean(one[name][2] for one in runs):.1%}",
                f"{fmean(one[name][3] for one in runs):.2f}",
                f"{fmean(one[name][4] for one in runs):.3f}",
            )
        )
    print(f"\n{task}, {data}, {len(runs)} seeds\n{text_table(rows)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", default=["text", "digits"], choices=["text", "digits"])
    parser.add_argument("--data", nargs="+", default=["alike", "own"], choices=["alike", "own"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with process_group():
        for task in options.tasks:
            workload = workload_of(task)
            for data in options.data:
                runs = [run(workload, data == "own", seed, options.steps) for seed in range(options.seeds)]
                if dist.get_rank() == 0:
                    table(task, data, runs)


if __name__ == "__main__":
    main()
