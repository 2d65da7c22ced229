"""What runs without the package's extras, and what the rest says: every command, with the modules of extras missing."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest
from repository import ROOT

from straggle.extras import MissingExtra, needs_extra

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
MODULES = [
    "hydra",
    "omegaconf",
    "rich",
    "numpy",
    "plotly",
    "jinja2",
    "matplotlib",
    "prometheus_client",
    "sklearn",
]
COMMANDS = {
    "train": ["steps=1"],
    "compare": ["steps=1"],
    "simulate": ["steps=1"],
    "check": ["train"],
    "advise": ["runs"],
    "report": ["runs"],
}

# torch is imported once, and each command in a fork of that process
RUN_EACH = """
import json, os, runpy, sys, traceback
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))  # as if they were not installed
import straggle
for number, (name, words) in enumerate(json.loads(sys.argv[2]).items()):
    if not (child := os.fork()):
        os.dup2(os.open(str(number), os.O_CREAT | os.O_WRONLY), 2)
        sys.argv = ["straggle", name, *words]
        status = 0
        try:
            runpy.run_module("straggle", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def extras_of_pyproject() -> dict[str, str]:
    """The requirements of each extra, as they are written."""
    table = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2].partition("\n\n")[0]
    return dict(line.split(" = ", 1) for line in table.splitlines())


@pytest.mark.slow
def test_every_command_without_the_extras_names_the_one_that_it_needs_and_the_launcher_needs_none(tmp_path):
    commands = {**COMMANDS, "launch": ["--help"]}
    command = [sys.executable, "-W", "ignore", "-c", RUN_EACH, json.dumps(MODULES), json.dumps(commands)]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    printed = done.stdout.splitlines()
    assert [*printed[: len(COMMANDS)], printed[-1]] == [*["2"] * len(COMMANDS), "0"], done
    for number, name in enumerate(COMMANDS):
        extra = "report" if name in ("advise", "report") else "train"
        (told,) = (tmp_path / str(number)).read_text().splitlines()  # one sentence, no traceback
        assert f"pip install 'straggle[{extra}]'" in told, name


@pytest.mark.slow
def test_library_trains_two_ranks_and_stops_a_pass_without_numpy_and_without_any_extra(tmp_path):
    block = f"import runpy, sys; sys.modules.update(dict.fromkeys({MODULES})); "
    run = f"runpy.run_path({str(ROOT / '.ci' / 'smoke.py')!r}, run_name='__main__')"
    command = [sys.executable, "-W", "ignore", "-c", block + run]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "alone" in done.stdout


def test_every_module_of_an_extra_is_among_those_that_are_missing_here():
    installed = packages_distributions()
    names = {re.sub(r"[-_.]+", "-", one).lower() for module in MODULES for one in installed.get(module, [])}
    extras = extras_of_pyproject()
    wanted = {name for extra in ("plot", "metrics", "report", "train") for name in required(extras[extra])}
    assert wanted <= names, "MODULES above lacks what an extra installs"


def required(requirements: str) -> set[str]:
    """The names of the distributions, without other extras of the package."""
    return {re.split(r"[^\w.-]", one)[0] for one in json.loads(requirements) if not one.startswith("straggle")}


def test_extras_that_errors_and_pages_name_are_those_of_pyproject():
    files = [*(ROOT / "straggle").rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(path.read_text() for path in files)
    named = set(re.findall(r"straggle\[([\w,]+)\]", text)) | set(re.findall(r"needs_extra\(\"(\w+)\"", text))
    named |= set(re.findall(r"(?:remedy\(error, |extra=)[\"'](\w+)[\"']", text))
    assert {extra for group in named for extra in group.split(",")} <= extras_of_pyproject().keys()
    assert {"plot", "metrics", "report", "train"} <= named


def test_readme_says_what_each_extra_of_pyproject_gives():
    table = (ROOT / "README.md").read_text().partition("| extra |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(extras_of_pyproject())


@pytest.mark.parametrize("framework", ["transformers", "accelerate", "lightning"])
def test_integration_without_its_framework_names_its_extra(framework, monkeypatch):
    monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.setitem(sys.modules, f"{framework}.pytorch", None)
    monkeypatch.delitem(sys.modules, f"straggle.integrations.{framework}", raising=False)
    with pytest.raises(MissingExtra, match=rf"pip install 'straggle\[{framework}\]'"):
        importlib.import_module(f"straggle.integrations.{framework}")


def test_oldest_torch_of_the_readme_is_that_of_pyproject():
    (oldest,) = re.findall(
        r'^dependencies = \["torch>=([\d.]+)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert f"torch {oldest} or later" in (ROOT / "README.md").read_text()


def test_missing_name_of_our_own_is_not_blamed_on_an_extra():
    with pytest.raises(ImportError, match="no_such_name") as raised, needs_extra("train"):
        from straggle.report import no_such_name  # noqa: F401
    assert "pip install" not in str(raised.value)
