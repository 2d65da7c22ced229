"""The packages: imports point one way, and every module is in its package's README."""

from __future__ import annotations

import ast
import importlib
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import straggle
from straggle.building import load_optional_parts

ROOT = Path(straggle.__file__).parent
DOCS = ROOT.parent / "docs"
# each imports only from those before it, and the core from no wing
PACKAGES = [("report",), ("policies",), ("backward",), ("source",), ("merge",)]
PACKAGES += [
    ("step", "loop"),
    ("replay", "pools", "links", "members", "stuck"),
    ("parallel", "building", "garbage", "stop_signal"),
    ("data",),
]
PACKAGES += [("observe",), ("integrations",), ("advise",), ("lab",), ("commands",)]
BEFORE = ("extras", "schema", "version", "world", "waits")
AFTER = ("straggle", "__main__")
FOLDERS = [name for names in PACKAGES for name in names if (ROOT / name).is_dir()]
# rooms inside of a package that have a page of their own
FOLDERS += [str(path.parent.relative_to(ROOT)) for path in sorted(ROOT.glob("*/*/README.md"))]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports_of(module: str) -> Iterator[str]:
    """The modules of this package that are imported anywhere in one, inside of functions too."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "straggle")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            if node.module and node.module.split(".")[0] == "straggle":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from (name if name in MODULES else node.module for name in names)


def floor_of(module: str) -> int:
    name = module.split(".")[1] if "." in module else module
    if name in BEFORE:
        return -1
    if name in AFTER:
        return len(PACKAGES)
    return next(floor for floor, names in enumerate(PACKAGES) if name in names)


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_from_its_package_and_those_before_it(module: str) -> None:
    wrong = [other for other in imports_of(module) if floor_of(other) > floor_of(module)]
    assert wrong == []


def test_picture_of_the_packages_has_this_order() -> None:
    drawn = runpy.run_path(str(DOCS / "packages.py"))
    floors = [{name for box in floor for name in box.split(", ")} for floor in reversed(drawn["FLOORS"])]
    assert floors == [{*names} - {"garbage", "stop_signal"} for names in PACKAGES]  # two files that belong to parallel
    assert (DOCS / "packages.svg").read_text() == drawn["picture"]()


CORE = ("backward", "source", "merge", "step", "loop")
WINGS = {"member", "members", "membership", "leaf", "pool", "pools", "replay", "replays", "replaying", "ping", "pings"}


def words_of(line: str) -> set[str]:
    """Those of a line of code, its comments and its strings; names in parts."""
    return set(re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", line).lower()))


@pytest.mark.parametrize(
    "module", [module for module in MODULES if module.split(".")[1:2] and module.split(".")[1] in CORE]
)
def test_core_names_no_wing(module: str) -> None:
    # `ThreadPoolExecutor`
    told = {"merge.late.replica": {"pool"}}.get(module.removeprefix("straggle."), set())
    lines = MODULES[module].read_text().splitlines()
    assert [line for line in lines if (words_of(line) & WINGS) - told] == []


WITH_EXTRAS = ("observe", "advise", "lab", "commands")  # the only packages that may need more than torch


@pytest.mark.parametrize("module", [module for module in MODULES if not {*module.split(".")} & {*WITH_EXTRAS}])
def test_library_needs_no_numpy(module: str) -> None:
    # nor what torch passes on to it, which is an error where it is not installed
    assert re.findall(r"import numpy|\.numpy\(|from_numpy", MODULES[module].read_text()) == []


def test_nothing_is_imported_in_a_circle() -> None:
    left = {module: set(imports_of(module)) - {module} for module in MODULES}
    while free := [module for module, others in left.items() if not others & left.keys()]:
        for module in free:
            del left[module]
    assert left.keys() == set()


def test_the_page_lists_the_packages_in_this_order() -> None:
    page = (ROOT.parent / "docs" / "how-it-works.md").read_text().partition("## The packages")[2]
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ") and "`straggle/" in line]
    listed = [re.findall(r"`straggle/(\w+)", row) for row in rows]
    assert listed == [list(names) for names in PACKAGES]


def test_readme_and_pages_are_short() -> None:
    """What is measured goes into results/, and what the code alone needs beside the code."""
    readme = len((ROOT.parent / "README.md").read_text().split())
    assert readme <= 1200
    assert readme + sum(len(page.read_text().split()) for page in DOCS.rglob("*.md")) <= 25_000


@pytest.mark.parametrize("package", FOLDERS)
def test_readme_of_a_package_lists_its_modules(package: str) -> None:
    listed = re.findall(r"^\| `([\w/]+?)(?:/|\.py)` \|", (ROOT / package / "README.md").read_text(), re.MULTILINE)
    modules = {path.relative_to(ROOT / package).with_suffix("").as_posix() for path in (ROOT / package).rglob("*.py")}
    modules = {name for name in modules if not name.endswith("__init__")}
    assert sorted(listed) == sorted(set(listed))
    assert all(any(name in (module, module.partition("/")[0]) for name in listed) for module in modules)
    assert all(any(name in (module, module.partition("/")[0]) for module in modules) for name in listed)


@pytest.mark.parametrize("path", [path for path in MODULES.values() if path.name == "__init__.py"], ids=module_of)
def test_package_passes_no_names_on_but_straggle_itself(path: Path) -> None:
    body = ast.parse(path.read_text()).body
    assert path.parent == ROOT or all(isinstance(node, ast.Expr) for node in body)


# -- what a job loads

_LOADED = """
import json, sys, straggle
{}
own = {{name: module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "straggle"}}
print(json.dumps({{name: open(path).read().count(chr(10)) for name, path in own.items()}}))
"""
_OPTIONAL = {"members", "links", "pools", "replay", "stuck", "data", "observe", "integrations", "advise", "lab"}


def loaded_by(statement: str) -> dict[str, int]:
    """The modules of this package that are loaded then in a new process, with their lines."""
    done = subprocess.run([sys.executable, "-c", _LOADED.format(statement)], capture_output=True, text=True, check=True)
    loaded: dict[str, int] = json.loads(done.stdout)
    return loaded


@pytest.mark.parametrize(
    ("statement", "most_files", "most_lines"),
    [("", 10, 1_000), ("straggle.StagedDataParallel", 100, 17_730)],  # lower them when less is loaded
)
def test_what_is_loaded_before_a_model_is_wrapped_has_no_optional_part(
    statement: str, most_files: int, most_lines: int
) -> None:
    loaded = loaded_by(statement)
    assert [name for name in loaded if name.split(".")[1:2] and name.split(".")[1] in _OPTIONAL] == []
    assert len(loaded) <= most_files
    assert sum(loaded.values()) <= most_lines


def test_parts_that_are_loaded_when_a_model_asks_for_them_are_where_they_are_looked_for() -> None:
    load_optional_parts()


def test_public_names_are_where_the_package_looks_for_them() -> None:
    imported = {
        alias.name: node.module
        for node in ast.walk(ast.parse((ROOT / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("straggle.")
        for alias in node.names
        if alias.name != "__version__"
    }
    assert sorted(imported) == sorted(straggle.__all__)
    assert set(straggle.__all__) <= set(dir(straggle))
    for name, module in imported.items():  # what a type checker sees is what there is
        assert getattr(straggle, name) is getattr(importlib.import_module(module), name)


def test_name_that_the_package_has_not_is_an_error_with_the_name() -> None:
    with pytest.raises(AttributeError, match="module 'straggle' has no attribute 'StagedDataParalel'"):
        straggle.StagedDataParalel  # type: ignore[attr-defined]  # noqa: B018


# Lines of each package. A number goes down with its package; a commit that raises one says what the lines buy.
BUDGET = {
    "advise": 1860,
    "backward": 2340,
    "commands": 5320,
    "data": 1670,
    "integrations": 2060,
    "lab": 5410,
    "links": 1030,
    "loop": 2380,
    "members": 7380,
    "merge": 9920,
    "observe": 5360,
    "policies": 2950,
    "pools": 1400,
    "replay": 170,
    "source": 1450,
    "stuck": 820,
    "__init__": 170,
    "__main__": 70,
    "building": 390,
    "extras": 40,
    "garbage": 80,
    "parallel": 560,
    "report": 580,
    "schema": 130,
    "step": 340,
    "stop_signal": 140,
    "version": 20,
    "waits": 115,
    "world": 130,
}


def lines_of(name: str) -> int:
    """Of a package, or of a module that is in none."""
    files = sorted((ROOT / name).rglob("*.py")) if (ROOT / name).is_dir() else [ROOT / f"{name}.py"]
    return sum(len(file.read_text().splitlines()) for file in files)


@pytest.mark.parametrize("name", BUDGET)
def test_package_has_at_most_the_lines_that_it_may_have_and_not_many_fewer(name: str) -> None:
    assert BUDGET[name] - 150 <= lines_of(name) <= BUDGET[name], f"set BUDGET[{name!r}], and say why in the commit"


def test_each_package_has_a_budget() -> None:
    names = {path.name for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert names <= set(BUDGET)
    assert sum(lines_of(name) for name in BUDGET) == sum(
        len(path.read_text().splitlines()) for path in MODULES.values()
    )
