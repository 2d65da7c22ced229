"""What docs/stable.md promises to keep is there: names, commands, keys, fields of files, metrics."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import reduce
from importlib import import_module
from typing import Any

import pytest
from omegaconf import OmegaConf
from repository import ROOT

from straggle.__main__ import COMMANDS
from straggle.commands import launch
from straggle.commands.configuration.config import load
from straggle.commands.configuration.schema import options_of
from straggle.commands.launching.launch_options import parser
from straggle.lab import comparison
from straggle.observe.metric_series import COUNTERS, GAUGES, HISTOGRAMS
from straggle.observe.numbers import registry
from straggle.report import MembersReport, RankReport, StageReport, StepReport, StuckReport
from straggle.version import __version__

PAGE = (ROOT / "docs" / "stable.md").read_text()
LISTS = dict(re.findall(r"^\*\*([^*]+)\*\*[^*]*?^```text\n(.*?)^```$", PAGE, re.M | re.S))
KEYS = LISTS["Keys of `train` and `compare`"]
FILES: dict[str, Any] = {
    "summary.json": registry.FIELDS,
    "trace.jsonl": StepReport,
    "trace.jsonl ranks": RankReport,
    "trace.jsonl stages": StageReport,
    "members.jsonl": MembersReport,
    "stuck.jsonl": StuckReport,
    "compare.json": comparison.FIELDS,
}


def promised_keys() -> list[str]:
    """Keys as they are written on a command line, without values."""
    found = []
    for line in KEYS.splitlines():
        part, colon, names = line.rpartition(": ")
        found += [f"{part}.{name}" if colon else name for name in names.split() if "=" not in name]
    return found


def promised_options() -> list[str]:
    return re.findall(r"\w+=\w+", KEYS)


def promised_fields() -> dict[str, list[str]]:
    """Of each file; a list goes on in a line that is indented."""
    lines = LISTS["Files of a run"].replace("\n  ", " ").splitlines()
    return {file: names.split() for file, names in (line.split(": ", 1) for line in lines)}


def names() -> list[Any]:
    """Those of the reference; a framework takes seconds to load."""
    found = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text(), re.M)
    return [pytest.param(name, marks=[pytest.mark.slow] if ".integrations." in name else []) for name in found]


@pytest.mark.parametrize("name", names())
def test_name_of_the_reference_can_be_imported(name: str) -> None:
    module, _, own = name.rpartition(".")
    try:
        assert hasattr(import_module(module), own)
    except ImportError as error:  # of a framework that is not here
        pytest.skip(str(error)) if "pip install" in str(error) else pytest.fail(str(error))


def test_commands_are_all_there() -> None:
    assert LISTS["Commands"].split() == list(COMMANDS)


def test_options_of_launch_exist_and_none_is_without_the_promise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = set(LISTS["Options of `straggle launch`"].split())
    of_examples = {"--help", "--port", "--steps"}
    assert set(re.findall(r"--[a-z-]+", parser().format_help())) == listed | of_examples
    monkeypatch.setattr(sys, "argv", ["straggle launch", "--store-only", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        launch.main()
    assert "--port" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "compare"])
def test_keys_exist(command: str) -> None:
    values = OmegaConf.to_container(load(command, []), resolve=False)
    for key in promised_keys():
        parts = key.split(".")
        above: Any = reduce(lambda part, name: part[name], parts[:-1], values)
        if command == "train" or key not in ("resume", "replay", "checkpoint_every"):
            assert parts[-1] in above, key


def test_options_of_groups_exist() -> None:
    assert promised_options()
    for option in promised_options():
        group, name = option.split("=")
        assert name in options_of(group), option
    for group in ("deadline", "estimator"):  # none is without the promise
        names = {option.split("=")[1] for option in promised_options() if option.startswith(f"{group}=")}
        assert names == set(options_of(group))


@pytest.mark.parametrize("file", FILES)
def test_fields_with_a_star_are_those_that_the_page_promises(file: str) -> None:
    declared = FILES[file]
    found: Mapping[str, Mapping[str, Any]] = (
        {own.name: own.metadata for own in fields(declared)} if is_dataclass(declared) else declared
    )
    stable = {name for name, metadata in found.items() if metadata.get("stable")}
    assert stable == set(promised_fields()[file])
    assert promised_fields().keys() == FILES.keys()


def test_metrics_exist() -> None:
    exported = {f"straggle_{name}_total" for name in COUNTERS}
    exported |= {f"straggle_{name}" for name in (*GAUGES, *HISTOGRAMS)}
    assert set(LISTS["Metrics"].split()) <= exported


def test_changelog_begins_with_the_version_and_is_read_in_a_minute() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)$", text, re.M)[0] == __version__
    assert len(text.split()) <= 350
