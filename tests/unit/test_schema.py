"""What is declared with a dataclass's field, and how a record is read by it."""

import math
from dataclasses import dataclass, field

import pytest

from straggle.schema import Metric, number, numbers_of

COUNTED = Metric("counter", "seen", "Seen.")


@dataclass(frozen=True, kw_only=True)
class Core:
    seconds: float = field(metadata=number("how long"))
    names: tuple[str, ...] = ()
    seen: int = field(default=3, metadata=number("how many", COUNTED))


@dataclass(frozen=True, kw_only=True)
class More(Core):
    is_late: bool = False


def test_fields_of_one_number_are_numbers_and_those_of_a_base_come_first():
    assert [(own.name, own.kind, own.text, own.metric) for own in numbers_of(More)] == [
        ("seconds", float, "how long", None),
        ("seen", int, "how many", COUNTED),
        ("is_late", bool, "", None),
    ]


def test_number_is_read_from_a_record_with_null_as_nan_and_its_default_if_it_is_not_there():
    seconds, seen, is_late = numbers_of(More)
    assert math.isnan(seconds.read({"seconds": None}))
    assert [seen.read({"seen": 5.0}), seen.read({}), is_late.read({"is_late": 1})] == [5, 3, True]
    with pytest.raises(KeyError, match="seconds"):
        seconds.read({})
