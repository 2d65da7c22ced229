"""What the tests take, from the junit XML that each run of ``./launch.sh test`` leaves: ``./launch.sh test times``.

A test's seconds of CPU are those of its call, with all processes that it starts; its seconds are a clock's, with its
fixtures. A fixture's seconds are those of all its setups.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

FILE = Path(".pytest_cache", "junit.xml")
FIXTURE = "fixture:"  # a property's name: this, and the fixture's
_SLOWEST = 50


@dataclass(frozen=True)
class Took:
    """One test: ``path`` is its file's, with dots for slashes and without suffix."""

    path: str
    name: str
    cpu_s: float
    seconds: float
    fixtures: dict[str, float]


def read(file: Path) -> list[Took]:
    """The tests of a run, the one that took most CPU first; those that were skipped are not there."""
    cases = [case for case in ElementTree.parse(file).iter("testcase") if case.find("skipped") is None]
    return sorted(map(_took, cases), key=lambda test: -test.cpu_s)


def _took(case: ElementTree.Element) -> Took:
    given = {one.attrib["name"]: float(one.attrib["value"]) for one in case.iter("property")}
    fixtures = {name.removeprefix(FIXTURE): value for name, value in given.items() if name.startswith(FIXTURE)}
    own = case.attrib
    return Took(own["classname"], own["name"], given.get("cpu_s", 0.0), float(own["time"]), fixtures)


def table(tests: Sequence[Took]) -> Iterator[str]:
    """Lines: by folder, the slowest fixtures, and the slowest tests."""
    cpu, seconds, number = Counter[str](), Counter[str](), Counter[str]()
    for test in tests:
        for folder in ("all", ".".join(test.path.split(".")[:2])):
            cpu[folder] += test.cpu_s  # type: ignore[assignment]
            seconds[folder] += test.seconds  # type: ignore[assignment]
            number[folder] += 1
    yield "CPU s   seconds  tests  folder"
    yield from (f"{cpu[name]:7.1f}{seconds[name]:9.1f}{number[name]:7}  {name}" for name, _ in cpu.most_common())
    fixtures = Counter[str]()
    for test in tests:
        fixtures.update(test.fixtures)  # type: ignore[arg-type]
    yield "\nseconds  fixture"
    yield from (f"{value:7.1f}  {name}" for name, value in fixtures.most_common(10))
    yield "\nCPU s   seconds  test"
    yield from (f"{own.cpu_s:7.1f}{own.seconds:9.1f}  {own.path}::{own.name}" for own in tests[:_SLOWEST])


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in table(read(Path(sys.argv[1]) if sys.argv[1:] else FILE)))
