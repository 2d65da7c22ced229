"""The command that judges estimators."""

import json

import pytest
from ranks import run_command

from straggle.commands.config import load
from straggle.lab.estimators.runs import WAIT


@pytest.mark.slow
def test_command_judges_all_methods_and_writes_what_it_prints(tmp_path):
    keys = ["quick=true", "~tasks.text", "num_ranks=4", "tasks.digits.steps=5", "tasks.digits.seeds=1", "workers=1"]
    keys += ["num_stages=3", "tasks.digits.workload.channels=4", "tasks.digits.workload.depth=2"]
    printed = run_command("evaluate", 1, *keys, "run_dir=found", folder=tmp_path)
    content = json.loads((tmp_path / "found" / "estimators.json").read_text())
    methods = load("evaluate", []).judged.keys()
    assert {run["method"] for run in content["runs"]} == {WAIT, *methods}
    assert len(content["runs"]) == 2 * (1 + len(methods))
    assert {judgement["method"] for judgement in content["judgements"]} == set(methods)
    assert all(method in printed for method in methods)
    assert (tmp_path / "found" / "estimators.png").exists()
