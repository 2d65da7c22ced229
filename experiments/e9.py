"""E9: backup workers, with step times whose order statistics are known in closed form."""

from __future__ import annotations

import math
from statistics import fmean, stdev

from experiments.result import Line, Result
from straggle.lab.simulate.delays import Exponential
from straggle.lab.simulate.ranks import simulate
from straggle.lab.simulate.units import Work
from straggle.policies.deadline import FirstK

CASES = ((6, 6), (5, 6), (8, 8), (7, 8), (16, 16), (15, 16), (100, 100), (96, 100))


def expected_s(k: int, ranks: int) -> float:
    """``1 + H_N - H_(N-k)``: the k-th of N times ``1 + Exp(1)``."""
    return 1 + sum(1 / n for n in range(ranks - k + 1, ranks + 1))


def run(quick: bool) -> Result:
    """The mean step time under `FirstK` against the closed form; the first step waits for all ranks."""
    lines = []
    for k, ranks in CASES:
        steps = 1000 if quick else 8000
        seconds = simulate(steps + 1, ranks, Work(1.0, num_stages=1, forward_share=0.0), Exponential(1.0), FirstK(k))
        step_s = seconds.step_s[1:].tolist()
        mean, error = fmean(step_s), stdev(step_s) / math.sqrt(steps)
        expected = expected_s(k, ranks)
        within = abs(mean - expected) <= 3.5 * error
        shown = f"{mean:.3f} (+- {error:.3f})"
        lines.append(Line(f"first {k} of {ranks}, s", f"{expected:.2f}", shown, within))
    notes = ("A step takes 1 s and an exponential time of mean 1 s; as expected: within 3.5 standard errors.",)
    return Result("backup workers: the first k of N ranks", tuple(lines), notes)
