"""The command that judges estimators."""

import json
import os
import subprocess
import sys

import pytest
from repository import ROOT

from straggle.commands.config import load
from straggle.lab.estimators.runs import WAIT


@pytest.mark.slow
def test_command_judges_all_methods_and_writes_what_it_prints(tmp_path):
    keys = ["quick=true", "~tasks.text", "num_ranks=4", "tasks.digits.steps=5", "tasks.digits.seeds=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "straggle", "evaluate", *keys, "run_dir=found"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "found" / "estimators.json").read_text())
    methods = load("evaluate", []).judged.keys()
    assert {run["method"] for run in content["runs"]} == {WAIT, *methods}
    assert len(content["runs"]) == 2 * (1 + len(methods))
    assert {judgement["method"] for judgement in content["judgements"]} == set(methods)
    assert all(method in done.stdout for method in methods)
    assert (tmp_path / "found" / "estimators.png").exists()
