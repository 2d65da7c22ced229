"""The results: means and intervals, as tables, a file and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from straggle.lab.estimators.runs import WAIT, RunScore
from straggle.lab.estimators.truth import PHASES, Judgement
from straggle.observe.intervals import Interval, mean_interval

BASELINE = "abstain"
DATA = {False: "other ranks late each step, shuffled data", True: "always the same late, data of their own"}


@dataclass(frozen=True)
class Found:
    """All that was measured, and under which circumstances."""

    settings: dict[str, Any]
    judgements: tuple[Judgement, ...]
    scores: tuple[RunScore, ...]

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks."""
        return list(dict.fromkeys(score.task for score in self.scores))

    @property
    def methods(self) -> list[str]:
        """Names of the methods, without waiting for all."""
        return list(dict.fromkeys(judgement.method for judgement in self.judgements))

    @property
    def late_shares(self) -> list[float]:
        """Shares of ranks that are late."""
        return sorted({judgement.late_share for judgement in self.judgements})

    def mean(self, field: str, **where: Any) -> float:
        """The mean of a field of the judgements with these values."""
        return fmean(getattr(judgement, field) for judgement in _those(self.judgements, where))

    def excess(self, field: str, **where: Any) -> Interval:
        """By how much runs with these values exceed the run of the same seed that waited for all."""
        waited = {(score.task, score.own_data, score.seed): score for score in self.scores if score.method == WAIT}
        return mean_interval(
            [
                getattr(score, field) - getattr(waited[score.task, score.own_data, score.seed], field)
                for score in _those(self.scores, where)
            ]
        )

    def relative(self, method: str, **where: Any) -> Interval:
        """By which share validation losses exceed those of `BASELINE` under the same circumstances and seed.

        Runs of the same seed begin with the same parameters and data, so they are not independent: the interval is over
        the means of each seed's runs.
        """
        keys = ("task", "late_share", "own_data", "seed")
        others = _those(self.scores, {"method": BASELINE, **where})
        loss = {tuple(getattr(score, key) for key in keys): score.validation_loss for score in others}
        of_seed: dict[int, list[float]] = {}
        for score in _those(self.scores, {"method": method, **where}):
            excess = score.validation_loss / loss[tuple(getattr(score, key) for key in keys)] - 1
            of_seed.setdefault(score.seed, []).append(excess)
        return mean_interval([fmean(runs) for runs in of_seed.values()])

    def of_runs(self, field: str, **where: Any) -> Interval:
        """A field of the runs with these values."""
        return mean_interval([getattr(score, field) for score in _those(self.scores, where)])

    def write(self, path: Path) -> None:
        """Write all of it, as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "settings": self.settings,
            "judgements": [asdict(judgement) for judgement in self.judgements],
            "runs": [asdict(score) for score in self.scores],
        }
        path.write_text(json.dumps(content, indent=1) + "\n")


def read(path: Path) -> Found:
    """What `Found.write` wrote."""
    content = json.loads(path.read_text())
    judgements = tuple(Judgement(**each) for each in content["judgements"])
    return Found(content["settings"], judgements, tuple(RunScore(**each) for each in content["runs"]))


def truth_rows(found: Found, task: str) -> list[list[str]]:
    """For each method and share of late ranks: cosine, error, and error of the sums over several steps."""
    rows = []
    for method in found.methods:
        row = [method]
        for late in found.late_shares:
            where = {"task": task, "method": method, "late_share": late}
            row += [f"{found.mean(field, **where):.3f}" for field in ("cosine", "error", "sum_error")]
        rows.append(row)
    return rows


def run_rows(found: Found, task: str, own_data: bool) -> list[list[str]]:
    """For each method and share of late ranks: validation loss minus that of waiting, and accuracy."""
    rows = []
    for method in found.methods:
        row = [method]
        for late in found.late_shares:
            where = {"task": task, "method": method, "late_share": late, "own_data": own_data}
            row += [
                _signed(found.excess("validation_loss", **where), ".3f"),
                f"{found.of_runs('accuracy', **where).value:.1%}",
            ]
        rows.append(row)
    return rows


def verdict_rows(found: Found) -> list[list[str]]:
    """For each method and circumstances of a task: validation loss relative to that of `BASELINE`, over all shares."""
    rows = []
    for method in found.methods:
        columns = [(task, own_data) for task in found.tasks for own_data in DATA]
        each = [found.relative(method, task=task, own_data=own_data) for task, own_data in columns]
        rows.append([method, *(_signed(one, ".1%") for one in each)])
    return rows


def _signed(one: Interval, spec: str) -> str:
    """The mean, and half the interval's width if there is more than one seed."""
    return f"{one.value:+{spec}}" + (f" ±{one.half:{spec}}" if one.half < math.inf else "")


def save_picture(found: Found, path: Path) -> None:
    """A row for each task: errors by stage, errors by time, and the final loss under both circumstances."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(19, 5.2 * len(found.tasks)), layout="constrained")
    panels = figure.subplots(len(found.tasks), 4, squeeze=False)
    colors = {method: f"C{number}" if number < 10 else "black" for number, method in enumerate(found.methods)}
    late = found.late_shares[len(found.late_shares) // 2]
    for task, (by_stage, by_phase, shuffled, own) in zip(found.tasks, panels, strict=True):
        for method in found.methods:
            where = {"task": task, "method": method, "late_share": late}
            stages = sorted({judgement.stage for judgement in _those(found.judgements, where)})
            dropped = [found.mean("dropped", stage=stage, **where) for stage in stages]
            style = {"color": colors[method], "marker": "o", "markersize": 3, "label": method}
            by_stage.plot(dropped, [found.mean("sum_error", stage=stage, **where) for stage in stages], **style)
            by_phase.plot(PHASES, [found.mean("error", phase=phase, **where) for phase in PHASES], **style)
        by_stage.set_title(f"{task}: sum over 10 steps, {late:.0%} of ranks late")
        by_stage.set_xlabel("share of the stage dropped (output layers left, input layers right)")
        by_stage.set_ylabel("relative error")
        by_phase.set_title(f"{task}: each step, {late:.0%} of ranks late")
        by_phase.set_xlabel("third of training")
        by_phase.set_ylabel("relative error")
        for axes, own_data in ((shuffled, False), (own, True)):
            _draw_losses(axes, found, task, own_data, colors)
    panels[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def _draw_losses(axes: Any, found: Found, task: str, own_data: bool, colors: dict[str, str]) -> None:
    count = len(found.methods)
    for number, method in enumerate(found.methods):
        at = [place + 0.8 * (number - (count - 1) / 2) / count for place in range(len(found.late_shares))]
        excess = [
            found.excess("validation_loss", task=task, method=method, late_share=late, own_data=own_data)
            for late in found.late_shares
        ]
        axes.errorbar(
            at, [e.value for e in excess], [e.half for e in excess], fmt="o", color=colors[method], markersize=4
        )
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set_xticks(range(len(found.late_shares)), [f"{late:.0%}" for late in found.late_shares])
    axes.set_xlabel("share of ranks that are late")
    axes.set_ylabel("validation loss above waiting for all")
    axes.set_title(f"{task}: {DATA[own_data]}")


def _those(records: Iterable[Any], where: dict[str, Any]) -> Sequence[Any]:
    return [record for record in records if all(getattr(record, name) == value for name, value in where.items())]
