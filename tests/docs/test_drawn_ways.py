"""The ways that are drawn for contributors: of a gradient, a step's end, a view. Each name is one of the code."""

import ast
import re

import pytest
from repository import ROOT

PAGE = (ROOT / "straggle" / "README.md").read_text()
_STATION = re.compile(r"^  ([A-Z]\w+)\.(\w+) .*?(\w+(?:/\w+)+\.py)$", re.MULTILINE)
WAYS = {
    title: PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    for title in ("A gradient's way", "A step's end", "A view's way")
}
STATIONS = [station for way in WAYS.values() for station in _STATION.findall(way)]


def test_all_ways_are_drawn():
    numbers = {title: len(_STATION.findall(way)) for title, way in WAYS.items()}
    assert numbers == {"A gradient's way": 6, "A step's end": 8, "A view's way": 8}


@pytest.mark.parametrize(("kind", "method", "path"), STATIONS, ids=[f"{kind}.{name}" for kind, name, _ in STATIONS])
def test_station_of_a_way_is_a_method_in_the_file_beside_it(kind, method, path):
    tree = ast.parse((ROOT / "straggle" / path).read_text())
    (drawn,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind]
    assert method in {node.name for node in drawn.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\w+(?:/\w+)+\.py", "".join(WAYS.values())))))
def test_file_beside_a_way_exists(path):
    assert (ROOT / ("" if path.startswith("tests/") else "straggle") / path).is_file()
