"""The folders of tests are levels: what lies in a folder needs no more than the folder says."""

import ast
from functools import cache

import pytest
from repository import ROOT

TESTS = ROOT / "tests"
UNIT = sorted((TESTS / "unit").rglob("test_*.py"))


@pytest.mark.parametrize("path", UNIT, ids=lambda path: path.stem)
def test_unit_tests_start_no_ranks_and_no_commands(path):
    imported = {
        name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None), *(alias.name for alias in node.names)]
    }
    assert not imported & {"subprocess", "run_ranks", "run_command", "store_server", "browser"}


def test_folders_of_unit_are_packages_of_the_library():
    folders = {path.name for path in (TESTS / "unit").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= {path.name for path in (ROOT / "straggle").iterdir() if path.is_dir()}


def test_readme_lists_the_folders():
    listed = {
        line.split("`")[1].partition("/")[0]
        for line in (TESTS / "README.md").read_text().splitlines()
        if line.startswith("| `")
    }
    assert listed == {path.name for path in TESTS.iterdir() if path.is_dir() and path.name != "__pycache__"}


# -- private names

ALLOWED = {
    "tests/ranks/test_put_out.py": {"_members"},  # what is found in a merge that is long, as on a slow network
    "tests/ranks/test_pause.py": {"_coordinator"},  # the clock of a model, which no argument gives
    "tests/unit/merge/test_late_by_device.py": {"_act"},  # the stand-in
    "tests/ranks/test_stand_in.py": {"_act", "_wakes", "_coordinator"},  # the stand-in, and whose clock a rank has
    "tests/ranks/test_store.py": {"_MAX_UNANSWERED"},  # how many connections wait; not anything to choose
    "tests/ranks/test_waiting.py": {"_channel"},  # what a rank posts, which nothing but the store shows
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def nodes(path):
    return ast.walk(ast.parse(path.read_text()))


def defined(path):
    """The private names that a module of the library makes: of functions, classes, modules and its own attributes."""
    for node in nodes(path):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def reached_into(path):
    """The private names of other objects that a test reads, sets, imports or gives to ``monkeypatch``."""
    for node in nodes(path):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass  # its own
            case ast.Attribute(attr=name):
                yield name
            case ast.ImportFrom(names=names):
                yield from (alias.name for alias in names)
            case ast.Constant(value=str(text)) if text.startswith("straggle."):
                yield text.rpartition(".")[2]


@cache
def of_the_library():
    paths = (ROOT / "straggle").rglob("*.py")
    return {name for path in paths for name in defined(path) if is_private(name) and name != "_"}


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_no_private_name_of_the_library_is_reached_into(path):
    allowed = ALLOWED.get(str(path.relative_to(ROOT)), set())
    assert of_the_library().intersection(reached_into(path)) == allowed
