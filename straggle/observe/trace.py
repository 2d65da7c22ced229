"""One record per step on disk, all ranks in it: JSON lines that programs and people can read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from straggle.observe.lines import LineWriter, bytes_before, is_cut
from straggle.report import StepReport

TIME = "time"  # when the writer had a step, in seconds since 1970: of a line, and not of the report


class TraceWriter:
    """Appends step reports to a file, one line each. ``first_step`` > 0 goes on with a trace that was begun before.

    A step that cannot be written, as on a full disk, is left out, with one warning. Step numbers show which are
    missing.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        self._file = LineWriter(path, keep_bytes=bytes_before(path, first_step) if first_step else 0)

    def write(self, report: StepReport) -> None:
        """Add a step, and when it ended."""
        self._file.write(json.dumps(report.as_dict() | {TIME: time.time()}))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_trace(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a trace; lines that were cut off, by a full disk or the end of the job, are left out."""
    for line in whole_lines(path):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            if line.endswith("\n"):
                raise ValueError(f"{path}: not a trace, this line is no JSON: {line[:80]!r}") from None


def whole_lines(path: Path) -> Iterator[str]:
    """The lines of a trace, without those that were cut off; a last line without a line end was cut off, too."""
    with path.open(errors="replace") as lines:
        yield from (line for line in lines if not is_cut(line))
