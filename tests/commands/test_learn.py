"""The command that trains logical ranks."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_command_trains_beside_the_same_runs_with_nobody_late(tmp_path):
    keys = ["workload.channels=4", "workload.depth=1", "ranks=4", "steps=8", "seeds=2", f"run_dir={tmp_path}"]
    keys += ["lateness=deadline", "deadline=fixed", "deadline.budget_s=1.2", "delays=slow_ranks", "delays.factor=2.0"]
    done = subprocess.run(
        [sys.executable, "-m", "straggle", "learn", *keys], capture_output=True, text=True, check=True
    )
    assert "accuracy" in done.stdout
    numbers = json.loads((tmp_path / "learning.json").read_text())
    assert [max(dropped) for dropped in numbers["nobody_late"]["dropped_by_rank"]] == [0.0, 0.0]
    for dropped in numbers["under_the_rule"]["dropped_by_rank"]:
        assert [share > 0 for share in sorted(dropped)] == [False, False, False, True]
    for runs in numbers.values():
        assert [len(losses) for losses in runs["training_loss"]] == [8, 8]
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")
