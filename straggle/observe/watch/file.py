"""The file of one watched rank: a line for each step, and a first one for what they are of.

On a device a step is written when the device has come to its end; no thread waits for it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from straggle.backward.clocks import seconds_between
from straggle.backward.stages import StagePlan
from straggle.observe.lines import LineWriter
from straggle.observe.watch.steps import StepTimes
from straggle.report import PHASES

FOLDER = "watch"
ALL = "all"  # the stage of a model whose gradients are not timed by stages


def watched_files(run_dir: Path) -> list[Path]:
    """What was written into ``run_dir``, in the order of the ranks."""
    return sorted((run_dir / FOLDER).glob("rank*.jsonl"), key=lambda file: (len(file.name), file.name))


class WatchFile:
    """One rank's lines; ``head`` is in the first of them."""

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self._file = LineWriter(path)
        self._head = {"watch": 1, **head}
        self._due: deque[tuple[Any, Callable[[], dict[str, Any]]]] = deque()
        self._step = 0

    def write_header(self, stages: Sequence[tuple[str, int]]) -> None:
        """The first line; of each stage the name and the number of elements."""
        self._line({**self._head, "stages": [{"name": name, "numel": numel} for name, numel in stages]})

    def write(self, times: StepTimes, plan: StagePlan | None) -> None:
        """The next step; all that are over are written."""
        self._due.append((times.end, partial(_record, self._step, times, plan)))
        self._step += 1
        while self._due and _is_over(self._due[0][0]):
            self._line(self._due.popleft()[1]())

    def close(self) -> None:
        """Write what is left."""
        while self._due:
            self._line(self._due.popleft()[1]())
        self._file.close()

    def _line(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record))


def _record(step: int, times: StepTimes, plan: StagePlan | None) -> dict[str, Any]:
    """A step's line."""
    computed = times.microbatches[-1]
    compute_s = seconds_between(times.began, computed)
    return {
        "step": step,
        "seconds": seconds_between(times.before, times.end),
        **{f"{name}_s": _sum(times.phases.get(name, ())) for name in (*PHASES, "wait")},
        "compute_s": compute_s,
        "merge_s": seconds_between(computed, times.end),
        "microbatch_s": [seconds_between(times.began, when) for when in times.microbatches],
        "stage_s": [compute_s] if plan is None else _stage_ends(times, plan),
        "pauses": times.pauses,
    }


def _stage_ends(times: StepTimes, plan: StagePlan) -> list[float]:
    at = {index: seconds_between(times.began, when) for index, when in times.finished}
    ends, reached_s = list[float](), 0.0
    for stage in plan.stages:
        reached_s = max([reached_s, *(at[index] for index in stage.parameters if index in at)])
        ends.append(reached_s)
    return ends


def _sum(spans: Sequence[tuple[Any, Any]]) -> float:
    return sum(seconds_between(*span) for span in spans)


def _is_over(end: Any) -> bool:
    return not isinstance(end, torch.cuda.Event) or bool(end.query())  # type: ignore[no-untyped-call]
