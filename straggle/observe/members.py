"""``members.jsonl``: how the members of a run changed, and which of them writes what all know."""

from __future__ import annotations

import time
from pathlib import Path

from straggle.observe.handed_on import HandedOnLines
from straggle.observe.trace import TIME, read_trace
from straggle.parallel import StagedDataParallel
from straggle.report import MembersReport, StepReport
from straggle.schema import read

FILE = "members.jsonl"


def writer_of_change(report: MembersReport) -> int:
    """The rank that writes a change: the lowest member that was one before, if there is any."""
    return min(set(report.ranks) - report.joined.keys() or report.ranks)


class MembersWriter:
    """Appends the changes of a model's members to ``members.jsonl`` in ``run_dir``, one line for each.

    ``begins``: the job begins with this rank as the lowest; what an earlier job has left there is removed.
    """

    def __init__(self, model: StagedDataParallel, run_dir: Path, *, begins: bool = False) -> None:
        self._rank = model.rank
        # each member has all changes that it came through: no line is waited for
        self._lines = HandedOnLines(run_dir / FILE, key="generation", begins=begins, patience_s=0.0)
        self._hook = model.register_members_hook(self._write)

    def close(self) -> None:
        """Close the file."""
        self._hook.remove()
        self._lines.close()

    def _write(self, report: MembersReport) -> None:
        if report.at_the_end:
            return
        line = {"time": time.time(), **report.as_dict()}
        self._lines.add(report.generation, lambda: line, writes=writer_of_change(report) == self._rank)

    def __enter__(self) -> MembersWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_members(run_dir: Path) -> list[tuple[float, MembersReport]]:
    """The changes of a run and when they were, in seconds since 1970; empty if there were none."""
    path = run_dir / FILE
    lines = read_trace(path) if path.is_file() else ()
    return [(float(line["time"]), read(MembersReport, line)) for line in lines]


class HandedOnTrace:
    """Appends step reports to the trace of a run whose members come and go; the lowest of them writes a step."""

    def __init__(self, rank: int, path: Path, *, first_step: int = 0, begins: bool = False) -> None:
        self._rank = rank
        self._lines = HandedOnLines(path, key="step", first=first_step if begins else 0, begins=begins)

    def add(self, report: StepReport) -> bool:
        """One more step; whether this rank is the one that writes it."""
        writer = report.lowest_rank
        if writer is not None:
            at = time.time()
            self._lines.add(report.step, lambda: report.as_dict() | {TIME: at}, writes=writer == self._rank)
        return writer == self._rank

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
