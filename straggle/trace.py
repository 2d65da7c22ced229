"""One record per step on disk, all ranks in it: JSON lines that programs and people can read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from straggle.report import StepReport


class TraceWriter:
    """Appends step reports to a file, a line each. ``first_step`` > 0 goes on with a trace that was begun before."""

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        goes_on = first_step > 0 and path.exists()
        kept = [record for record in read_trace(path) if record["step"] < first_step] if goes_on else []
        self._file = path.open("w", buffering=1)
        for record in kept:
            self._write(record)

    def write(self, report: StepReport) -> None:
        """Add a step."""
        self._write(report.as_dict())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_trace(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a trace; a last line that was cut off by the end of its job is left out."""
    with path.open(errors="replace") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                if line.endswith("\n"):
                    raise ValueError(f"{path}: not a trace, this line is no JSON: {line[:80]!r}") from None
