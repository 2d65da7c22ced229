"""The one reader of a run's files: the steps of a trace, or what each rank of a watched job wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from straggle.observe.trace import TIME, read_trace, whole_lines
from straggle.observe.watch.file import FOLDER, watched_files
from straggle.report import PHASES, StepReport
from straggle.schema import read

TRACE = "trace.jsonl"
NO_TRACE = "{}: no such file; give the run_dir of a run of straggle train or straggle.watch"
_OF_DDP = (*(f"{phase}_s" for phase in PHASES), "compute_s", "stage_s")


@dataclass(frozen=True)
class Trace:
    """The file of a run whose steps straggle merged."""

    path: Path

    def reports(self) -> Iterator[StepReport]:
        """Its steps; raises ``ValueError`` for a line that is none."""
        return (report for report, _ in self.timed())

    def timed(self) -> Iterator[tuple[StepReport, float]]:
        """The same, with when each ended, in seconds since 1970; NaN: an older version wrote it."""
        for number, record in enumerate(read_trace(self.path), start=1):
            try:
                yield step_report(record), float(record.get(TIME, math.nan))
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{self.path}: line {number} is no step of a straggle trace ({error!r})") from error

    def some(self, positions: Collection[int]) -> dict[int, StepReport]:
        """The steps at these positions; other lines are not parsed."""
        lines = enumerate(whole_lines(self.path))
        return {at: step_report(json.loads(line)) for at, line in lines if at in positions}


@dataclass(frozen=True)
class Watched:
    """The files of a watched job, one a rank; ``heads``: their first lines."""

    folder: Path
    files: Sequence[Path]
    heads: Sequence[Mapping[str, Any]]

    @staticmethod
    def of(files: Sequence[Path]) -> Watched:
        """Read the first lines; raises ``ValueError`` if one is not of `straggle.watch`."""
        return Watched(files[0].parent, files, [_head(file) for file in files])

    def lines(self) -> Iterator[tuple[Mapping[str, Any], ...]]:
        """A line of each rank for each step that all have made; raises ``ValueError`` if there is none."""
        _, *steps = zip(*map(read_trace, self.files), strict=False)
        if not steps:
            raise ValueError(f"{self.folder}: there is no step yet that all ranks have made")
        yield from steps

    def reports(self) -> Iterator[StepReport]:
        """The steps as a trace would have them: all ranks were waited for, nothing is missing."""
        try:
            stages = self._stages()
            yield from (step_report(_as_record(lines, self.heads, stages)) for lines in self.lines())
        except KeyError as error:
            raise ValueError(f"{self.folder}: not written by straggle.watch: {error!r}") from None

    def timed(self) -> Iterator[tuple[StepReport, float]]:
        """The same; when they ended is not known."""
        return ((report, math.nan) for report in self.reports())

    def some(self, positions: Collection[int]) -> dict[int, StepReport]:
        """The steps at these positions."""
        return {at: report for at, report in enumerate(self.reports()) if at in positions}

    def _stages(self) -> list[dict[str, Any]]:
        if any(head["stages"] != self.heads[0]["stages"] for head in self.heads):
            raise ValueError(f"{self.folder}: ranks finish their gradients in different orders, which cannot be drawn")
        return [{**stage, "weight": len(self.heads)} for stage in self.heads[0]["stages"]]


def files_of(run_dir: Path) -> Trace | Watched | None:
    """What there is of a run: its trace, or else what was watched of it; the folder with the latter will do, too."""
    if (trace := run_dir / TRACE).is_file():
        return Trace(trace)
    inside = run_dir.name == FOLDER and not (run_dir / FOLDER).is_dir()  # runs/watch has one too
    files = watched_files(run_dir.parent if inside else run_dir)
    return Watched.of(files) if files else None


def step_report(record: Mapping[str, Any]) -> StepReport:
    """A trace's record as the report that it was."""
    report = read(StepReport, record)
    if not report.ranks:
        raise KeyError("ranks")
    return report


def _head(path: Path) -> Mapping[str, Any]:
    if (head := next(read_trace(path), None)) is None:
        raise ValueError(
            f"{path}: there is no complete step in it yet; a step ends as an optimizer of torch begins its own, and "
            "under DDP with the merge"
        )
    if not isinstance(head, dict) or head.get("watch") != 1:
        raise ValueError(f"{path}: not written by straggle.watch, or by another version of it")
    return head


def _as_record(
    lines: Sequence[Mapping[str, Any]], heads: Sequence[Mapping[str, Any]], stages: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A step of a watched job as a line of a trace."""
    network_s = min(line["wait_s"] for line in lines)
    ranks = [
        {
            **{name: line[name] for name in _OF_DDP if name in line},
            "rank": head["rank"],
            "wait_s": line["wait_s"] - network_s,
            "reach": 1.0,
            "stages": [1.0] * len(stages),
        }
        for head, line in zip(heads, lines, strict=True)
    ]
    seconds = max(line["seconds"] for line in lines)
    step = {"step": lines[0]["step"], "seconds": seconds, "network_s": network_s, "deadline_s": None}
    return {**step, "ranks": ranks, "stages": stages}


# -- the first steps, in which caches, deadlines and shares warm up: step times leave them out


def num_warmup_steps(num_steps: int) -> int:
    """The number of these steps in a run: a tenth of its steps, at most ten."""
    return min(num_steps // 10, 10)
