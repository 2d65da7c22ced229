"""A simulation in numbers, as a table and as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from straggle.lab.simulate.ranks import Simulation
from straggle.report import in_words

_QUANTILES = {"median": 0.5, "p95": 0.95, "p99": 0.99}
_NAMED = 4  # so many ranks are named in a row
_RANKS_IN_FULL = 1024  # of more ranks, the file has the distribution only


def numbers_of(simulation: Simulation) -> dict[str, Any]:
    """The simulation as plain JSON values."""
    reach = simulation.reach.double()
    known = ~simulation.predicted_drop.isnan()  # not in a warm-up
    predicted = simulation.predicted_drop[known]
    finite = simulation.deadline_s[simulation.deadline_s.isfinite()]
    by_rank = 1 - reach.mean(1)
    numbers = {
        "steps": len(simulation.step_s),
        "ranks": len(reach),
        "effective_speedup": simulation.speedup,
        "step_seconds": _distribution(simulation.step_s),
        "wait_for_all_seconds": _distribution(simulation.all_s),
        "deadline_seconds_median": float(finite.median()) if len(finite) else None,
        "dropped_share": float(simulation.dropped.mean()),
        "predicted_drop": float(predicted.mean()) if len(predicted) else None,
        "dropped_where_predicted": float(simulation.dropped[known].mean()) if len(predicted) else None,
        "late_ranks_mean": float(simulation.late_ranks.mean()),
        "dropped_by_stage": (1 - reach.mean(0)).tolist(),
        "dropped_by_rank": {"max": float(by_rank.max()), **{k: _quantile(by_rank, q) for k, q in _QUANTILES.items()}},
    }
    if simulation.without:
        numbers["without"] = [
            {
                "ranks": list(one.ranks),
                "step_seconds_mean": one.step_s,
                "wait_for_all_seconds_mean": one.all_s,
                "effective_speedup": one.speedup,
            }
            for one in simulation.without
        ]
    if simulation.drawn is not None:
        drawn = simulation.drawn
        numbers["drawn_per_rank"] = {"mean": float(drawn.mean()), "min": float(drawn.min()), "max": float(drawn.max())}
    if len(reach) <= _RANKS_IN_FULL:
        if simulation.drawn is not None:
            numbers["ranks_drawn"] = simulation.drawn.tolist()
        numbers["ranks_dropped"] = by_rank.tolist()
        numbers["ranks_late_steps"] = simulation.late_steps.tolist()
    return numbers


def rows_of(numbers: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """The rows of the table: a label, waiting for all, the policy, and their ratio."""
    every, ours = numbers["wait_for_all_seconds"], numbers["step_seconds"]
    rows = [
        (f"step time, {name}", _ms(every[name]), _ms(ours[name]), f"{ours[name] / every[name]:.3f}")
        for name in ("mean", "stdev", *_QUANTILES)
        if every[name] > 0
    ]
    stages = numbers["dropped_by_stage"]
    return [
        *rows,
        *_without(numbers),
        ("effective speedup", "1", f"{numbers['effective_speedup']:.3f}", ""),
        ("gradients dropped", "0 %", f"{numbers['dropped_share']:.2%}", ""),
        *_predicted(numbers),
        ("  of the first and last stage", "", f"{stages[0]:.2%}, {stages[-1]:.2%}", ""),
        ("  of the rank that drops most", "", f"{numbers['dropped_by_rank']['max']:.2%}", ""),
        ("late ranks in a step", "", f"{numbers['late_ranks_mean']:.1f}", ""),
        *_drawn(numbers),
    ]


def _without(numbers: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """What waiting takes without ranks that are always slow, as the others have their samples."""
    return [
        (
            f"waiting without {_whom(one['ranks'])}",
            _ms(one["wait_for_all_seconds_mean"]),
            _ms(one["step_seconds_mean"]),
            f"{1 / one['effective_speedup']:.3f}",
        )
        for one in numbers.get("without", ())
    ]


def _whom(ranks: list[int]) -> str:
    return in_words(ranks) if len(ranks) <= _NAMED else f"the {len(ranks)} slow ranks"


def _predicted(numbers: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """What the policy predicted to be dropped, beside what was dropped in the same steps."""
    if (predicted := numbers["predicted_drop"]) is None:
        return []
    words = f"{predicted:.2%} (came to {numbers['dropped_where_predicted']:.2%})"
    return [("  predicted by the policy", "", words, "")]


def _drawn(numbers: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """How many micro-batches of a step the ranks computed that drew them."""
    if (drawn := numbers.get("drawn_per_rank")) is None:
        return []
    return [("micro-batches of a rank", f"{drawn['mean']:.1f}", f"{drawn['min']:.1f} to {drawn['max']:.1f}", "")]


def save_chart(simulation: Simulation, path: Path, title: str) -> None:
    """Step times, drop per stage and drop per rank; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    times, stages, ranks = figure.subplots(1, 3)
    figure.suptitle(title, fontsize=11)
    ours = "under the deadline" if simulation.drawn is None else "drawn from a pool"
    both = torch.cat([simulation.step_s, simulation.all_s])
    edges = torch.linspace(float(both.min()), float(both.quantile(0.999)) + 1e-9, 61).tolist()
    for seconds, label in ((simulation.all_s, "waiting for all"), (simulation.step_s, ours)):
        times.hist(seconds.tolist(), bins=edges, alpha=0.6, label=label)
    times.set(xlabel="seconds of a step", ylabel="steps")
    times.legend()
    dropped = 1 - simulation.reach
    stages.bar(range(dropped.shape[1]), (100 * dropped.mean(0)).tolist(), color="tab:orange")
    stages.set(xlabel="stage, in the order of backward", ylabel="dropped, %", ylim=(0, None))
    by_rank = (100 * dropped.mean(1)).sort(descending=True).values
    picked = torch.linspace(0, len(by_rank) - 1, min(len(by_rank), 500)).round().long()
    ranks.step([*picked.tolist(), len(by_rank)], [*by_rank[picked].tolist(), float(by_rank[-1])], where="post")
    ranks.set(xlabel="rank, by what it drops", ylabel="dropped, %", ylim=(0, None), xlim=(0, len(by_rank)))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _distribution(seconds: Tensor) -> dict[str, float]:
    spread = float(seconds.std(correction=0))
    ends = {"mean": float(seconds.mean()), "stdev": spread, "max": float(seconds.max())}
    return ends | {name: _quantile(seconds, q) for name, q in _QUANTILES.items()}


def _quantile(values: Tensor, q: float) -> float:
    """The smallest value that a share ``q`` of all lies at or below; `torch.quantile` takes 16 million at most."""
    return float(values.kthvalue(max(1, math.ceil(q * len(values)))).values)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.4g} ms"
