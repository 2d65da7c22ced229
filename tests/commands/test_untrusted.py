"""A secret of the environment is in no file of a run."""

import pytest
from ranks import started_command
from training import TINY

from straggle.commands.configuration.schema import register

SECRET = "hunter2-is-not-to-be-found"


@pytest.mark.slow
def test_secret_of_the_environment_is_in_no_file_of_the_run(tmp_path):
    register()
    keys = (*TINY, "faults=none", "steps=3", "metrics.port=null", "run_dir=run", "checkpoint_every=1")
    secret = "+metrics.targets.labels.token='${oc.env:STRAGGLE_SECRET}'"
    with started_command("train", *keys, secret, folder=tmp_path, environment={"STRAGGLE_SECRET": SECRET}) as run:
        assert run.status(120.0) == 0, run.log.read_text()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]  # what it has printed among them
    assert {"config.yaml", "report.html", "summary.json", "trace.jsonl"} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert "${oc.env:STRAGGLE_SECRET}" in (tmp_path / "run" / "config.yaml").read_text()
    assert "${oc.env:STRAGGLE_SECRET}" in (tmp_path / "run" / "report.html").read_text()
