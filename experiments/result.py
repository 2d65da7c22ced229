"""What an experiment found: lines of expected beside measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from straggle.report import text_table


@dataclass(frozen=True)
class Line:
    """One finding; ``ok`` is ``None`` where nothing was expected to hold, and the number is only reported."""

    what: str
    expected: str
    measured: str
    ok: bool | None = None


@dataclass(frozen=True)
class Result:
    """All findings of an experiment; ``notes`` explain them, ``plot`` is the file with their picture."""

    title: str
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing came out other than expected."""
        return all(line.ok is not False for line in self.lines)

    def as_dict(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return {**asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        verdicts = {True: "yes", False: "NO", None: ""}
        rows = [("", "expected", "measured", "as expected")]
        rows += [(line.what, line.expected, line.measured, verdicts[line.ok]) for line in self.lines]
        return "\n".join([self.title, "", text_table(rows), *(("", *self.notes) if self.notes else ())])
