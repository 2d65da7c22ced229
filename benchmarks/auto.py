"""AutoDeadline's choice against the best fixed threshold of a grid, on drawn steps; no clock of this machine is in it.

python benchmarks/auto.py                # about half a minute
python benchmarks/auto.py --in-training  # each choice sees what its own deadlines left: two minutes
python benchmarks/auto.py --short-steps  # a rank that loads slowly, and others, in steps of 80 ms: a minute

Six ranks whose step takes 0.1 s: none slow, with 2, 5 and 10 % noise of each rank; all slow at once for a while (a busy
machine); times as four ranks had on two cores that others used, too; one twice as slow; random stalls; heavy tails. And
the delays of head-to-head, of five ranks with four micro-batches of 36 ms. Each choice sees 75 steps, and
is judged by the 25 steps after them. Gain: gradient per second over that of waiting for all ranks. The
oracle knows each step in advance, and takes the best threshold of the grid for it; seconds saved are those for as much
gradient. The steps seen are as if no rank had been stopped; with ``--in-training`` they are those of the simulator,
where a rank that was late is known as far as it came, as it is in a job. There, one rank is slow by more, on 3 to 8
ranks, by itself and on machines that all ranks share, in stages, in whole micro-batches and in whole steps.

With ``--short-steps`` there are four ranks with steps of 80 ms, which can stop at the end of each of eight layers. One
is slow in its layers, or as it loads a batch, which a `LateLoader` gives it again until it is in time: what it still
has to load when it is stood in for, it does in the next step. A rank that is behind is stood in for as soon as a quorum
waits. The best fixed threshold has a grace of its own, of 5, 20 or 50 ms, too.
"""

import argparse
import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product

import torch

from straggle import AutoDeadline, FixedDeadline, LateHandling
from straggle.lab.faults import dropcompute_factors
from straggle.lab.simulate.communication import Constant
from straggle.lab.simulate.ranks import simulate_times
from straggle.lab.simulate.units import Units, Work
from straggle.policies.auto_deadline import choose_for
from straggle.policies.deadline import quantile_of
from straggle.policies.price import price_of
from straggle.policies.what_if.recorded_steps import StepTimes
from straggle.policies.what_if.simulated_ranks import GivenStep, SimulatedRanks
from straggle.policies.what_if.step_model import StopRules, computed_share, parts_of, simulate_step
from straggle.report import text_table

RANKS, FIRST, SEEN, JUDGED = 6, 50, 75, 25
PART_S, PARTS, PACED_RANKS = 0.036, 4, 5  # of head-to-head


@dataclass(frozen=True)
class Job:
    """What a step is, on how many ranks."""

    units: Units
    ranks: int
    step_s: float
    late_handling: LateHandling = LateHandling()

    @property
    def rules(self):
        return StopRules.of(AutoDeadline(), self.late_handling, self.ranks)

    @property
    def grid(self):
        return [0.5 * self.step_s * 16 ** (number / 100) for number in range(101)]


ONE = Job(Work(0.1, num_stages=8).units("stage"), RANKS, 0.1)
PACED_S = PART_S * PARTS
PACED = Job(Work(PACED_S, num_stages=8, num_microbatches=PARTS).units("stage"), PACED_RANKS, PACED_S)


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


def shared_machine(generator, steps):
    """Each rank by itself, and all of them at once, as a training job's ranks varied with a load of 17 on two cores."""
    apart = 0.27 * torch.randn(steps, RANKS, generator=generator)
    return (apart + 0.24 * torch.randn(steps, 1, generator=generator)).exp()


def stalls_on_a_shared_machine(generator, steps):
    return shared_machine(generator, steps) + 2 * (torch.rand(steps, RANKS, generator=generator) < 0.03)


def one_slow_on_a_shared_machine(generator, steps):
    factor = shared_machine(generator, steps)
    factor[:, 1] *= 2
    return factor


def one_slow_on_a_busy_machine(generator, steps):
    factor = busy_machine(generator, steps)
    factor[:, 1] *= 2
    return factor


SCENARIOS = {
    "no rank slow, 2 % noise": noise(0.02),
    "no rank slow, 5 % noise": noise(0.05),
    "no rank slow, 10 % noise": noise(0.1),
    "busy machine": busy_machine,
    "a shared machine": shared_machine,
    "one rank twice as slow": one_slow,
    "one slow rank, busy machine": one_slow_on_a_busy_machine,
    "one slow rank, shared machine": one_slow_on_a_shared_machine,
    "random stalls": stalls,
    "random stalls, shared machine": stalls_on_a_shared_machine,
    "heavy tail": heavy_tail,
}


def stretched(scenario, units=ONE.units):
    """A step's units, each of them stretched alike: (steps, ranks, units)."""
    return lambda generator, steps: (scenario(generator, steps).unsqueeze(2) * units.base_s).cumsum(2)


def paced(delays):
    """Steps of head-to-head, with ``delays(generator, steps)`` of (steps, ranks, micro-batches)."""

    def unit_s(generator, steps):
        own_s = PACED.units.base_s.expand(steps, PACED_RANKS, -1).clone()
        own_s[..., :PARTS] += delays(generator, steps)
        return own_s.cumsum(2) * around_one(generator, steps, 0.02)[:, :PACED_RANKS].unsqueeze(2)

    return unit_s


def none(_, steps):
    return torch.zeros(steps, PACED_RANKS, PARTS)


def slow_rank(generator, steps):
    delay_s = none(generator, steps)
    delay_s[:, 3] = PART_S
    delay_s[30::60, 3, 0] += 1.0
    return delay_s


def stall(generator, steps):
    delay_s = none(generator, steps)
    delay_s[20::20, 1, 0] = 1.0
    return delay_s


def dropcompute(generator, steps):
    return 0.02 * (dropcompute_factors((steps, PACED_RANKS, PARTS), generator) - 1).float()


def everyone_noisy(generator, steps):
    return dropcompute(generator, steps) + 0.3 * (torch.rand(steps, PACED_RANKS, PARTS, generator=generator) < 0.02)


JOBS = {name: (ONE, stretched(scenario)) for name, scenario in SCENARIOS.items()}
for paced_one in (none, slow_rank, stall, dropcompute, everyone_noisy):
    JOBS[f"head-to-head: {paced_one.__name__}"] = (PACED, paced(paced_one))


def slow_by(ranks, factor, apart, together):
    """One of the ranks is slow; each varies by itself, and all of them at once."""

    def factors(generator, steps):
        own = apart * torch.randn(steps, ranks, generator=generator)
        drawn = (own + together * torch.randn(steps, 1, generator=generator)).exp()
        drawn[:, 1] *= factor
        return drawn

    return factors


def training_jobs():
    """Name, job, and what draws its steps: (steps, ranks, units)."""
    ways = {
        "stages": (ONE.units, LateHandling()),
        "micro-batches": (Work(0.1, num_microbatches=4).units("microbatch"), LateHandling(granularity="microbatch")),
        "steps": (Work(0.1).units("step"), LateHandling(granularity="step")),
    }
    machines = {"3 % noise": (0.03, 0.0), "10 % shared": (0.03, 0.1), "a shared machine": (0.27, 0.24)}
    for (way, (units, late_handling)), (machine, spread), ranks, factor in product(
        ways.items(), machines.items(), (3, 6), (1, 1.5, 2, 4, 8)
    ):
        job = Job(units, ranks, 0.1, late_handling)
        drawn = stretched(slow_by(ranks, factor, *spread), units)
        yield f"{way}, {machine}, {ranks} ranks, one {factor} times as slow", job, drawn


def outcome(job, unit_s, deadline_s, after_quorum_s=0.0):
    """Seconds and shares dropped of each step under a deadline, a number or one for each step."""
    rules = replace(job.rules, after_quorum_s=after_quorum_s)
    done = simulate_step(unit_s, deadline_s, rules)
    return done.seconds, 1 - (computed_share(unit_s, done, rules, job.units.silent) @ job.units.share).mean(1)


def rate(seconds, dropped):
    return float((1 - dropped).sum() / seconds.sum())


def oracle(job, unit_s):
    """Gradient per second with the best threshold for each step."""
    ways = [outcome(job, unit_s, one_s) for one_s in [*job.grid, math.inf]]
    seconds, dropped = map(torch.stack, zip(*ways, strict=True))
    best = 0.0
    for _ in range(20):  # Dinkelbach: the steps that are best at a price of `best` for each second
        each = (1 - dropped - best * seconds).argmax(0, keepdim=True)
        best = rate(seconds.gather(0, each), dropped.gather(0, each))
    return best


def step_times(job, unit_s):
    share = job.units.share.expand_as(unit_s)
    at_once, quorum_s = torch.zeros_like(unit_s[..., 0]), unit_s[..., -1].kthvalue(job.rules.quorum, dim=1).values
    return StepTimes(unit_s, share, at_once, at_once[:, 0], quorum_s)


def choose(job, unit_s, options):
    steps = step_times(job, unit_s)
    return choose_for(
        steps,
        job.rules,
        longest_s=options.max_over_median * quantile_of(unit_s[..., -1].median(1).values, 0.1),
        least_gain=options.least_gain,
        price=price_of(steps.end_s, dealt=options.dealt),
        parts=parts_of(len(job.units.stage_share), job.late_handling.granularity, job.units.checks),
    )


def judge(job, draw, options):
    outcome_of = partial(outcome, job)
    unit_s = draw(torch.Generator().manual_seed(options.seed), FIRST + JUDGED * options.windows)
    starts = range(0, JUDGED * options.windows, JUDGED)
    ends = [first + FIRST for first in starts]
    chosen = [choose(job, unit_s[max(0, end - SEEN) : end], options) for end in ends]
    judged = unit_s[FIRST:]
    parts = zip(judged.split(JUDGED), chosen, strict=True)
    each = [outcome_of(part, one.tau_s, one.after_quorum_s) for part, one in parts]
    waiting, auto = rate(*outcome_of(judged, math.inf)), tuple(map(torch.cat, zip(*each, strict=True)))
    best_s = max(job.grid, key=lambda one_s: rate(*outcome_of(judged, one_s)))
    quantile_s = torch.tensor([1.2 * quantile_of(unit_s[first : first + FIRST, :, -1], 0.5) for first in starts])
    worst_s = outcome_of(judged, quantile_s.repeat_interleave(JUDGED))[0].max()
    best, known = outcome_of(judged, best_s), oracle(job, judged)
    changes = sum(abs(one.tau_s / other.tau_s - 1) > 0.1 for one, other in pairwise(chosen))
    return (
        f"{rate(*auto) / waiting - 1:.1%}",
        f"{rate(*best) / waiting - 1:.1%} at {best_s:.3f} s",
        f"{rate(*auto) / max(waiting, rate(*best)):.3f}",
        f"{rate(*auto) / known:.3f}",
        f"{(1 / waiting - 1 / rate(*auto)) / (1 / waiting - 1 / known):.3f}",
        f"{float(auto[1].mean()):.2%}",
        f"{float(best[1].mean()):.2%}",
        f"{float(auto[0].max() / worst_s):.2f}",
        f"{changes} of {len(chosen) - 1}",
    )


def judge_in_training(job, draw, options):
    unit_s = draw(torch.Generator().manual_seed(options.seed), FIRST + JUDGED * options.windows)
    own_s = unit_s.diff(dim=2, prepend=torch.zeros_like(unit_s[..., :1]))
    policy = AutoDeadline(least_gain=options.least_gain, max_over_median=options.max_over_median)
    done = simulate_times(own_s, job.units, policy, job.late_handling, Constant())
    judged, seconds, dropped = unit_s[FIRST:], done.step_s[FIRST:], done.dropped[FIRST:]
    waiting, auto = rate(*outcome(job, judged, math.inf)), rate(seconds, dropped)
    best_s = max(job.grid, key=lambda one_s: rate(*outcome(job, judged, one_s)))
    best = outcome(job, judged, best_s)
    windows = seconds.view(-1, JUDGED).mean(1)
    return (
        f"{auto / waiting - 1:.1%}",
        f"{rate(*best) / waiting - 1:.1%} at {best_s:.3f} s",
        f"{auto / max(waiting, rate(*best)):.3f}",
        f"{float(dropped.mean()):.2%}",
        f"{float(best[1].mean()):.2%}",
        f"{float(windows.max() / windows.min()):.2f}",
    )


SHORT_S, LAYERS, MERGE_S, SHORT_RANKS, SHORT_STEPS = 0.08, 8, 0.005, 4, 450


def short_jobs(seed):
    """Name, when each unit of work ends, (steps, ranks, units), and how long each rank loads, (steps, ranks)."""
    generator = torch.Generator().manual_seed(seed)
    shape = SHORT_STEPS, SHORT_RANKS
    usual = 1 + 0.05 * torch.randn(shape, generator=generator).clamp(min=-5)
    by_chance = torch.rand(shape, generator=generator)
    units = Work(SHORT_S, num_stages=LAYERS).units("stage")
    for name, factor, load_s in (
        ("layers, twice as slow", 2.0, 0.0),
        ("layers, six times as slow", 6.0, 0.0),
        ("loader, 0.1 s", 1.0, 0.1),
        ("loader, 0.4 s", 1.0, 0.4),
        ("loader, 1 s", 1.0, 1.0),
        ("loader, 0.4 s in each tenth batch", 1.0, None),
    ):
        slow, loads_s = usual.clone(), torch.zeros(shape)
        slow[:, 1] *= factor
        loads_s[:, 1] = 0.4 * (by_chance[:, 1] < 0.1) if load_s is None else load_s * (0.75 + 0.5 * by_chance[:, 1])
        yield name, slow.unsqueeze(2) * units.base_s.cumsum(0), loads_s


def with_late_loader(unit_s, loads_s, policy, late_handling):
    """Seconds of each step, and what was dropped in it."""
    steps, ranks, _ = unit_s.shape
    units = Work(SHORT_S, num_stages=LAYERS).units("stage")
    rules = replace(StopRules.of(policy, late_handling, ranks), checks=1)
    policy.prepare(late_handling, [1] * LAYERS)
    loop, rows = SimulatedRanks(policy, rules, num_ranks=ranks, stage_share=units.stage_share), []
    for step in range(steps):
        begin_s = torch.where(loop.stood_in, loop.behind_s, loads_s[step])  # what it was late with is loaded once
        given = GivenStep(unit_s[step], units.share.expand(ranks, -1), begin_s)
        ended = loop.step(given, lambda done: float(done.seconds) + MERGE_S)
        rows.append((ended.seconds, float(1 - (ended.part @ units.share).mean())))
    return torch.tensor(rows)[FIRST:].unbind(1)


def judge_short(unit_s, loads_s):
    waiting = rate(*with_late_loader(unit_s, loads_s, FixedDeadline(1000.0), LateHandling(quorum=SHORT_RANKS)))
    fixed = {
        (one_s, grace_s): with_late_loader(unit_s, loads_s, FixedDeadline(one_s), LateHandling(grace_s=grace_s))
        for one_s, grace_s in product([SHORT_S * 0.7 * 1.25**number for number in range(6)], (0.005, 0.02, 0.05))
    }
    best_s = max(fixed, key=lambda one: rate(*fixed[one]))
    auto = with_late_loader(unit_s, loads_s, AutoDeadline(), LateHandling())
    before = with_late_loader(unit_s, loads_s, AutoDeadline(), LateHandling(grace_s=0.05))
    best = rate(*fixed[best_s])
    return (
        f"{best / waiting - 1:.1%} at {1e3 * best_s[0]:.0f} + {1e3 * best_s[1]:.0f} ms",
        f"{rate(*auto) / best:.3f}",
        f"{rate(*before) / best:.3f}",
        f"{1e3 * float(auto[0].mean()):.0f}",
        f"{float(auto[1].mean()):.2%}",
        f"{float(fixed[best_s][1].mean()):.2%}",
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least-gain", type=float, default=0.1)
    parser.add_argument("--max-over-median", type=float, default=1.4)
    parser.add_argument("--only", default="", help="scenarios with this in their name")
    parser.add_argument("--dealt", action="store_true", help="as where work is dealt out by speed")
    parser.add_argument("--in-training", action="store_true", help="it sees what its own deadlines left of the steps")
    parser.add_argument("--short-steps", action="store_true", help="a slow loader, or slow layers, in steps of 80 ms")
    options = parser.parse_args()
    if options.short_steps:
        names = (
            "slow in its",
            "best fixed: gain, at + grace",
            "over it",
            "with 50 ms",
            "step, ms",
            "dropped",
            "by the best",
        )
        rows = [(name, *judge_short(*job)) for name, *job in short_jobs(options.seed) if options.only in name]
        print(text_table([names, *rows]))
        return
    if options.in_training:
        names = ("", "gain", "of the best fixed", "over it", "dropped", "by the best", "longest window over shortest")
        rows = [(name, *judge_in_training(*job, options)) for name, *job in training_jobs() if options.only in name]
        print(text_table([names, *rows]))
        return
    names = ("", "gain", "of the best fixed", "over it", "over the oracle", "of the seconds it saves")
    rows = [(*names, "dropped", "by the best", "longest step", "changes over 10 %")]
    rows += [(name, *judge(*job, options)) for name, job in JOBS.items() if options.only in name]
    print(text_table(rows))


if __name__ == "__main__":
    main()
