"""AutoDeadline's choice against the best fixed threshold of a grid, on drawn steps; no clock of this machine is in it.

python benchmarks/auto.py                           # some seconds
python benchmarks/auto.py --windows 100 --noise 0   # without its margin for noise

Six ranks whose step takes 0.1 s: none slow, with 2, 5 and 10 % noise of each rank; all slow at once for a while (a busy
machine); one twice as slow; random stalls; heavy tails. Each choice sees 50 steps, and is judged by the 25 steps after
them. Gain: gradient per second over that of waiting for all ranks. The steps seen are as if no rank had been stopped.
"""

import argparse
import math
from dataclasses import replace
from itertools import pairwise

import torch

from straggle import AutoDeadline, LateHandling
from straggle.lab.simulate.units import Work
from straggle.policies.auto_deadline import StepTimes, choose_for
from straggle.policies.deadline import quantile_of
from straggle.policies.step_model import StopRules, computed_share, simulate_step
from straggle.report import text_table

STEP_S, RANKS, SEEN, JUDGED = 0.1, 6, 50, 25
UNITS = Work(STEP_S, num_stages=8).units("stage")
RULES = StopRules.of(AutoDeadline(), LateHandling(), RANKS)
GRID = [0.9 * STEP_S * 8 ** (number / 80) for number in range(81)]


def around_one(generator, steps, spread):
    return (1 + spread * torch.randn(steps, RANKS, generator=generator)).clamp(min=0.5)


def noise(spread):
    return lambda generator, steps: around_one(generator, steps, spread)


def busy_machine(generator, steps):
    """Every second 40 steps all ranks take one to six times as long."""
    phase = torch.arange(steps) // 40
    swing = 1 + 5 * (phase % 2) * torch.rand(steps // 40 + 1, generator=generator)[phase]
    return around_one(generator, steps, 0.05) * swing.unsqueeze(1)


def one_slow(generator, steps):
    factor = around_one(generator, steps, 0.02)
    factor[:, 1] *= 2
    return factor


def stalls(generator, steps):
    return around_one(generator, steps, 0.02) + 2 * (torch.rand(steps, RANKS, generator=generator) < 0.03)


def heavy_tail(generator, steps):
    return around_one(generator, steps, 0.02) * (0.4 * torch.randn(steps, RANKS, generator=generator)).exp()


def one_slow_on_a_busy_machine(generator, steps):
    factor = busy_machine(generator, steps)
    factor[:, 1] *= 2
    return factor


SCENARIOS = {
    "no rank slow, 2 % noise": noise(0.02),
    "no rank slow, 5 % noise": noise(0.05),
    "no rank slow, 10 % noise": noise(0.1),
    "busy machine": busy_machine,
    "one rank twice as slow": one_slow,
    "the same on a busy machine": one_slow_on_a_busy_machine,
    "random stalls": stalls,
    "heavy tail": heavy_tail,
}


def outcome(unit_s, deadline_s, after_quorum_s=0.0):
    """Seconds and shares dropped of each step under a deadline, a number or one for each step."""
    rules = replace(RULES, after_quorum_s=after_quorum_s)
    done = simulate_step(unit_s, deadline_s, rules)
    return done.seconds, 1 - (computed_share(unit_s, done, rules, UNITS.silent) @ UNITS.share).mean(1)


def rate(seconds, dropped):
    return float((1 - dropped).sum() / seconds.sum())


def choose(unit_s, options):
    share = UNITS.share.expand_as(unit_s)
    at_once, quorum_s = torch.zeros_like(unit_s[..., 0]), unit_s[..., -1].kthvalue(RULES.quorum, dim=1).values
    return choose_for(
        StepTimes(unit_s, share, at_once, at_once[:, 0], quorum_s),
        RULES,
        longest_s=options.max_over_median * quantile_of(unit_s[..., -1].median(1).values, 0.1),
        least_gain=options.least_gain,
        noise=options.noise,
    )


def judge(scenario, options):
    generator = torch.Generator().manual_seed(options.seed)
    factor = scenario(generator, SEEN + JUDGED * options.windows)
    unit_s = (factor.unsqueeze(2) * UNITS.base_s).cumsum(2)
    starts = range(0, JUDGED * options.windows, JUDGED)
    chosen = [choose(unit_s[first : first + SEEN], options) for first in starts]
    judged = unit_s[SEEN:]
    parts = zip(judged.split(JUDGED), chosen, strict=True)
    each = [outcome(part, one.tau_s, one.after_quorum_s) for part, one in parts]
    waiting, auto = rate(*outcome(judged, math.inf)), tuple(map(torch.cat, zip(*each, strict=True)))
    best_s = max(GRID, key=lambda one_s: rate(*outcome(judged, one_s)))
    quantile_s = torch.tensor([1.2 * quantile_of(unit_s[first : first + SEEN, :, -1], 0.5) for first in starts])
    worst_s = outcome(judged, quantile_s.repeat_interleave(JUDGED))[0].max()
    best = outcome(judged, best_s)
    changes = sum(abs(one.tau_s / other.tau_s - 1) > 0.1 for one, other in pairwise(chosen))
    return (
        f"{rate(*auto) / waiting - 1:.1%}",
        f"{rate(*best) / waiting - 1:.1%} at {best_s:.3f} s",
        f"{rate(*auto) / max(waiting, rate(*best)):.3f}",
        f"{float(auto[1].mean()):.2%}",
        f"{float(best[1].mean()):.2%}",
        f"{float(auto[0].max() / worst_s):.2f}",
        f"{changes} of {len(chosen) - 1}",
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=1.0)
    parser.add_argument("--least-gain", type=float, default=0.01)
    parser.add_argument("--max-over-median", type=float, default=1.4)
    options = parser.parse_args()
    rows = [("", "gain", "of the best fixed", "over it", "dropped", "by the best", "longest step", "changes over 10 %")]
    for name, scenario in SCENARIOS.items():
        rows.append((name, *judge(scenario, options)))
    print(text_table(rows))


if __name__ == "__main__":
    main()
