"""The simulator against real ranks: the same delays, the same policies, mean and 95th percentile of the step time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Generator, Tensor

from experiments._plot import save_lines
from experiments._real import Measured, Method, Setup, run_real
from experiments.result import Line, Result
from straggle.lab.simulate.communication import Constant
from straggle.lab.simulate.delays import DropCompute, SlowRanks
from straggle.lab.simulate.ranks import simulate_times
from straggle.lab.simulate.units import Work
from straggle.policies.auto_deadline import AutoDeadline
from straggle.policies.deadline import FirstK, QuantileDeadline, WaitForAll
from straggle.policies.wrappers import Shadow

LAYERS = 4  # of a stage, after which a late rank can stop
WORK = Work(0.24, num_stages=12, forward_share=1 / 3, checks_per_stage=LAYERS)
DELAYS = {
    "DropCompute's delays": DropCompute(),
    "and one rank in four twice as slow": SlowRanks(DropCompute(), 0.25, 2.0),
}
SKIP = 12  # steps of warm-up
SHADOW = "AutoDeadline, in shadow"  # no rank is stopped, but its choice takes its time


def methods(ranks: int) -> dict[str, Method]:
    """The policies that are compared."""
    return {
        "WaitForAll": Method(WaitForAll),
        "QuantileDeadline": Method(partial(QuantileDeadline, 0.5, 1.1)),
        "AutoDeadline": Method(AutoDeadline),
        f"FirstK({ranks - 1})": Method(partial(FirstK, ranks - 1)),
    }


def run(quick: bool, out: Path) -> Result:
    """Four and eight processes, each under two models of delays."""
    lines: list[Line] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    for ranks in (4, 8):
        for name, delays in DELAYS.items():
            drawn = delays.steps(WORK.units("stage").base_s, ranks, Generator().manual_seed(ranks))
            unit_s = torch.stack(list(islice(drawn, 40 if quick else 100)))
            compared = methods(ranks)
            setup = Setup(unit_s, WORK, {**compared, SHADOW: Method(partial(Shadow, AutoDeadline()))}, slices=LAYERS)
            measured = run_real(setup)
            overheads = {method: measured[method].overhead_s[SKIP:] for method in ("WaitForAll", SHADOW)}
            shown = "; ".join(f"{method}: {_spread(overhead_s)}" for method, overhead_s in overheads.items())
            lines.append(Line(f"{ranks} ranks, {name}: a step's overhead", "", shown))
            for method, how in compared.items():
                overhead_s = overheads[SHADOW if method == "AutoDeadline" else "WaitForAll"]
                real = measured[method]
                step_s, dropped = simulation(unit_s, how, overhead_s)
                lines += comparison(f"  {method}", step_s, dropped, real)
                points = curves.setdefault(f"{ranks} ranks", [])
                points.append((1e3 * float(step_s.mean()), 1e3 * float(real.step_s[SKIP:].mean())))
    span = [min(p[0] for points in curves.values() for p in points), max(p[0] for c in curves.values() for p in c)]
    plot = save_lines(
        out / "SIMULATOR.png",
        {"equal": [(ms, ms) for ms in span]},
        markers=curves,
        log_x=False,
        xlabel="mean step time, simulated, ms",
        ylabel="measured, ms",
    )
    notes = (
        "gloo, all ranks on one machine, whose layers sleep; policies take turns on the same delays. What a step takes",
        "beside its slowest rank's work is measured while all ranks are waited for (for AutoDeadline, by its shadow,",
        "because its choice takes time); the simulator is given the median, and each of its steps the difference of a",
        "measured one from that, drawn at random.",
        f"The first {SKIP} steps are left out.",
    )
    return Result("the simulator against real ranks", tuple(lines), notes, plot)


def _spread(overhead_s: Tensor) -> str:
    return " and ".join(
        f"{name} {1e3 * float(overhead_s.quantile(q)):.1f} ms" for name, q in (("median", 0.5), ("p95", 0.95))
    )


def simulation(unit_s: Tensor, method: Method, overhead_s: Tensor) -> tuple[Tensor, Tensor]:
    """Step times and dropped shares of the simulator under the same delays, and of such overheads."""
    median_s = float(overhead_s.median())
    units = replace(WORK.units(method.late_handling.granularity), overhead_s=median_s)
    simulated = simulate_times(unit_s, units, method.deadline(), method.late_handling, Constant())
    step_s = simulated.step_s[SKIP:]
    drawn = torch.randint(len(overhead_s), step_s.shape, generator=Generator().manual_seed(0))
    return step_s + overhead_s[drawn] - median_s, simulated.dropped[SKIP:]


def comparison(what: str, ours: Tensor, dropped: Tensor, real: Measured) -> list[Line]:
    """Mean and 95th percentile of the step time, and the share that was dropped."""
    rows, theirs = list[Line](), real.step_s[SKIP:]
    for name, of in (("mean", torch.mean), ("p95", partial(torch.quantile, q=0.95))):
        expected, found = float(of(ours)), float(of(theirs))
        shown = f"{1e3 * found:.1f} ms ({found / expected - 1:+.1%})"
        rows.append(
            Line(f"{what}: {name}", f"{1e3 * expected:.1f} ms +- 5 %", shown, abs(found / expected - 1) <= 0.05)
        )
    drops = [float(shares.mean()) for shares in (dropped, real.dropped[SKIP:])]
    rows.append(Line(f"{what}: dropped", f"{drops[0]:.1%}", f"{drops[1]:.1%}"))
    return rows
