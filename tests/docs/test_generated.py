"""The pages that docs/generate.py writes: they are what it writes, and it leaves out nothing that there is."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import run_command
from repository import ROOT

from straggle.commands.configuration.config import load
from straggle.commands.configuration.schema import config_dir
from straggle.lab import comparison
from straggle.observe.numbers import registry

GENERATE = runpy.run_path(str(ROOT / "docs" / "generate.py"))
TEMPLATE = (ROOT / "docs" / "configuration.md.in").read_text()
GROUPS = {folder.name for folder in config_dir().iterdir() if folder.is_dir()}


@pytest.mark.parametrize("page", GENERATE["PAGES"], ids=lambda page: page.name)
def test_page_is_what_the_program_writes(page: Path) -> None:
    assert page.read_text() == GENERATE["written"](page), "run: .venv/bin/python docs/generate.py"


def test_every_group_of_the_configuration_has_its_table() -> None:
    assert set(re.findall(r"^<<group (\w+)", TEMPLATE, re.MULTILINE)) == GROUPS


def paths(config: Any, above: str = "") -> Iterator[str]:
    """The keys of a configuration that have a value, with those of their parts before them."""
    for key, value in config.items():
        if hasattr(value, "items"):
            yield from paths(value, f"{above}{key}.")
        elif key != "_target_":
            yield f"{above}{key}"


@pytest.mark.parametrize(
    ("command", "files"), [("train", "train"), ("compare", "train compare"), ("simulate", "simulate")]
)
def test_every_key_of_a_command_has_its_row(command: str, files: str) -> None:
    tables = "".join(GENERATE["keys"](file) for file in files.split())
    listed = set(re.findall(r"^\| `([\w.]+)=", tables, re.MULTILINE))
    keys = set(paths({key: value for key, value in load(command, []).items() if key not in (*GROUPS, "hydra")}))
    assert keys
    assert keys == listed


def test_row_of_a_key_has_its_default_and_the_comment_beside_or_above_it(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "# what it is\n\n_target_: a.B\nq: 0.5 # half\n"
        "part:\n  # first\n  # second\n  n: {_target_: c.D, e: 1}\nlast: null\n"
    )
    rows = [("`q=0.5`", "half"), ("`part.n=D(e: 1)`", "first second"), ("`last=null`", "")]
    assert GENERATE["content_of"](tmp_path / "own.yaml") == ("what it is", rows)


def test_field_without_a_text_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match=r"straggle.report.HealingReport: num_states, .* must be declared with number"):
        GENERATE["fields_of"]("straggle.report", "HealingReport")


@pytest.mark.slow
@pytest.mark.parametrize(("command", "fields"), [("train", registry.FIELDS), ("compare", comparison.FIELDS)])
def test_file_of_a_run_has_the_declared_fields(command: str, fields: dict[str, Any], tmp_path: Path) -> None:
    run_command(command, 1, "workload=digits", "steps=3", "faults=none", "run_dir=.", folder=tmp_path)
    file = "summary.json" if command == "train" else "compare.json"
    content = json.loads((tmp_path / file).read_text())
    for own in content.values() if command == "compare" else [content]:
        assert own.keys() == fields.keys()
