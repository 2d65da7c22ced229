"""The command that trains lets ranks draw micro-batches, resumes, and is replayed; what it cannot do is refused."""

from __future__ import annotations

import json

import pytest
import yaml
from ranks import run_command
from repository import ROOT
from training import TINY

from straggle.commands.configuration.config import load
from straggle.commands.configuration.schema import ConfigurationError


@pytest.mark.slow
def test_train_pulls_resumes_and_is_replayed(tmp_path):
    def train(*more):
        light = (*TINY, "report=false", "metrics=none", "num_microbatches=4", "work=pulled", "run_dir=runs/a")
        return run_command("train", 2, *light, *more, folder=tmp_path)

    slow = ["faults.slow.ranks=[1]", "faults.slow.factor=4.0", "~faults.sometimes", "deadline=none"]
    train(*slow, "steps=15")
    train(*slow, "steps=30", "resume=true")
    summary = json.loads((tmp_path / "runs/a/summary.json").read_text())
    records = list(map(json.loads, (tmp_path / "runs/a/trace.jsonl").read_text().splitlines()))
    assert len(records) == 30
    for record in records:
        assert sum(rank["parts"] for rank in record["ranks"]) == record["pool_parts"] == 8
    assert records[15]["ranks"][1]["parts"] < 4  # the resumed run knows that this one is slow
    assert len(set(summary["parameters_sha256"])) == 1
    assert "parameters as in runs/a: identical" in train("replay=runs/a", "run_dir=runs/b", "steps=30")


@pytest.mark.slow
def test_sharded_replicas_pull_and_resume(tmp_path):
    def train(*more):
        keys = (*TINY, "workload.depth=1", "parallel=sharded", "report=false", "metrics=none", "run_dir=runs/a")
        return run_command("train", 4, *keys, "num_microbatches=4", "work=pulled", *more, folder=tmp_path)

    slow = ["faults.slow.ranks=[3]", "faults.slow.factor=4.0", "~faults.sometimes", "deadline=none"]
    train(*slow, "steps=15")
    train(*slow, "steps=25", "resume=true")
    records = list(map(json.loads, (tmp_path / "runs/a/trace.jsonl").read_text().splitlines()))
    assert len(records) == 25
    for record in records:
        assert sum(rank["parts"] for rank in record["ranks"]) == record["pool_parts"] == 8
    assert sum(record["ranks"][1]["parts"] for record in records[5:]) < 80  # one of its ranks is slow


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["work=pulled"], "needs num_microbatches above 1"),
        (["work=drawn"], "choose one of dealt, pulled"),
    ],
)
def test_what_does_not_go_with_it_is_refused(keys, words):
    with pytest.raises(ConfigurationError, match=words):
        load("train", [*TINY, *keys])


def test_a_method_of_compare_needs_several_micro_batches():
    with pytest.raises(ConfigurationError, match="above 1"):
        load("compare", [*TINY, "+methods.pulled.work=pulled"])
    load("compare", [*TINY, "+methods.pulled.work=pulled", "num_microbatches=4"])


@pytest.mark.parametrize(
    ("file", "service", "more"),
    [("docker-compose.yml", "x-worker", []), ("docker-compose.members.yml", "x-member", ["members=elastic"])],
)
def test_the_clusters_take_it_by_their_variable_for_keys(file, service, more, monkeypatch):
    monkeypatch.setenv("WORKER", "fast")
    worker = yaml.safe_load((ROOT / "docker" / file).read_text())[service]
    assert worker["environment"]["KEYS"] == "${KEYS:-}"
    command = [word.replace("$$", "$") for word in worker["command"]]
    config = load("train", [*command, *more, "work=pulled", "num_microbatches=4"])
    assert (config.work, bool(config.members)) == ("pulled", bool(more))
