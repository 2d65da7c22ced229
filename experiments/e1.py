"""E1: the automatic threshold, against a literal transcription of its rule and the published system's setting."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import torch
from torch import Generator, Tensor

from experiments.result import Line, Result
from straggle.lab.faults import dropcompute_factors
from straggle.policies.thresholds import StepTimes, Threshold, choose_threshold

RANKS, MICROBATCHES, STEPS = 16, 12, 44
BASE_S, OVERHEAD_S = 0.3256, 1.97


def literal_threshold(t: Tensor, overhead_s: Tensor, first: int = 5) -> Threshold:
    """The rule as it is written, in loops: ``t`` (steps, ranks, micro-batches) are seconds of each micro-batch.

    It does not say which of several equally good thresholds; between two times they all are. The longest is taken.
    """
    a = t.cumsum(-1)
    best = Threshold(0.0, 0.0, -math.inf)
    for tau in torch.linspace(float(a[..., first:].min()), float(a.max()), 200, dtype=a.dtype):
        gains, drops = [], []
        for step, overhead in zip(a, overhead_s.tolist(), strict=True):
            slowest = float(step.max())
            before = step[step < tau]
            s = (slowest - (float(before.max()) if len(before) else 0.0)) / (slowest + overhead)
            d = float((step >= tau).sum()) / step.numel()
            gains.append((1 - d) / (1 - s) - 1 if s < 1 else -1.0)
            drops.append(d)
        if fmean(gains) >= best.gain:
            best = Threshold(float(tau), fmean(drops), fmean(gains))
    return best


def draw(seed: int, steps: int = STEPS, ranks: int = RANKS, units: int = MICROBATCHES) -> Tensor:
    """Micro-batch times of the published run's setting."""
    factors = dropcompute_factors((steps, ranks, units), Generator().manual_seed(seed))
    return BASE_S * factors


def run(quick: bool) -> Result:
    """The threshold over many draws of the setting, and against the transcription on inputs of many shapes."""
    draws = 20 if quick else 200
    overhead_s = torch.full((STEPS,), OVERHEAD_S, dtype=torch.float64)
    chosen = [choose_threshold(StepTimes.entered_at_once(draw(seed).cumsum(-1), overhead_s)) for seed in range(draws)]
    inputs = 10 if quick else 60
    same = sum(_agrees(seed) for seed in range(inputs))
    lines = [
        _line("tau, s", [c.tau_s for c in chosen], 5.68, 0.09, "{:.2f}"),
        _line("dropped, %", [100 * c.dropped for c in chosen], 8.0, 0.9, "{:.1f}"),
        _line("predicted gain, %", [100 * c.gain for c in chosen], 11.2, 1.0, "{:.1f}"),
        Line("the same tau as the rule in loops, on random inputs", f"{inputs} of {inputs}", f"{same}", same == inputs),
    ]
    notes = (
        f"{RANKS} ranks, {MICROBATCHES} micro-batches of {BASE_S} s before their delay, {STEPS} steps, {OVERHEAD_S} s",
        f"of communication; mean and standard deviation over {draws} draws. The published run, a single one, printed",
        "5.99 s, 7.45 %, 8.3 %.",
    )
    return Result("automatic threshold of DropCompute", tuple(lines), notes)


def _line(what: str, values: list[float], expected: float, tolerance: float, form: str) -> Line:
    mean = fmean(values)
    measured = f"{form.format(mean)} (spread {form.format(pstdev(values))})"
    return Line(what, f"{expected} +- {tolerance}", measured, abs(mean - expected) <= tolerance)


def _agrees(seed: int) -> bool:
    """Whether both give the same threshold for an input of random shape, spread and overhead."""
    generator = Generator().manual_seed(seed)
    steps, ranks, units = (int(torch.randint(1, most, (), generator=generator)) for most in (9, 12, 15))
    spread = float(torch.rand((), generator=generator)) * 2
    t = (torch.randn((steps, ranks, units), generator=generator, dtype=torch.float64) * spread).exp()
    overhead_s = torch.rand(steps, generator=generator, dtype=torch.float64) * 5
    ours, literal = (
        choose_threshold(StepTimes.entered_at_once(t.cumsum(-1), overhead_s)),
        literal_threshold(t, overhead_s, min(5, units - 1)),
    )
    return all(abs(a - b) <= 1e-9 for a, b in zip(vars(ours).values(), vars(literal).values(), strict=True))
