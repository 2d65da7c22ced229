"""E3: the expected slowest of many ranks, against the formula for normally distributed times."""

from __future__ import annotations

import math
from statistics import NormalDist, fmean, stdev

from experiments.result import Line, Result
from straggle.lab.simulate.delays import Delays, DropCompute, Normal
from straggle.lab.simulate.ranks import simulate
from straggle.lab.simulate.units import Work
from straggle.policies.deadline import LateHandling, WaitForAll

MICROBATCHES = 12
STD = 0.581 / 1.5  # of a micro-batch, relative to its mean, in DropCompute's model
LOW_BY = {8: 1.8, 200: 8.0, 2048: 11.0}  # per cent, expected for log-normal times
_GAMMA = 0.5772156649015329


def expected_slowest(ranks: int, mean: float, std: float, microbatches: int = MICROBATCHES) -> float:
    """``M mu + sqrt(M) sigma ((1 - g) Phi^-1(1 - 1/N) + g Phi^-1(1 - 1/(eN)))``, ``g`` Euler's constant."""
    quantile = NormalDist().inv_cdf
    spread = (1 - _GAMMA) * quantile(1 - 1 / ranks) + _GAMMA * quantile(1 - 1 / (math.e * ranks))
    return microbatches * mean + math.sqrt(microbatches) * std * spread


def run(quick: bool) -> Result:
    """The mean over steps of the slowest rank's time."""
    lines = []
    for name, delays, mean, std in (
        ("normal", Normal(0.2), 1.0, 0.2),
        ("DropCompute's log-normal", DropCompute(), 1.5, 0.581),
    ):
        for ranks in LOW_BY:
            slowest, error = _slowest(delays, ranks, quick)
            low_by = 100 * (1 - expected_slowest(ranks, mean, std) / slowest)
            measured = f"{low_by:.2f} % (+- {100 * error / slowest:.2f})"
            if name == "normal":
                lines.append(Line(f"{name}, N = {ranks}: formula low by", "0 +- 0.3 %", measured, abs(low_by) <= 0.3))
            else:
                fine = abs(low_by - LOW_BY[ranks]) <= 0.5
                lines.append(Line(f"{name}, N = {ranks}: formula low by", f"{LOW_BY[ranks]} +- 0.5 %", measured, fine))
    notes = (f"{MICROBATCHES} micro-batches a step; behind +-, the standard error of the mean over steps.",)
    return Result("the slowest of N ranks against the formula for normal times", tuple(lines), notes)


def _slowest(delays: Delays, ranks: int, quick: bool) -> tuple[float, float]:
    """Mean seconds of the slowest rank, micro-batches of one second before delays, and its standard error."""
    steps = max(200, min(40_000, 12_000_000 // ranks)) // (4 if quick else 1)
    work = Work(1.0 * MICROBATCHES, num_microbatches=MICROBATCHES, num_stages=1)
    late_handling = LateHandling(granularity="microbatch")
    seconds = simulate(steps, ranks, work, delays, WaitForAll(), late_handling=late_handling).step_s.tolist()
    return fmean(seconds), stdev(seconds) / math.sqrt(steps)
