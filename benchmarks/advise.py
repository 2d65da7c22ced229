"""Whether `straggle advise` names the slow rank of a DDP job, and predicts what it costs; status 1 if it does not.

python benchmarks/advise.py cost           # rank 1 takes 20, 40 or 100 % longer, in turns with steps of equal ranks
python benchmarks/advise.py named          # 200 ms of busy work in rank 1's backward pass, and DDP's own timers
python benchmarks/advise.py cost --quick   # a first look; its numbers may miss their tolerance

Four ranks of this machine under plain DDP with `straggle.watch`. Layers sleep, so that ranks that share few cores do
not contend; the 200 ms are a busy loop. A prediction sees only the steps of its own strength, the measurement compares
with the steps in which no rank was slow.
"""

import argparse
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import straggle
from straggle.advise.slow import ATTRIBUTED, find_slow_ranks, slowdown
from straggle.advise.timings import read_timings
from straggle.lab.local_ranks import run_on_ranks
from straggle.report import text_table

RANKS, SLOW = 4, 1
LAYERS, FORWARD_S, BACKWARD_S, WIDTH = 8, 0.004, 0.008, 64
SPREAD = 0.1  # of a layer's time, from step to step
STRENGTHS, TOLERANCE, BLOCK = (0.0, 0.2, 0.4, 1.0), 0.05, 10  # of a step's work, that the slow rank takes more
EXTRA_S = 0.2
TIMERS = {"avg_backward_compute_time": "backward", "avg_backward_comm_time": "allreduce"}


class Spend(torch.autograd.Function):
    """Takes time in both passes, and does nothing else."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        time.sleep(FORWARD_S * layer.pace())
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD_S * ctx.layer.pace())
        spend(ctx.layer.extra_s, ctx.layer.busy)
        return gradient, None


class Layer(nn.Module):
    def __init__(self, rank, number):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.extra_s, self.busy = 0.0, False
        self.random = torch.Generator().manual_seed(100 * rank + number)

    def pace(self):
        """A factor on the layer's time, around 1."""
        return float(torch.exp(SPREAD * torch.randn((), generator=self.random)))

    def forward(self, x):
        return torch.tanh(Spend.apply(self.linear(x), self))


def spend(seconds, busy):
    until = time.perf_counter() + seconds
    while busy and time.perf_counter() < until:
        pass
    time.sleep(max(0.0, until - time.perf_counter()))


def train(rank, folder, steps, block, busy, extra_s):
    """DDP's own timers on this rank."""
    torch.manual_seed(0)
    layers = [Layer(rank, number) for number in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched = straggle.watch(model, Path(folder))
    slow = layers[LAYERS // 2]
    slow.busy = busy
    for step in range(steps):
        slow.extra_s = extra_s[step // block % len(extra_s)] if rank == SLOW else 0.0
        model(torch.randn(16, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    watched.close()
    timers = model._get_ddp_logging_data()
    return {key: timers[key] for key in TIMERS if key in timers}


def watched_steps(steps, block, busy, extra_s):
    """What the watch wrote, and each rank's DDP timers; the slow rank takes each of ``extra_s`` for ``block`` steps."""
    with TemporaryDirectory() as folder:
        timers = run_on_ranks(train, RANKS, folder, steps, block, busy, list(extra_s))
        return read_timings(Path(folder)), timers


def cost(quick):
    """Rows of what is found, expected and measured, and whether it is as expected."""
    step_s = LAYERS * (FORWARD_S + BACKWARD_S)
    steps = BLOCK * len(STRENGTHS) * (3 if quick else 12)
    timings, _ = watched_steps(steps, BLOCK, False, [share * step_s for share in STRENGTHS])
    strength = (timings.step // BLOCK % len(STRENGTHS)).astype(int)
    mean_s = [float(timings.seconds[strength == number].mean()) for number in range(len(STRENGTHS))]
    for number, share in enumerate(STRENGTHS[1:], 1):
        predicted, measured = slowdown(timings.select(strength == number), SLOW), mean_s[number] / mean_s[0]
        off = predicted.value / measured - 1
        shown = f"{predicted.value:.3f} ({predicted.low:.3f} to {predicted.high:.3f}), {measured:.3f}: {off:+.1%}"
        what = f"rank {SLOW} takes {share:.0%} more: slowdown predicted, measured"
        yield what, f"within {TOLERANCE:.0%}", shown, abs(off) <= TOLERANCE


def named(quick):
    """Rows as of `cost`. Only one rank is busy, so one core beside those that wait is enough."""
    busy = (os.cpu_count() or 1) > 1
    timings, timers = watched_steps(30 if quick else 120, 1, busy, [EXTRA_S])
    ranks = find_slow_ranks(timings).ranks
    who = [one.rank for one in ranks]
    yield "ranks that are named", f"{SLOW} and no other", str(who), who == [SLOW]
    if ranks:
        worst, share = ranks[0], ranks[0].lost_share * ranks[0].phases["backward"]
        excess = f"{1e3 * worst.excess_s:.1f} ms"
        yield "its excess", f"{1e3 * EXTRA_S:.0f} ms +- 10%", excess, abs(worst.excess_s / EXTRA_S - 1) <= 0.1
        yield "phase that is named first", "backward", worst.named[0], worst.named[0] == "backward"
        yield "the job's excess in it", f"at least {ATTRIBUTED:.0%}", f"{share:.1%}", share >= ATTRIBUTED
    for key, name in TIMERS.items():
        shown = " / ".join(f"{own.get(key, 0) / 1e6:.1f}" for own in timers)
        yield f"DDP's timers of ranks 0 to {RANKS - 1}: {name}", "", f"{shown} ms", None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=("cost", "named"))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rows = list({"cost": cost, "named": named}[options.question](options.quick))
    verdicts = {True: "yes", False: "NO", None: ""}
    print(text_table([("", "expected", "measured", "as expected"), *((*row[:3], verdicts[row[3]]) for row in rows)]))
    raise SystemExit(int(any(row[3] is False for row in rows)))


if __name__ == "__main__":
    main()
