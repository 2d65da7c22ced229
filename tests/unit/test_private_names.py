"""What straggle uses of torch that is not public is in one list, and the installed torch still has it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomllib
import torch

import straggle

LISTED: dict[str, Any] = tomllib.loads(Path(__file__).with_name("private_names.toml").read_text())
OTHERS = {name for names in LISTED["others"].values() for name in names}
BY_TEXT = {"getattr", "hasattr", "setattr", "delattr", "object", "attrgetter"}  # calls that take a name as text


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(node: ast.AST) -> bool:
    """Whether it is this object: ``self``, ``cls`` or ``super()``."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that this file gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


def used(tree: ast.AST, everywhere: set[str]) -> Iterator[str]:
    """Names that this file uses and does not define; of an object itself, those that no file defines."""
    here = set(defined(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from {node.attr} - here - (everywhere if is_own(node.value) else set())
        elif (
            isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] != "straggle"
        ):
            yield from (
                part for name in (node.module or "", *(own.name for own in node.names)) for part in name.split(".")
            )
        elif isinstance(node, ast.Import):
            yield from (part for own in node.names for part in own.name.split("."))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_TEXT:
            texts = {one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)}
            yield from texts - here


def private_names(sources: list[str]) -> set[str]:
    trees = list(map(ast.parse, sources))
    everywhere = {name for tree in trees for name in defined(tree)}
    return {name for tree in trees for name in used(tree, everywhere) if is_private(name)}


@pytest.mark.slow
def test_each_private_name_is_listed_and_each_listed_one_is_used() -> None:
    files = sorted(Path(straggle.__file__).parent.rglob("*.py"))
    found = private_names([file.read_text() for file in files])
    listed = set(LISTED["torch"]) | OTHERS
    assert not found - listed, "torch's: list it with its file of torch, after reading it in each version"
    assert not listed - found, "these are used no more"


@pytest.mark.parametrize(
    "line", ["torch._C", "from torch._C import x", "import torch._C", "getattr(torch, '_C')", "x._C.y", "self._C"]
)
def test_private_name_is_found_however_it_is_written(line: str) -> None:
    assert "_C" in private_names(["import torch", line])
    assert not private_names(["class A:\n    def __init__(self):\n        self._C = 1\n        self._C"])


def test_the_installed_torch_was_read_and_has_them() -> None:
    version = ".".join(torch.__version__.split(".")[:2])
    assert version in LISTED["read"], f"read what is listed in torch {version}, and add it to `read`"
    root = Path(torch.__file__).parent
    lost = [
        f"{name} in {file}"
        for name, file in LISTED["torch"].items()
        if not (root / file).exists() or not re.search(rb"%b\b" % name.encode(), (root / file).read_bytes())
    ]
    assert not lost
