"""The command that trains deals out by speed, resumes, and is replayed."""

from __future__ import annotations

import json

import pytest
from ranks import run_command


@pytest.mark.slow
@pytest.mark.parametrize("keys", [["batch_size=256"], ["batch_size=4", "num_microbatches=4"]])
def test_train_deals_out_by_speed_resumes_and_is_replayed(keys, tmp_path):
    def train(*more):
        light = ("workload=digits", "workload.depth=3", "report=false", "metrics=none")
        return run_command("train", 2, *light, *keys, *more, folder=tmp_path)

    slow = [
        "rebalance=by_speed",
        "faults.slow.ranks=[1]",
        "faults.slow.factor=8.0",
        "~faults.sometimes",
        "run_dir=runs/a",
    ]
    # no rank is cut, so that its times are measured however busy the machine is
    train(*slow, "steps=20", "deadline=none")
    train(*slow, "steps=40", "resume=true")
    summary = json.loads((tmp_path / "runs/a/summary.json").read_text())
    shares = json.loads((tmp_path / "runs/a/decisions/shares.json").read_text())
    assert len(shares) > 1
    assert summary["weight_per_rank"][1] < summary["weight_per_rank"][0]
    assert len(set(summary["parameters_sha256"])) == 1
    assert "parameters as in runs/a: identical" in train("replay=runs/a", "run_dir=runs/b", "steps=40")
