"""The table of a member's states in the package's README speaks of what there is."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import straggle.members

README = (Path(straggle.members.__file__).parent / "README.md").read_text()


def classes() -> dict[str, type]:
    modules = (each.name for each in pkgutil.walk_packages(straggle.members.__path__, "straggle.members."))
    found = [value for name in modules for value in vars(importlib.import_module(name)).values()]
    return {value.__name__: value for value in found if isinstance(value, type)}


def test_each_method_that_the_table_of_states_names_is_there() -> None:
    known = classes()
    (section,) = re.findall(r"## The states of a member\n(.*?)\n## ", README, re.DOTALL)
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", section)
    assert len(named) > 15
    assert [f"{of}.{name}" for of, name in named if not hasattr(known.get(of), name)] == []
