"""E2: effective speedup of the best threshold against the number of ranks, under DropCompute's delays."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Generator, Tensor

from experiments.result import Line, Result
from straggle.lab.simulate.delays import DropCompute
from straggle.lab.simulate.ranks import simulate
from straggle.lab.simulate.units import Work
from straggle.policies.auto_deadline import AutoDeadline
from straggle.policies.deadline import LateHandling
from straggle.policies.step_model import StopRules, simulate_step

MICROBATCHES = 12
EXPECTED = {2: 1.01, 4: 1.07, 8: 1.14, 16: 1.18, 32: 1.25, 64: 1.28, 200: 1.37, 512: 1.42, 2048: 1.50}
BEYOND = (10_000, 100_000)
WORK = Work(1.0 * MICROBATCHES, num_microbatches=MICROBATCHES, num_stages=1)


def step_times(ranks: int, steps: int, seed: int = 0) -> list[Tensor]:
    """When each micro-batch would be finished, for ``steps`` steps: (ranks, micro-batches) each."""
    base_s = WORK.units("microbatch").base_s
    return [
        unit_s.cumsum(1) for unit_s in islice(DropCompute().steps(base_s, ranks, Generator().manual_seed(seed)), steps)
    ]


def best_speedup(times: list[Tensor], num_candidates: int = 60) -> tuple[float, float]:
    """The largest effective speedup over thresholds, and its threshold in seconds.

    ``S(tau) = (finished micro-batches / M) * T / min(tau, T)``, means over steps, ``T`` the slowest rank's time.
    """
    whole_s = torch.stack([unit_s[:, -1].amax() for unit_s in times])
    found = []
    for tau in torch.linspace(0.5 * MICROBATCHES, float(whole_s.max()), num_candidates).tolist():
        kept = sum(float((unit_s < tau).float().mean()) for unit_s in times) / len(times)
        found.append((kept * float(whole_s.mean() / whole_s.clamp(max=tau).mean()), tau))
    return max(found)


def best_speedup_of_half(times: list[Tensor], num_candidates: int = 20) -> float:
    """The same where no rank is late before half of the ranks have finished, as by default in training."""
    rules = StopRules(max(1, times[0].shape[0] // 2))
    all_s = sum(float(unit_s[:, -1].amax()) for unit_s in times)
    found = []
    for tau in torch.linspace(MICROBATCHES, 2.0 * MICROBATCHES, num_candidates).tolist():
        done = [simulate_step(unit_s, tau, rules) for unit_s in times]
        kept = sum(float(d.reached.float().mean()) for d in done) / len(done)
        found.append(kept * all_s / sum(float(d.seconds) for d in done))
    return max(found)


def run(quick: bool) -> Result:
    """The best threshold for each number of ranks, and beside it what `AutoDeadline` comes to by itself."""
    lines: list[Line] = []
    half = []
    for ranks in (*EXPECTED, *BEYOND):
        steps = _steps(ranks, quick)
        times = step_times(ranks, steps)
        speedup, tau = best_speedup(times)
        half.append(Line(f"waiting for half of the ranks, N = {ranks:,}", "", f"{best_speedup_of_half(times):.3f}"))
        expected = EXPECTED.get(ranks)
        shown = f"{speedup:.3f} (tau {tau / (1.5 * MICROBATCHES):.2f} of the mean time; {steps:,} steps)"
        ok = None if expected is None else abs(speedup - expected) <= 0.02
        lines.append(Line(f"N = {ranks:,}", "" if expected is None else f"{expected} +- 0.02", shown, ok))
    lines += half
    lines += [
        Line(f"AutoDeadline, N = {ranks:,}", "", f"{_auto(ranks, 60 if quick else 400):.3f}") for ranks in EXPECTED
    ]
    notes = (
        "The threshold drops micro-batches that are not finished, the running one included. Waiting for half: no rank",
        "is late before half of the ranks have finished, which is the default in training. AutoDeadline does that too,",
        "chooses its threshold by itself, and lets a late rank finish its running micro-batch for up to a tenth of a",
        "mean one's time; its first ten steps are left out, because in some it waits for all ranks.",
    )
    return Result("effective speedup against the number of ranks, DropCompute's delays", tuple(lines), notes)


def _steps(ranks: int, quick: bool) -> int:
    """Steps to draw: fewer of more ranks, whose slowest varies less."""
    return max(4, min(4000, 4_000_000 // ranks)) // (4 if quick else 1)


def _auto(ranks: int, steps: int) -> float:
    """AutoDeadline's effective speedup, its warm-up left out."""
    late_handling = LateHandling(granularity="microbatch", grace_s=0.15)
    return simulate(steps, ranks, WORK, DropCompute(), AutoDeadline(), late_handling=late_handling).speedup_after(10)
