"""What is declared with a dataclass's field, and how a record is read by it."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

import pytest

from straggle.schema import Metric, described, number, numbers_of, read

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


@dataclass(frozen=True)
class Whole:
    limit_s: float = field(metadata=described("null: no limit", null=math.inf))
    cores: tuple[Core, ...] = ()
    by_rank: Mapping[int, str] = field(default_factory=dict)
    kind: Literal["one", "other"] | None = None
    core: Core | None = None


def test_what_was_written_as_json_is_read_again():
    whole = Whole(1.5, (Core(seconds=2.0, names=("a",)),), {3: "left"}, "one", Core(seconds=1.0, seen=4))
    assert read(Whole, json.loads(json.dumps(asdict(whole)))) == whole


def test_null_is_the_number_that_is_declared_for_it_and_what_a_record_lacks_its_default():
    assert read(Whole, {"limit_s": None, "kind": "of another version", "unknown": 1}) == Whole(math.inf)
    assert math.isnan(read(Core, {"seconds": None}).seconds)
    assert read(Core, {"seconds": 1, "seen": 5.0}).seen == 5
    assert read(More, {"seconds": 1.0, "is_late": 1}).is_late is True
    with pytest.raises(TypeError, match="seconds"):
        read(Core, {})
