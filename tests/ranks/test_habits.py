"""What loops with members do between two steps: work on one rank alone, and collectives of their own."""

from __future__ import annotations

import contextlib
import re
import time

import pytest
import torch
import torch.distributed as dist
from job_loop import plain
from members import run_job
from ranks import digest, staged

from straggle import Elastic, FixedDeadline, LateHandling

FEW = Elastic(min_ranks=1, suspect_s=1.0)


def step_of(model, optimizer, rank):
    with model.step():
        time.sleep(0.01)
        model(torch.full((2, 4), rank + 1.0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluate_alone(rank, board, who, how, until, limit_s):
    """Rank ``who`` evaluates after step 10, until its peer has made ``until`` steps, or for ``limit_s``."""
    late, deadline = LateHandling(max_lag=6), FixedDeadline(0.3 if how == "pause" else 0.02)
    with staged(plain(), deadline=deadline, late_handling=late, members=FEW) as model:
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        step = model.register_state(optimizer=optimizer)
        while step < board.end:
            step_of(model, optimizer, rank)
            step = model.last_report.step + 1
            board.note(rank, step)
            if (rank, step) == (who, 11):
                with model.pause() if how == "pause" else contextlib.nullcontext():
                    began = time.monotonic()
                    while max(board.made(0), board.made(1)) < until and (
                        how != "pause" or time.monotonic() < began + 1
                    ):
                        (model if how == "model" else model.module)(torch.ones(2, 4))
                        time.sleep(0.005)
                board.note(rank, step)
        return digest(model.module.parameters()), model.healing_report.num_states, model.member_ranks


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("how", ["model", "module"])
def test_rank_that_works_alone_for_too_long_is_told_what_to_write_in_time_and_comes_back(who, how):
    with run_job(2, evaluate_alone, who, how, 40, 60.0) as job:
        job.walk(80)
        job.meet()
        outcomes = job.finish()
        log = {path.name: path.read_text() for path in job.folder.glob("log*")}
    assert outcomes[0][0] == outcomes[1][0]
    assert outcomes[who][1] >= 1, "it took a peer's state"
    told = f"rank {who} has been at work between two steps while 3 steps were merged without it"
    own, peers = log[f"log{who}.0"], log[f"log{1 - who}.0"]
    assert re.search(r"without it, in \w+ \(tests/\w+/\w+\.py:\d+", own), own  # it also reads the board
    assert peers.count(f"rank {who} has been at work between two steps") == 1, peers
    assert told in peers
    assert "write `with model.pause():`" in peers
    assert own.index("write `with model.pause():`") < own.index("between two steps, before step"), own


def test_rank_that_works_alone_in_a_pause_is_waited_for_and_told_nothing():
    with run_job(2, evaluate_alone, 0, "pause", 1000, 1.5) as job:
        job.walk(40)
        outcomes = job.finish()
        log = job.log()
    assert outcomes[0][0] == outcomes[1][0]
    assert [own[1] for own in outcomes] == [0, 0]
    assert "between two steps" not in log


COLLECTIVES = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(1), group=group),
    "barrier": dist.barrier,
    "gather": lambda group: dist.all_gather([torch.empty(1) for _ in range(3)], torch.ones(1), group=group),
}


def catch_errors(rank, board, name):
    """A collective in a group of the loop's own after every fifth step, whose error it catches."""
    errors = []
    with staged(plain(), members=FEW) as model:
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        step = model.register_state(optimizer=optimizer)
        peers = dist.new_group() if step == 0 else None  # a process that was started again is in no group of the others
        while step < board.end:
            step_of(model, optimizer, rank)
            step = model.last_report.step + 1
            board.note(rank, step)
            if step % 5 == 0 and peers is not None:
                try:
                    COLLECTIVES[name](peers)
                except RuntimeError as error:
                    errors.append((str(error), step))
        return digest(model.module.parameters()), errors


@pytest.mark.parametrize("name", COLLECTIVES)
def test_error_of_a_collective_names_who_left_and_the_loop_that_catches_it_goes_on(name):
    with run_job(3, catch_errors, name) as job:
        job.walk(12)
        job.kill(1)
        job.walk(25, [0, 2])
        job.start(1)
        job.walk(15)
        outcomes = job.finish()
        log = job.log()
    assert len({own[0] for own in outcomes}) == 1
    for errors in (outcomes[0][1], outcomes[2][1]):
        assert errors
        for error, _ in errors:  # also those from when rank 1 is back
            assert error.startswith("rank 1 left (no sign of life for"), error
            assert "write step.log(loss=loss)" in error
            assert "`with model.pause():`" in error
            assert "Connection closed by peer" in error or "gloo" in error, error
    assert "rank 0 left" not in log
    assert "rank 2 left" not in log
