"""``stuck.jsonl``: which ranks were stuck or stood in for, in which line of code, and the sentences about it on a page.

Each rank appends its own lines: whoever writes the trace may be the one that is stuck.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from straggle.observe.trace import read_trace
from straggle.parallel import StagedDataParallel
from straggle.report import StuckReport
from straggle.schema import read

FILE = "stuck.jsonl"
_NAMED = 3  # places in the sentences

_log = logging.getLogger(__name__)


class StuckWriter:
    """Appends to ``stuck.jsonl`` in ``run_dir`` where this rank is stuck, as soon as it is known.

    ``begins``: what an earlier run has left there is removed. A line that cannot be written is left out.
    """

    def __init__(self, model: StagedDataParallel, run_dir: Path, *, begins: bool = False) -> None:
        self._path = run_dir / FILE
        self._failed = False
        self._open: tuple[StuckReport, float] | None = None  # of this rank, and when it came
        if begins:
            self._path.unlink(missing_ok=True)
        self._hook = model.register_stuck_hook(self._write)

    def _write(self, report: StuckReport) -> None:
        if report.line and not report.stood_in:
            self._open = None if report.over else (report, time.monotonic())
        line = json.dumps({"time": time.time(), **report.as_dict()}) + "\n"
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                os.write(file, line.encode())  # in one piece, between those of other ranks
            finally:
                os.close(file)
        except OSError as error:
            if not self._failed:
                _log.warning("%s cannot be written (%s): lines are left out", self._path, error)
            self._failed = True

    def close(self) -> None:
        """Write no more. A rank that comes here goes on, before that is reported."""
        self._hook.remove()
        if self._open is not None:
            report, since = self._open
            self._write(replace(report, over=True, seconds=round(report.seconds + time.monotonic() - since, 3)))

    def __enter__(self) -> StuckWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_stuck(run_dir: Path) -> list[tuple[float, StuckReport]]:
    """What ranks reported, and when in seconds since 1970; empty if none was stuck."""
    path = run_dir / FILE
    lines = read_trace(path) if path.is_file() else ()
    return [(float(line["time"]), read(StuckReport, line)) for line in lines]


def stuck_sentences(reports: Sequence[StuckReport]) -> Iterator[str]:
    """Who was stuck where, the longest first."""
    spells = _spells(reports)
    for of in sorted(spells, key=lambda of: -sum(one.seconds for one in of))[:_NAMED]:
        last, seconds = of[-1], sum(one.seconds for one in of)
        times = f"{len(of)} times, " if len(of) > 1 else ""
        whom = f" Ranks {', '.join(map(str, last.waiting))} waited." if last.waiting else ""
        then = "" if last.over else " As far as this file goes, it did not go on."
        at = "in" if last.entered else "before"
        yield (
            f"Rank {last.rank} was stuck {times}for {seconds:.0f} s{' in all' if times else ''}, last {at} step "
            f"{last.step}: {last.where}.{whom}{then}"
        )
    most: dict[tuple[int, str], StuckReport] = {(one.rank, one.line): one for one in reports if one.stood_in}
    for one in sorted(most.values(), key=lambda one: -one.stood_in)[:_NAMED]:
        often = "once" if one.stood_in == 1 else f"at least {one.stood_in} times"
        yield f"Rank {one.rank} was stood in for {often} while it was {one.where}."


def _spells(reports: Sequence[StuckReport]) -> list[list[StuckReport]]:
    """Each time that a rank was stuck, by rank and line, as it was known last."""
    spells: defaultdict[tuple[int, str], list[StuckReport]] = defaultdict(list)
    for report in reports:
        if report.stood_in:
            continue
        of = spells[report.rank, report.line]
        if report.over and of and not of[-1].over:
            of.pop()
        of.append(report)
    return list(spells.values())
