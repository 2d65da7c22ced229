"""E4: DropCompute's delays on real ranks: effective speedup, and how much less the step time varies."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from experiments._real import Measured, Method, Setup, run_real
from experiments.e2 import EXPECTED, MICROBATCHES, step_times
from experiments.result import Line, Result
from straggle.lab.simulate.communication import Constant
from straggle.lab.simulate.ranks import effective_speedup, simulate_times
from straggle.lab.simulate.units import Work
from straggle.policies.auto_deadline import AutoDeadline
from straggle.policies.deadline import FixedDeadline, LateHandling, WaitForAll

MICROBATCH_S = 0.020
TAU_S = 0.95 * 1.5 * MICROBATCHES * MICROBATCH_S
LAYERS = 12
SKIP = 12  # steps of warm-up
WORK = Work(MICROBATCHES * MICROBATCH_S, num_microbatches=MICROBATCHES, num_stages=LAYERS, forward_share=1.0)
LATE_HANDLING = LateHandling(quorum=1)
METHODS = {
    "wait for all": Method(WaitForAll),
    "fixed": Method(partial(FixedDeadline, TAU_S), LATE_HANDLING),
    "auto": Method(AutoDeadline, LATE_HANDLING),
    "complete": Method(partial(FixedDeadline, TAU_S), LateHandling(quorum=1, granularity="microbatch", grace_s=0.15)),
}
NAMES = {
    "fixed": f"threshold of {TAU_S:.3f} s",
    "auto": "AutoDeadline",
    "complete": f"threshold of {TAU_S:.3f} s, running micro-batch finished",
}


def run(quick: bool) -> Result:
    """Four and eight processes."""
    lines: list[Line] = []
    for ranks in (4, 8):
        unit_s = delays(ranks, 40 if quick else 150)
        measured = run_real(Setup(unit_s, WORK, METHODS, whole_microbatches=True, block=20))
        lines += _lines(ranks, measured, unit_s)
    notes = (
        f"{MICROBATCHES} micro-batches of {1000 * MICROBATCH_S:.0f} ms, DropCompute's delays, gloo, all ranks on one",
        "machine; the methods take turns on the same delays. A rank stops between two layers of the forward pass, and",
        "its running micro-batch is dropped, as in E2. The last variant finishes that first, which costs what",
        "micro-batches vary by. The simulator is given what a step takes beside its slowest rank's work, as measured.",
        f"The first {SKIP} steps are left out.",
    )
    return Result("DropCompute's delays on real ranks", tuple(lines), notes)


def delays(ranks: int, steps: int) -> Tensor:
    """Seconds of each micro-batch: (steps, ranks, micro-batches)."""
    ends = torch.stack(step_times(ranks, steps, seed=4))  # of micro-batches of one second
    return MICROBATCH_S * ends.diff(dim=-1, prepend=torch.zeros_like(ends[..., :1]))


def _lines(ranks: int, measured: dict[str, Measured], unit_s: Tensor) -> list[Line]:
    measured = {name: run.after(SKIP) for name, run in measured.items()}
    every = measured["wait for all"]
    beside = f"{_step_time(every)}, {1e3 * float(every.overhead_s.median()):.0f} ms beside the slowest rank's work"
    rows = [Line(f"{ranks} ranks, wait for all: step time", "", beside)]
    for name, label in NAMES.items():
        run = measured[name]
        speedup = effective_speedup(run.dropped, run.step_s, every.step_s)
        calmer = float(every.step_s.std() / run.step_s.std())
        what = f"{ranks} ranks, {label}"
        simulated = _simulated(name, unit_s, float(every.overhead_s.median()))
        shown = f"{speedup:.3f} (simulated {simulated:.3f})"
        if name == "fixed":
            fine = abs(speedup / EXPECTED[ranks] - 1) <= 0.03
            rows.append(Line(f"{what}: effective speedup", f"{EXPECTED[ranks]} +- 3 %", shown, fine))
            rows.append(Line(f"{what}: spread smaller by", ">= 4", f"{calmer:.1f}", calmer >= 4))
        else:
            rows.append(Line(f"{what}: effective speedup", "", shown))
        rows.append(Line(f"{what}: step time", "", f"{_step_time(run)}, dropped {float(run.dropped.mean()):.1%}"))
    return rows


def _simulated(name: str, unit_s: Tensor, overhead_s: float) -> float:
    """The simulator's effective speedup under the same delays."""
    method = METHODS[name]
    units = replace(WORK.units(method.late_handling.granularity), overhead_s=overhead_s)
    nothing = unit_s.new_zeros((*unit_s.shape[:2], len(units.base_s) - MICROBATCHES))  # backward takes no time
    times = torch.cat([unit_s, nothing], -1)
    return simulate_times(times, units, method.deadline(), method.late_handling, Constant()).speedup_after(SKIP)


def _step_time(run: Measured) -> str:
    return f"{1e3 * float(run.step_s.mean()):.0f} +- {1e3 * float(run.step_s.std()):.0f} ms"
