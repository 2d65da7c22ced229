"""E11: four ranks, 200 ms of busy work more in rank 1's backward pass; who is named, and what DDP's own timers show."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from experiments._watched import RANKS, SLOW, run_watched
from experiments.result import Line, Result
from straggle.advise.slow import ATTRIBUTED, find_slow_ranks
from straggle.advise.slow import SLOW as SLOW_AT
from straggle.advise.timings import PHASES, Timings

EXTRA_S = 0.2
_TIMERS = {
    "avg_forward_compute_time": "forward",
    "avg_backward_compute_time": "backward",
    "avg_backward_comm_time": "allreduce",
}
_COLORS = {"forward": "tab:blue", "backward": "tab:orange", "data": "tab:green", "pauses": "tab:red"}
_PARTS = ("avg_backward_compute_time", "avg_backward_comm_time")


def run(quick: bool, out: Path) -> Result:
    """One run; only rank 1 spins, so one core beside those that wait is enough."""
    kind = "spin" if (os.cpu_count() or 1) > 1 else "sleep"
    timings = run_watched(out / "E11", 30 if quick else 120, 1, kind, [EXTRA_S])
    slowness = find_slow_ranks(timings)
    worst = slowness.ranks[0] if slowness.ranks else None
    named = [rank.rank for rank in slowness.ranks]
    share = 0.0 if worst is None else worst.lost_share * worst.phases["backward"]
    timers = [json.loads((out / "E11" / f"ddp{rank}.json").read_text()) for rank in range(RANKS)]
    complete_ms = [sum(t.get(key, 0) for key in t if key in _PARTS) / 1e6 for t in timers]
    found = "no rank" if worst is None else f"rank {worst.rank}, {1e3 * worst.excess_s:.1f} ms more than the others"
    lines = (
        Line("ranks that are named", f"rank {SLOW} and no other", f"ranks {named}", named == [SLOW]),
        Line(
            "its excess in a step",
            f"{1e3 * EXTRA_S:.0f} ms +- 10 %",
            found,
            worst is not None and abs(worst.excess_s / EXTRA_S - 1) <= 0.1,
        ),
        Line(
            "phase that is named first",
            "backward",
            "none" if worst is None else worst.named[0],
            worst is not None and worst.named[0] == "backward",
        ),
        Line(
            f"share of the job's excess that is rank {SLOW}'s backward pass",
            f"at least {ATTRIBUTED:.0%}",
            f"{share:.1%}",
            share >= ATTRIBUTED,
        ),
        Line(
            f"DDP's own timers, ranks 0 to {RANKS - 1}: complete backward pass",
            "no culprit: 293.0 / 292.2 / 293.0 / 293.1 ms",
            _list(complete_ms),
            max(complete_ms) / min(complete_ms) < SLOW_AT,
        ),
        *(
            Line(f"of that: {name}", "", _list([timer.get(key, 0) / 1e6 for timer in timers]))
            for key, name in _TIMERS.items()
            if name != "forward"
        ),
    )
    notes = (
        f"{timings.num_steps} steps under DDP, gloo. The ordinary work of a layer is a sleep; the {1e3 * EXTRA_S:.0f} "
        f"ms are spent by a {kind}. DDP's timers are those of ddp._get_ddp_logging_data(), means over the steps "
        "that it samples; a complete backward pass is the sum of its backward and its allreduce. Which of them the "
        "published numbers are is not known.",
    )
    title = f"E11: {1e3 * EXTRA_S:.0f} ms of busy work in the backward pass of rank {SLOW}"
    return Result(title, lines, notes, _plot(out / "E11.png", timings, timers))


def _list(values_ms: list[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values_ms) + " ms"


def _plot(path: Path, timings: Timings, timers: list[dict[str, float]]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 3.4), layout="constrained")
    ours, theirs = figure.subplots(1, 2, sharey=True)
    ranks = [f"rank {rank}" for rank in range(RANKS)]
    wait_s = (timings.seconds[:, None] - timings.own_s).mean(axis=0)
    parts = {phase: timings.phases[phase].mean(axis=0) for phase in PHASES} | {"wait and network": wait_s}
    _stack(
        ours,
        ranks,
        {name: 1e3 * values for name, values in parts.items() if values.max() > 0.01 * timings.seconds.mean()},
    )
    _stack(theirs, ranks, {name: np.array([t.get(key, 0) / 1e6 for t in timers]) for key, name in _TIMERS.items()})
    ours.set_title("straggle.watch")
    theirs.set_title("DDP's own timers")
    ours.set_ylabel("ms in a step")
    figure.savefig(path, dpi=120)
    return path


def _stack(axes: object, ranks: list[str], parts: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    below = np.zeros(len(ranks))
    for name, values in parts.items():
        axes.bar(ranks, values, bottom=below, label=name, color=_COLORS.get(name, "lightgrey"))
        below = below + values
    axes.set_ylim(0, 1.3 * below.max())
    axes.legend(frameon=False, fontsize="small", ncols=len(parts), loc="upper center")
