"""E1: the automatic threshold of DropCompute, in the published system's setting (Giladi et al. 2023, algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, pstdev

import torch
from torch import Generator, Tensor

from experiments.result import Line, Result
from straggle.lab.faults import dropcompute_factors

RANKS, MICROBATCHES, STEPS = 16, 12, 44
BASE_S, OVERHEAD_S = 0.3256, 1.97


@dataclass(frozen=True)
class Threshold:
    """``tau_s`` and what is expected of it: the share ``dropped``, and the ``gain`` (0.1: a tenth more per second)."""

    tau_s: float
    dropped: float
    gain: float


def threshold(t: Tensor, overhead_s: Tensor, first: int = 5) -> Threshold:
    """The rule: ``t`` (steps, ranks, micro-batches) are seconds of each micro-batch, ``overhead_s`` (steps,) of merges.

    It does not say which of several equally good thresholds; between two times they all are. The longest is taken.
    """
    a = t.cumsum(-1)
    ends = a.flatten(1).sort(-1).values
    slowest, most = ends[:, -1], ends.shape[1]
    taus = torch.linspace(float(a[..., first:].min()), float(a.max()), 200, dtype=a.dtype)
    in_time = torch.searchsorted(ends, taus.expand(len(ends), -1).contiguous())  # of each step, for each threshold
    last_s = torch.cat([torch.zeros_like(ends[:, :1]), ends], 1).gather(1, in_time)
    saved = (slowest.unsqueeze(1) - last_s) / (slowest + overhead_s).unsqueeze(1)
    dropped = 1 - in_time / most
    gain = ((1 - dropped) / (1 - saved) - 1).where(saved < 1, -1.0).mean(0)
    best = int((gain == gain.max()).nonzero().max())
    return Threshold(float(taus[best]), float(dropped[:, best].mean()), float(gain[best]))


def draw(seed: int) -> Tensor:
    """Micro-batch times of the published run's setting."""
    factors = dropcompute_factors((STEPS, RANKS, MICROBATCHES), Generator().manual_seed(seed))
    return BASE_S * factors


def run(quick: bool) -> Result:
    """The threshold over many draws of the setting."""
    draws = 20 if quick else 200
    overhead_s = torch.full((STEPS,), OVERHEAD_S)
    chosen = [threshold(draw(seed), overhead_s) for seed in range(draws)]
    lines = [
        _line("tau, s", [own.tau_s for own in chosen], 5.68, 0.09, "{:.2f}"),
        _line("dropped, %", [100 * own.dropped for own in chosen], 8.0, 0.9, "{:.1f}"),
        _line("predicted gain, %", [100 * own.gain for own in chosen], 11.2, 1.0, "{:.1f}"),
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
