"""The command that trains logical ranks."""

import json

import pytest
from ranks import run_command


@pytest.mark.slow
def test_command_trains_beside_the_same_runs_with_nobody_late(tmp_path):
    keys = ["workload.channels=4", "workload.depth=1", "ranks=4", "steps=8", "seeds=2", "run_dir=."]
    keys += ["lateness=deadline", "deadline=fixed", "deadline.budget_s=1.2", "delays=slow_ranks", "delays.factor=2.0"]
    assert "accuracy" in run_command("learn", 1, *keys, folder=tmp_path)
    numbers = json.loads((tmp_path / "learning.json").read_text())
    assert [max(dropped) for dropped in numbers["nobody_late"]["dropped_by_rank"]] == [0.0, 0.0]
    for dropped in numbers["under_the_rule"]["dropped_by_rank"]:
        assert [share > 0 for share in sorted(dropped)] == [False, False, False, True]
    for runs in numbers.values():
        assert [len(losses) for losses in runs["training_loss"]] == [8, 8]
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")
