"""The folders of tests are levels: what lies in a folder needs no more than the folder says."""

import ast

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
