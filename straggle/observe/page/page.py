"""Builds ``report.html``: one file, with the plotting library in it, that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import gzip
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from omegaconf import OmegaConf
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from straggle.observe.findings import advise, headline
from straggle.observe.numbers.goodput import Goodput
from straggle.observe.numbers.registry import NUMBERS, shown
from straggle.observe.numbers.replicas import Replicas
from straggle.observe.numbers.run import Run, read_run, read_steps
from straggle.observe.numbers.run_numbers import RankInRun, RunNumbers, numbers_of
from straggle.observe.page import figures
from straggle.observe.page import picture as pictures
from straggle.observe.page.figures import Chart
from straggle.report import MembersReport

FILE = "report.html"
_HEADLINE = (
    "step_seconds_median",
    "ddp_seconds_median",
    "step_seconds_mean",
    "ddp_seconds_mean",
    "saved_share",
    "step_seconds_p95",
    "step_seconds_max",
    "goodput",
    "dropped_share",
    "fairness",
    "fairness_input_stage",
    "depth_bias",
    "not_computed",
    "late",
    "stood_in",
    "skipped",
    "loss",
    "validation_loss",
    "validation_accuracy",
    "parameters_sha256",
)
_OPTIONAL = {"not_computed", "skipped", "loss", "validation_loss", "validation_accuracy", "parameters_sha256"}
# of a watched run these would say 0, 1 and the step time again
_OF_LATENESS = {"ddp_seconds_median", "ddp_seconds_mean", "saved_share", "fairness", "fairness_input_stage"}
_OF_LATENESS |= {"depth_bias", "late", "stood_in"}


@dataclass(frozen=True)
class Cell:
    """A number as it is shown, and its exact value: ``data-key`` and ``data-value`` of its cell in the page."""

    text: str
    key: str = ""
    value: float | str = ""


def write_report(
    run_dir: Path, *, compare: Path | None = None, steps: Sequence[int] = (), path: Path | None = None
) -> Path:
    """Write the report of a run, or of two side by side, to ``path`` (``run_dir/report.html``), and return its path.

    ``steps`` are drawn in detail: by default the slowest step, a typical one, and one in which a rank was stood in for.
    Raises ``ValueError`` if a run has no trace, no step, or not one of these steps.
    """
    return write_page(read_runs(run_dir, compare), steps, path or run_dir / FILE)


def read_runs(run_dir: Path, compare: Path | None = None) -> list[Run]:
    """One run, or two with names that differ. Raises ``ValueError`` if one has no trace, or no step."""
    folders = [run_dir] if compare is None else [run_dir, compare]
    names = _names(folders)
    return [read_run(folder, name=name) for folder, name in zip(folders, names, strict=True)]


def write_page(runs: Sequence[Run], steps: Sequence[int], path: Path) -> Path:
    """Write the page of these runs to ``path``, and return that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # written beside it first: a reader never sees half a page
    half = path.with_name(path.name + ".part")
    try:
        half.write_text(page(runs, steps), encoding="utf-8")
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)  # of a full disk it would take what is left
    return path


def page(runs: Sequence[Run], steps: Sequence[int] = ()) -> str:
    """The page of one run or two."""
    numbers = [numbers_of(run) for run in runs]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    charts = _Charts()
    of_all = "replica" if all(run.replicas.slowest for run in runs) else "rank"
    return environment.get_template("page.html").render(
        title=" and ".join(run.name for run in runs),
        runs=[_run_part(charts, run, of, steps) for run, of in zip(runs, numbers, strict=True)],
        lateness=can_be_late(numbers),
        of_all=of_all,
        parts=list(pictures.PARTS),
        headline=_headline(runs, numbers, of_all),
        times=[charts.add(figures.step_times(runs)), charts.add(figures.step_times_over_steps(runs))],
        loss=[charts.add(figures.loss(runs, over=over)) for over in ("step", "seconds")] if _has_loss(runs) else [],
        charts=charts.json(),
        plotly=_packed_library(),
    )


@cache
def _packed_library() -> str:
    """plotly.min.js, gzipped to a third of its size; the page unpacks it in the browser."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


class _Charts:
    """The figures of a page, numbered."""

    def __init__(self) -> None:
        self._figures: list[str] = []

    def add(self, chart: Chart) -> dict[str, Any]:
        """Add a figure; returns what the template needs for it."""
        self._figures.append(chart.figure.to_json())
        height = chart.figure.layout.height
        number = len(self._figures) - 1
        return {"id": f"chart{number}", "alt": chart.alt, "note": chart.note, "height": height}

    def json(self) -> Markup:
        """All figures as JSON that is safe inside of a script element."""
        return Markup("[" + ",\n".join(self._figures).replace("<", "\\u003c") + "]")


def _run_part(charts: _Charts, run: Run, numbers: RunNumbers, steps: Sequence[int]) -> dict[str, Any]:
    """What the page shows for each run separately."""
    chosen = _chosen(run, steps)
    reports = read_steps(run, chosen.keys())
    all_steps = read_steps(run, range(run.num_steps)).values() if pictures.is_short(run) else ()
    return {
        "name": run.name,
        "about": _about(run, numbers),
        "config": OmegaConf.to_yaml(OmegaConf.create(dict(run.config))) if run.config else "",
        "sentence": headline(run, numbers),
        "picture": pictures.picture(run, all_steps),
        "times": _mean_steps(numbers) if can_be_late([numbers]) and run.num_ranks > 1 else [],
        "advice": advise(run, numbers),
        "lateness": charts.add(figures.lateness(run)),
        "drew": bool(numbers.pool_parts),
        "row": run.replicas.row,
        "ranks": [_rank_row(rank, run.replicas, drawn=bool(numbers.pool_parts)) for rank in numbers.ranks],
        "changes": [_change_row(at, change) for at, change in run.changes],
        "contributions": charts.add(figures.contributions(run)) if run.stages and run.stage_share.size else None,
        "stages": [
            (
                str(number),
                stage.name,
                f"{stage.numel:,}",
                _cell(
                    f"stage_share.{number}", numbers.stage_share[number], shown(numbers.stage_share[number], "share")
                ),
            )
            for number, stage in enumerate(run.stages)
        ],
        "stage_steps": run.num_stage_steps,
        "timelines": [
            {"why": why, "step": reports[at].step, "chart": charts.add(figures.timeline(reports[at], run.replicas.row))}
            for at, why in chosen.items()
        ],
    }


def _mean_steps(numbers: RunNumbers) -> list[tuple[str, str, float]]:
    """A mean step as it was, and under DDP: what it is called, its seconds in words, and percent of the longer one."""
    both = [("a step took", numbers.own.mean_s), ("under DDP, predicted", numbers.ddp.mean_s)]
    if not all(seconds > 0 for _, seconds in both):
        return []
    longest = max(seconds for _, seconds in both)
    return [(what, shown(seconds, "seconds"), round(100 * seconds / longest, 1)) for what, seconds in both]


def _headline(runs: Sequence[Run], numbers: Sequence[RunNumbers], row: str) -> list[tuple[str, list[Cell]]]:
    """The table at the top: rows of a label and a cell for each run. ``row``: what the runs' rows are of."""
    names = [name for name in _HEADLINE if can_be_late(numbers) or name not in _OF_LATENESS]
    rows = [(name, [_of_run(name, run, of) for run, of in zip(runs, numbers, strict=True)]) for name in names]
    return [
        (NUMBERS[name].called(row), cells)
        for name, cells in rows
        if name not in _OPTIONAL or any(cell.text not in ("", "0", "not known") for cell in cells)
    ]


def _of_run(name: str, run: Run, numbers: RunNumbers) -> Cell:
    """A number of the registry; some say more than their value."""
    if name in _CELLS:
        return _CELLS[name](run, numbers)
    own = NUMBERS[name]
    value = run.summary.get(name) if own.of is None else own.of(run, numbers)
    return Cell("") if value is None else _cell(name, value, own.shown(value))


def can_be_late(numbers: Sequence[RunNumbers]) -> bool:
    """Whether a rank was late in one of these runs, or could have been."""
    return any(of.with_deadline or of.late or of.stood_in for of in numbers)


def _rank_row(rank: RankInRun, replicas: Replicas, *, drawn: bool) -> list[Cell]:
    key = f"ranks.{rank.rank}"
    causes = ", ".join(f"{cause} {count}" for cause, count in rank.causes.items())
    return [
        Cell(str(rank.rank)),
        _cell(f"{key}.late", rank.late, f"{rank.late:,} ({shown(rank.late_share, 'share')})"),
        _cell(f"{key}.reach", rank.reach, shown(rank.reach, "share")),
        _cell(f"{key}.stood_in", rank.stood_in, f"{rank.stood_in:,}"),
        _cell(f"{key}.absent", rank.absent, f"{rank.absent:,}"),
        *([_cell(f"{key}.drawn", rank.drawn, _drew(rank))] if drawn else []),
        _seconds(f"{key}.compute_s", rank.compute_s),
        _seconds(f"{key}.wait_s", rank.wait_s),
        _cell(f"{key}.nonfinite_steps", rank.nonfinite_steps, f"{rank.nonfinite_steps:,}"),
        *([Cell(replicas.made_late_words(rank.rank))] if replicas.slowest else []),
        Cell(causes),
    ]


def _drew(rank: RankInRun) -> str:
    return f"{rank.drawn:.1f}" + (f", {rank.put_back:,} put back" if rank.put_back else "")


def _not_computed(of: RunNumbers) -> Cell:
    text = f"{of.not_computed:,} of {of.pool_parts:,}" if of.pool_parts else ""
    return Cell(text, "not_computed", str(of.not_computed)) if text else Cell("")


def _change_row(at: float, change: MembersReport) -> tuple[str, str, str, str, str]:
    """Of a change at ``at``, in seconds since 1970: the page is read elsewhere, so its times are UTC."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    members = f"{len(change.ranks)} of {change.world_size}"
    return str(change.step), when, members, f"{1e3 * change.seconds:,.0f} ms", change.what


def _chosen(run: Run, steps: Sequence[int]) -> dict[int, str]:
    """Positions of the steps to draw, and the reason for each."""
    if steps:
        position = {int(step): at for at, step in enumerate(run.step.tolist())}
        if unknown := [step for step in steps if step not in position]:
            raise ValueError(
                f"{run.run_dir}: no step {unknown[0]} in its trace; it has {run.step[0]:.0f} to {run.step[-1]:.0f}"
            )
        return {position[step]: "as asked for" for step in steps}
    after = np.arange(run.num_steps) >= run.warmup
    known = after & np.isfinite(run.seconds)
    if not known.any():
        return {}
    seconds = np.where(known, run.seconds, -math.inf)
    chosen = {int(seconds.argmax()): "the slowest"}
    distance = np.where(known, np.abs(run.seconds - np.median(run.seconds[known])), math.inf)
    chosen.setdefault(int(distance.argmin()), "a typical one, of median length")
    # of the steps with a rank that was stood in for, the one in which least came from it
    reach = np.where(run.ranks["stood_in"] == 1, run.ranks["reach"], np.inf).min(axis=1)
    if np.isfinite(reach[known]).any():
        chosen.setdefault(
            int(np.where(known, np.nan_to_num(reach, nan=np.inf), np.inf).argmin()), "a rank was stood in for"
        )
    return chosen


def _about(run: Run, numbers: RunNumbers) -> str:
    """The run in one line."""
    text = f"{run.num_steps:,} steps of {run.num_ranks} {run.replicas.row}{'' if run.num_ranks == 1 else 's'}"
    text += f" in {shown(numbers.seconds, 'seconds')}" if numbers.seconds else ""
    parts = [
        f"{key} {_target(run.config[key])}" for key in ("workload", "deadline", "estimator") if run.config.get(key)
    ]
    faults = run.config.get("faults")
    parts += [f"faults: {', '.join(map(str, faults))}"] if faults else []
    return "; ".join([text, *parts])


def _target(config: Any) -> str:
    """The name of the class that a part of the configuration builds."""
    return str(config.get("_target_", "")).rpartition(".")[2] if isinstance(config, dict) else str(config)


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or the full paths if these parts are the same."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _has_loss(runs: Sequence[Run]) -> bool:
    return any(np.isfinite(run.loss).any() for run in runs)


def _replicas(run: Run) -> Cell:
    hashes = run.summary.get("parameters_sha256")
    if not hashes:
        return Cell("")
    same = len(set(hashes)) == 1
    return Cell("identical" if same else "DIFFERENT", "replicas_identical", str(same).lower())


def _seconds(key: str, seconds: float) -> Cell:
    return _cell(key, seconds, shown(seconds, "seconds"))


def _cell(key: str, value: float, text: str) -> Cell:
    return Cell("not known" if math.isnan(value) else text, key, json.dumps(value) if math.isfinite(value) else "")


def _goodput(own: Goodput) -> Cell:
    lost = own.lost()
    return _cell("goodput", own.share, shown(own.share, "share") + (f" (lost: {lost})" if lost else ""))


def _fairness(key: str, index: float, least: float) -> Cell:
    return _cell(key, index, f"{index:.2f} (least: {least:.0%} of the mean rank)")


_CELLS: Mapping[str, Callable[[Run, RunNumbers], Cell]] = {
    "fairness": lambda _, of: _fairness("fairness", of.fairness.index, of.fairness.least),
    "fairness_input_stage": lambda _, of: _fairness(
        "fairness_input_stage", of.fairness.input_index, of.fairness.input_least
    ),
    "goodput": lambda run, _: _goodput(run.goodput),
    "not_computed": lambda _, of: _not_computed(of),
    "late": lambda _, of: _cell("late", of.late, f"{of.late:,} of {of.rank_steps:,}"),
    "parameters_sha256": lambda run, _: _replicas(run),
}
