"""Numbers that are declared once, as the fields of a dataclass; whatever shows them reads the declaration.

    put_back: int = field(default=0, metadata=number("micro-batches that it gave back", Metric("counter", ...)))

What is a number of a rank's row is declared in `report.RankNumbers`. This module knows none of them, and nothing of
rows, reports or Prometheus. Numbers that several classes declare are one tuple after the other. A field that is no
number has its text by `described`; docs/generate.py writes the docs' tables of these texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from typing import Any, Literal

Kind = type[bool] | type[int] | type[float]
_KINDS: Mapping[str, Kind] = {"bool": bool, "int": int, "float": float}


@dataclass(frozen=True)
class Metric:
    """How a number of each step is exported: a counter is its sum over steps, a gauge has its last value.

    ``text``: one sentence. ``label``: the name of a label and this number's value of it, if several numbers are one
    metric.
    """

    kind: Literal["counter", "gauge"]
    name: str
    text: str
    label: tuple[str, str] | None = None


@dataclass(frozen=True)
class Number:
    """A number as a dataclass declares it; ``default``: `MISSING` if there is none."""

    name: str
    kind: Kind
    text: str
    metric: Metric | None
    default: Any

    def read(self, record: Mapping[str, Any]) -> Any:
        """This number of a record of JSON, in which null is NaN. Raises ``KeyError`` if it is missing, and may not."""
        if self.name not in record and self.default is not MISSING:
            return self.kind(self.default)
        value = record[self.name]
        return self.kind(float("nan") if value is None else value)


def described(text: str, *, stable: bool = False) -> Mapping[str, Any]:
    """The metadata of a field that is written to a file: its text in the docs; ``stable``: name and meaning stay."""
    return {"text": text, "stable": stable}


def number(text: str = "", metric: Metric | None = None, *, stable: bool = False) -> Mapping[str, Any]:
    """The same of a field that is a number; ``text`` says what it is in one step."""
    return {**described(text, stable=stable), "metric": metric}


@cache
def numbers_of(declaring: type) -> tuple[Number, ...]:
    """The numbers that a dataclass declares, those of its bases first: its fields of the types bool, int and float."""
    return tuple(_number(own, _KINDS[_type(own)]) for own in fields(declaring) if _type(own) in _KINDS)


def _number(own: Field[Any], kind: Kind) -> Number:
    declared = own.metadata
    return Number(own.name, kind, declared.get("text", ""), declared.get("metric"), own.default)


def _type(own: Field[Any]) -> str:
    return own.type if isinstance(own.type, str) else own.type.__name__
