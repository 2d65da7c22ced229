"""The advice of errors about a run's folder can be followed: complete runs of `train`, refused, and then as advised."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from advice import pattern
from ranks import run_command
from training import TINY

pytestmark = pytest.mark.slow
KEYS = (*TINY, "faults=none", "deadline=none", "rebalance=none", "metrics=none", "report=false", "checkpoint_every=1")
OTHER = "give the keys that it was made with, or another run_dir ({})"
DAMAGED = "{}: {}; or start from the beginning with resume=false"
FEWER = "replay={}: recorded on {} ranks, and this run has {}: start as many"
LACKS = "or could not write; repeat what it has with steps={}"
SAYS = (OTHER, DAMAGED, FEWER, LACKS)


def train(folder: Path, *keys: str, world_size: int = 2) -> None:
    run_command("train", world_size, *KEYS, *keys, folder=folder)


def refused(folder: Path, says: str, *keys: str, world_size: int = 2, status: int = 2) -> str:
    said = run_command("train", world_size, *KEYS, *keys, folder=folder, status=status)
    assert "Traceback" not in said
    found = re.search(pattern(says), said)
    assert found, said
    return found[0]


def test_run_is_resumed_as_the_errors_say(tmp_path: Path) -> None:
    train(tmp_path, "steps=2", "run_dir=run")
    wider = ("steps=4", "workload.width=32", "resume=true")
    refused(tmp_path, OTHER, *wider, "run_dir=run")
    train(tmp_path, "steps=4", "resume=true", "run_dir=run")
    train(tmp_path, "steps=4", "workload.width=32", "run_dir=another")
    train(tmp_path, *wider, "steps=5", "run_dir=another")
    for path in tmp_path.glob("run/checkpoint*/*/common.pt"):
        path.write_bytes(path.read_bytes()[:-100])
    refused(tmp_path, DAMAGED, "steps=5", "resume=true", "run_dir=run")
    train(tmp_path, "steps=3", "resume=false", "run_dir=run")


def test_run_is_repeated_as_the_errors_say(tmp_path: Path) -> None:
    train(tmp_path, "steps=3", "run_dir=run")
    again = ("replay=run", "run_dir=again")
    refused(tmp_path, FEWER, *again, world_size=3)
    train(tmp_path, *again, world_size=2)
    for path in tmp_path.glob("run/decisions/rank*.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    said = refused(tmp_path, LACKS, *again)
    train(tmp_path, *again, said.split()[-1])
