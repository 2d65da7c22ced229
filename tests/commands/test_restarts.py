"""Workers that are started again meet in a corner of the store that those before them have not written, and go on."""

import json
import os
import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import run_command, run_forked, straggle_main
from torchrun import started_torchrun
from training import TINY

from straggle.lab.process_group import fresh_store

STALE = ("asks/1", "asks/2", "answer/old", "old/1", "old/2")


def attempts(rank, world_size):
    """What the ranks find under one key in three attempts over the same store, before they write there."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        for key in STALE:  # of an attempt in which ranks died before or after they had an answer
            store.set(f"straggle/attempt/{key}", "old")
    dist.barrier()
    found = []
    for attempt in range(3):
        fresh = fresh_store(store.clone(), rank, world_size)
        found.append(fresh.check([f"address of {rank}"]))
        fresh.set(f"address of {rank}", str(attempt))
        addresses = {fresh.get(f"address of {other}").decode() for other in range(world_size)}
        assert addresses == {str(attempt)}
        dist.barrier()
    return found


def test_each_attempt_has_a_store_of_its_own_whatever_is_left_of_others():
    for world_size in (1, 2, 3):
        assert run_forked(attempts, world_size, world_size) == [[False] * 3] * world_size


def alone(rank):
    store = dist.distributed_c10d._get_default_store()
    fresh_store(store, 0, 3, timeout=timedelta(seconds=0))


def test_ranks_that_do_not_come_are_named():
    (outcome,) = run_forked(alone, 1, outcomes=True)
    assert outcome.kind == "RuntimeError"
    assert "ranks [1, 2] have not come" in outcome.message


# -- torchrun

KEYS = (*TINY, "faults=none", "deadline=none", "rebalance=none", "metrics=none", "report=false", "steps=300")


@pytest.mark.slow
def test_killed_workers_are_restarted_and_go_on_from_their_run_s_checkpoint_alone(tmp_path):
    """One is killed before the first checkpoint, when that of an earlier run lies there; the other one after it."""
    run = tmp_path / "run"
    for folder, *keys in (("run", "steps=5", "seed=7"), ("whole", "seed=0")):
        run_command("train", 2, *KEYS, *keys, f"run_dir={folder}", folder=tmp_path)
    keys = ("train", *KEYS, "checkpoint_every=60", "run_dir=run")
    with started_torchrun(straggle_main, *keys, folder=tmp_path, max_restarts=3) as agent:

        def wait_until(condition):
            while not condition():
                assert agent.process.is_alive(), agent.log.read_text()
                time.sleep(0.02)

        def trains():
            started = (run / "config.yaml").stat().st_mtime_ns
            return started > began and (run / "trace.jsonl").stat().st_mtime_ns > started and len(agent.workers()) == 2

        for kill, target in enumerate((1, 0)):
            began = time.time_ns() if kill == 0 else (run / "config.yaml").stat().st_mtime_ns
            wait_until(trains)
            if kill:
                wait_until(lambda: any(run.glob("checkpoint/step*/state.json")))
            os.kill(agent.workers()[target], signal.SIGKILL)
        assert agent.status(240.0) == 0, agent.log.read_text()
        printed = agent.log.read_text()
    assert printed.count("kept as") == 1
    again, whole = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "whole"))
    assert again["parameters_sha256"] == whole["parameters_sha256"]
    steps = [json.loads(line)["step"] for line in (run / "trace.jsonl").read_text().splitlines()]
    assert steps == list(range(300))
