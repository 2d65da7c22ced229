"""Numbers that are declared once, as the fields of a dataclass; whatever shows them reads the declaration.

    put_back: int = field(default=0, metadata=number("micro-batches that it gave back", Metric("counter", ...)))

What is a number of a rank's row is declared in `report.RankNumbers`. This module knows none of them, and nothing of
rows, reports or Prometheus. Numbers that several classes declare are one tuple after the other. A field that is no
number has its text by `described`; docs/generate.py writes the docs' tables of these texts, and `read` reads what was
written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache, partial
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

Kind = type[bool] | type[int] | type[float]
Declared = TypeVar("Declared")
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
    """A number as a dataclass declares it."""

    name: str
    kind: Kind
    text: str
    metric: Metric | None


def described(text: str, *, stable: bool = False, null: float = math.nan) -> Mapping[str, Any]:
    """The metadata of a field that is written to a file: its text in the docs; ``stable``: name and meaning stay.

    ``null``: the number that a file has null for.
    """
    return {"text": text, "stable": stable, "null": null}


def number(
    text: str = "", metric: Metric | None = None, *, stable: bool = False, null: float = math.nan
) -> Mapping[str, Any]:
    """The same of a field that is a number; ``text`` says what it is in one step."""
    return {**described(text, stable=stable, null=null), "metric": metric}


def read(declaring: type[Declared], record: Mapping[str, Any]) -> Declared:
    """A dataclass of what was written of it as JSON.

    A field that the record lacks has its default, and one that the dataclass lacks is left out. Raises ``TypeError`` if
    a field without a default is missing.
    """
    readers: Mapping[str, Callable[[Any], Any]] = _readers(declaring)  # type: ignore[arg-type]
    return declaring(**{name: of(record[name]) for name, of in readers.items() if name in record})


@cache
def _readers(declaring: type) -> Mapping[str, Callable[[Any], Any]]:
    """For each field what makes its value of a plain one."""
    types = get_type_hints(declaring)
    return {own.name: _reader(types[own.name], own.metadata.get("null", math.nan)) for own in fields(declaring)}


def _reader(kind: Any, null: float) -> Callable[[Any], Any]:
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return partial(read, kind)
    if kind is float:
        return lambda value: null if value is None else float(value)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType or type(None) in arguments:
        inner = _reader(next(one for one in arguments if one is not type(None)), null)
        return lambda value: None if value is None else inner(value)
    if origin is Literal:
        return lambda value: value if value in arguments else None
    if origin is tuple:
        item = _reader(arguments[0], null)
        return lambda values: tuple(map(item, values))
    if origin is not None:  # a mapping
        key, of = (_reader(argument, null) for argument in arguments)
        return lambda values: {key(name): of(value) for name, value in values.items()}
    return kind  # type: ignore[no-any-return]


@cache
def numbers_of(declaring: type) -> tuple[Number, ...]:
    """The numbers that a dataclass declares, those of its bases first: its fields of the types bool, int and float."""
    return tuple(_number(own, _KINDS[_type(own)]) for own in fields(declaring) if _type(own) in _KINDS)


def _number(own: Field[Any], kind: Kind) -> Number:
    declared = own.metadata
    return Number(own.name, kind, declared.get("text", ""), declared.get("metric"))


def _type(own: Field[Any]) -> str:
    return own.type if isinstance(own.type, str) else own.type.__name__
