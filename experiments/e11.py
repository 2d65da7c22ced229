"""E11: four ranks, 200 ms of busy work more in rank 1's backward pass; who is named, and what DDP's own timers show."""

from __future__ import annotations

import os

from experiments._watched import RANKS, SLOW, run_watched
from experiments.result import Line, Result
from straggle.advise.slow import ATTRIBUTED, find_slow_ranks
from straggle.advise.slow import SLOW as SLOW_AT

EXTRA_S = 0.2
_TIMERS = {
    "avg_backward_compute_time": "backward",
    "avg_backward_comm_time": "allreduce",
}


def run(quick: bool) -> Result:
    """One run; only rank 1 spins, so one core beside those that wait is enough."""
    kind = "spin" if (os.cpu_count() or 1) > 1 else "sleep"
    timings, timers = run_watched(30 if quick else 120, 1, kind, [EXTRA_S])
    slowness = find_slow_ranks(timings)
    worst = slowness.ranks[0] if slowness.ranks else None
    named = [rank.rank for rank in slowness.ranks]
    share = 0.0 if worst is None else worst.lost_share * worst.phases["backward"]
    complete_ms = [sum(timer.get(key, 0) for key in _TIMERS) / 1e6 for timer in timers]
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
        ),
    )
    notes = (
        f"{timings.num_steps} steps under DDP, gloo. The ordinary work of a layer is a sleep; the {1e3 * EXTRA_S:.0f} "
        f"ms are spent by a {kind}. DDP's timers are those of ddp._get_ddp_logging_data(), means over the steps "
        "that it samples; a complete backward pass is the sum of its backward and its allreduce. Which of them the "
        "published numbers are is not known.",
    )
    title = f"E11: {1e3 * EXTRA_S:.0f} ms of busy work in the backward pass of rank {SLOW}"
    return Result(title, lines, notes)


def _list(values_ms: list[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values_ms) + " ms"
