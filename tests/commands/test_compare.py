"""The command that compares: all methods in real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import run_command

from straggle.commands.configuration.schema import config_dir

# in place of each scenario's pace; load hides a fault that multiplies a few milliseconds of work, and no stall
STALL = "{_target_: straggle.lab.faults.Stall, step: 0, seconds: 0.3, rank: 3, phase: forward, every: 1}"
# `without` needs a scenario in which some ranks are slow, and has tests of its own
METHODS = sorted(path.stem for path in (config_dir() / "methods").iterdir() if path.stem != "without")
ALL = f"methods=[{','.join(METHODS)}]"


@pytest.mark.slow
def test_all_methods_train_in_turns_under_several_scenarios(tmp_path: Path) -> None:
    keys = (ALL, "scenarios=[none,slow_rank]", "workload=digits", "steps=4", "block=2", "num_microbatches=2")
    keys += (
        "workload.channels=8",
        "workload.depth=3",
        "batch_size=4",
        "~faults.pace",
        f"+faults.pace={STALL}",
        "deadline=first_k",
        "deadline.k=2",
        "+methods.equal.rebalance=null",
    )
    out = run_command("compare", 4, *keys, "run_dir=run", folder=tmp_path)
    for scenario in ("none", "slow_rank"):
        results = json.loads((tmp_path / "run" / scenario / "compare.json").read_text())
        assert sorted(results) == sorted([*METHODS, "equal"])
        assert all(fields["replicas_identical"] for fields in results.values())
        assert results["ddp"]["step_time_ratio"] == results["ddp"]["time_to_loss_ratio"] == 1.0
        assert results["ddp"]["dropped_share"] == results["local_sgd"]["dropped_share"] == 0.0
    assert results["majority"]["dropped_share"] > 0.1  # one rank of four is slow, and all of its step is dropped
    assert results["straggle"]["dropped_share"] > 0.0  # it does not wait for more than half of them, either
    assert "time to DDP's final validation loss, over DDP's" in out
    assert (tmp_path / "run" / "compare.png").read_bytes().startswith(b"\x89PNG")
