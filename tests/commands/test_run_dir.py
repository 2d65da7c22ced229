"""A command in a run's folder that another uses touches nothing there."""

import os
import subprocess
import sys

import pytest
from repository import ROOT

from straggle.commands.run_dir import one_run


@pytest.mark.slow
def test_train_in_a_folder_that_is_in_use_touches_nothing_there(tmp_path):
    with one_run(tmp_path / "run"):
        command = [sys.executable, "-m", "straggle", "train", "workload=digits", "steps=2", "run_dir=run"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("run_dir=run is in use by process")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]
