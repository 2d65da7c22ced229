"""AutoDeadline's own word: what it expects to be dropped, beside what is, on real ranks under several delays."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Generator

from experiments._real import Method, Setup, run_real
from experiments.result import Line, Result
from straggle.lab.simulate.delays import DropCompute, SlowRanks, Stalls
from straggle.lab.simulate.units import Work
from straggle.policies.auto_deadline import AutoDeadline
from straggle.policies.deadline import LateHandling

RANKS = 4
DELAYS = {
    "one rank twice as slow": SlowRanks(DropCompute(), 0.25, 2.0),
    "DropCompute's delays": DropCompute(),
    "stalls": Stalls(DropCompute(factor=0.2), probability=0.05, seconds=0.3),
}
METHODS = {
    "stages": (Work(0.24, num_stages=12, forward_share=1 / 3), Method(AutoDeadline)),
    "12 micro-batches": (
        Work(0.24, num_stages=12, num_microbatches=12, forward_share=1.0),
        Method(AutoDeadline, LateHandling(granularity="microbatch", grace_s=0.2)),
    ),
}
SKIP = 20  # steps: in the first it waits for all ranks, then it chooses from a few


def run(quick: bool) -> Result:
    """Four processes under each of the delays."""
    lines = []
    for unit, (work, method) in METHODS.items():
        for name, delays in DELAYS.items():
            units = work.units(method.late_handling.granularity)
            drawn = delays.steps(units.base_s, RANKS, Generator().manual_seed(1))
            unit_s = torch.stack(list(islice(drawn, 60 if quick else 200)))
            measured = run_real(Setup(unit_s, work, {"auto": method}, method.late_handling.granularity == "microbatch"))
            run = measured["auto"].after(SKIP)
            predicted, dropped = float(run.predicted.mean()), float(run.dropped.mean())
            off = 100 * (dropped - predicted)
            shown = f"{dropped:.2%} ({off:+.2f} points)"
            lines.append(Line(f"{unit}, {name}", f"{predicted:.2%} +- 1 point", shown, abs(off) <= 1))
    notes = (f"{RANKS} processes of one machine, whose layers sleep; the first {SKIP} steps are left out.",)
    return Result("what AutoDeadline drops, and what it says", tuple(lines), notes)
