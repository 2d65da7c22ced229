"""The files in deploy/ for SkyPilot and Ray: what they start, and a run of two workers under Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from repository import ROOT

from straggle.commands.configuration.config import load

DEPLOY = ROOT / "deploy"

# of get_task_schema and get_resources_schema in SkyPilot's sky/utils/schemas.py, the fields that the file uses
TASK = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "num_nodes": {"type": "integer"},
        "workdir": {"type": "string"},
        "resources": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"cpus": {"type": ["string", "number"]}, "accelerators": {"type": ["string", "object"]}},
        },
        "volumes": {"type": "object"},
        "setup": {"type": "string"},
        "run": {"type": "string"},
    },
}


def test_task_of_skypilot_starts_each_node_of_the_job(tmp_path: Path) -> None:
    task = yaml.safe_load((DEPLOY / "skypilot" / "train.yaml").read_text())
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema comes with the extra deploy")
    jsonschema.validate(task, TASK)
    (tmp_path / "launch.sh").write_text('#!/bin/sh\necho "$NNODES $NODE_RANK $MASTER_ADDR" "$@"\n')
    (tmp_path / "launch.sh").chmod(0o755)
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    command, environment = ["bash", "-ec", task["run"]], {"PATH": os.environ["PATH"], **sky}
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.startswith("2 1 10.0.0.1 resume=auto ")
    config = load("train", said.split()[3:])
    assert [Path(path) in Path(config.run_dir).parents for path in task["volumes"]] == [True]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_of_ray_train_one_model(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is in an extra of its own, ray")
    command = [sys.executable, str(DEPLOY / "ray" / "train.py"), "--steps", "40", "--every", "20"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [*command, "--storage", str(tmp_path / "runs")], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads(done.stdout.splitlines()[-1])
    assert numbers["step"] == 40
    assert 0 < numbers["loss"] < 5  # the sum of 32 numbers has a variance of 32
    assert len(list((tmp_path / "runs").rglob("model.pt"))) == 2
