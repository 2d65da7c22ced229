"""AutoDeadline beside fixed thresholds on short steps of real ranks, of which one loads slowly, or has slow layers.

torchrun --standalone --nproc-per-node 4 benchmarks/auto_ranks.py             # about six minutes
torchrun --standalone --nproc-per-node 4 benchmarks/auto_ranks.py --rounds 2  # a first look

A step's layers sleep 80 ms. Rank 1 sleeps more: 0.4 s as it loads a batch, which it gets from a `LateLoader`, a quarter
more or less, or another 80 ms in its layers. All policies are taken in turns, in a drawn order, with models of their
own: ``AutoDeadline`` with the grace that it has by itself and with 50 ms, and thresholds with a grace of 5 ms. The
number is gradient per second, of all ranks, over that of the best threshold in the same round: of those that have been
tried, the one that is best over all rounds.
"""

import argparse
import random
import statistics
import time

import torch
import torch.distributed as dist
from loads import DEPTH, RANKS, ROWS, SLOW, WIDTH, Data, late
from paired import median_ratio
from sleeping import sleeping_net

from straggle import AutoDeadline, FixedDeadline, LateHandling, StagedDataParallel
from straggle.lab.process_group import gather
from straggle.report import text_table

AUTO, AUTO_50 = "AutoDeadline", "AutoDeadline, a grace of 50 ms"


class Varying(Data):
    """Each batch takes ``batch_s`` to load, a quarter more or less."""

    def __init__(self, length, batch_s):
        super().__init__(length, batch_s)
        self._usual_s, self._draw = batch_s, random.Random(0)

    def __getitems__(self, numbers):
        self._batch_s = self._usual_s * self._draw.uniform(0.75, 1.25)
        return super().__getitems__(numbers)


class Job:
    """One policy: a model and its loader on this rank. ``round`` makes an epoch."""

    def __init__(self, place, policy, late_handling, options):
        slow, in_data = dist.get_rank() == SLOW, place == "its data"
        torch.manual_seed(0)
        net = sleeping_net(WIDTH, DEPTH, options.compute_s * (2 if slow and not in_data else 1))
        self.model = StagedDataParallel(net, deadline=policy, late_handling=late_handling)
        data = Varying(RANKS * ROWS * options.steps, options.load_s if slow and in_data else 0.0)
        self.loader = late(self.model, data, 0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.model.pause()

    def round(self):
        """Mean seconds of a step, what is given of a step's gradients, and of the slow rank's."""
        dist.barrier()
        self.model.resume()
        began, given = time.monotonic(), []
        for batch in self.loader():
            with self.model.step():
                self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            given.append([rank.reach for rank in self.model.last_report.ranks])
        seconds = (time.monotonic() - began) / len(given)
        self.model.pause()
        return seconds, statistics.mean(map(statistics.mean, given)), statistics.mean(own[SLOW] for own in given)


def policies(options):
    """Name, policy and how late ranks are treated."""
    yield AUTO, AutoDeadline(), LateHandling()
    yield AUTO_50, AutoDeadline(), LateHandling(grace_s=0.05)
    for part in options.thresholds:
        seconds = part * options.compute_s
        yield f"{1e3 * seconds:.0f} ms", FixedDeadline(seconds), LateHandling(grace_s=0.005)


def run(place, options):
    """Of each policy, what came of each round."""
    jobs = {name: Job(place, policy, handling, options) for name, policy, handling in policies(options)}
    rounds, draw = {name: [] for name in jobs}, random.Random(0)
    for number in range(1 + options.rounds):
        for name in draw.sample(list(jobs), len(jobs)):
            own = jobs[name].round()
            if number:
                rounds[name].append(own)
    states = gather([[p.detach().sum().item() for p in job.model.parameters()] for job in jobs.values()])
    assert all(state == states[0] for state in states), "parameters differ"
    for job in jobs.values():
        job.model.close()
    return rounds


def rows_of(place, rounds):
    rates = {name: [given / seconds for seconds, given, _ in own] for name, own in rounds.items()}
    best = max((name for name in rates if name not in (AUTO, AUTO_50)), key=lambda name: statistics.mean(rates[name]))
    for name, own in rounds.items():
        seconds, given, of_slow = map(statistics.mean, zip(*own, strict=True))
        over = median_ratio(rates[name], rates[best])
        yield place, name, f"{1e3 * seconds:.0f}", f"{given:.1%}", f"{of_slow:.1%}", f"{given / seconds:.2f}", *over


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute-s", type=float, default=0.08)
    parser.add_argument("--load-s", type=float, default=0.4)
    parser.add_argument("--steps", type=int, default=40, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.8, 1.05, 1.2, 1.5], help="over --compute-s")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rows = [
        ("rank 1 is slow in", "", "mean step, ms", "given", "by rank 1", "gradients/s", "over the best", "quartiles")
    ]
    for place in ("its data", "its layers"):
        rows += rows_of(place, run(place, options))
    if dist.get_rank() == 0:
        print(text_table(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
