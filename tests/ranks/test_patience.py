"""A rank that lives and is outside of a step is waited for as DDP's peers would, and is named all the while."""

import contextlib
import logging
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from members import run_forked_job
from ranks import digest, logged, run_forked, staged
from training import Signals, features, mlp

from straggle import Elastic, LateHandling
from straggle.members.regrouped import elastic
from straggle.merge.wire import channel
from straggle.merge.wire.groups import set_time_limit

GIVE_UP_S = 1.0  # who waits is named after 4 s


class Tells(logging.Handler):
    """Sends a signal when something is logged that has these words."""

    def __init__(self, signals, words):
        super().__init__()
        self._signals, self._words = signals, words

    def emit(self, record):
        if self._words in record.getMessage():
            self._signals.send("logged")


def work_alone_until_named(rank, how, limit_s):
    """Rank 0 is at work after step 1, until a peer that waits has named it; what each rank has logged."""
    if how == "pause":
        channel.MORE_S = 0.0  # gloo itself ends what takes longer than ``limit_s``
    signals, group = Signals(), dist.new_group([0, 1], timedelta(seconds=limit_s))
    logging.getLogger("straggle").addHandler(Tells(signals, "waiting for"))
    late_handling = LateHandling(give_up_s=GIVE_UP_S)
    with logged("straggle") as lines, staged(mlp(), process_group=group, late_handling=late_handling) as model:
        for number in range(4):
            with model.step():
                model(features(rank, number)).sum().backward()
            if number == 1:
                with model.pause() if how == "pause" else contextlib.nullcontext():
                    if rank == 0:
                        signals.wait("logged")
    return [line for line in lines if "waiting for" in line], model.last_report.step


@pytest.mark.parametrize(
    ("how", "limit_s", "words"),
    [
        (
            "evaluation",
            60.0,
            "rank 0 is alive and outside of a step; the limit is 60 s, the process group's own limit "
            "(init_process_group(timeout=...))",
        ),
        ("pause", 3.0, "rank 0 is in model.pause(), for which there is no limit"),  # it is named after 4 s
    ],
)
def test_rank_that_works_outside_of_a_step_is_waited_for_beyond_give_up_s_and_named(how, limit_s, words):
    (_, of_rank_0), (lines, of_rank_1) = run_forked(work_alone_until_named, 2, how, limit_s)
    assert (of_rank_0, of_rank_1) == (3, 3)
    assert len(lines) == 1
    assert "waiting for ranks [0]; " in lines[0]
    assert lines[0].endswith(words)
    assert ("the end of the pause, where ranks wait for each other" in lines[0]) == (how == "pause")


def work_alone_until_given_up(rank):
    signals, group = Signals(), dist.new_group([0, 1], timedelta(seconds=3.0))
    with staged(mlp(), process_group=group, late_handling=LateHandling(give_up_s=GIVE_UP_S)) as model:
        for number in range(3):
            if (rank, number) == (0, 2):
                signals.wait("given up")
            try:
                with model.step():
                    model(features(rank, number)).sum().backward()
            finally:
                signals.send("given up") if number == 2 else None


def test_rank_outside_of_a_step_is_given_up_after_the_time_limit_of_the_group_and_the_error_says_so():
    _, end = run_forked(work_alone_until_given_up, 2, outcomes=True)
    assert end.kind == "PeerFailed"
    assert "no answer from ranks [0]" in end.message
    assert end.message.endswith(
        "rank 0 is alive and outside of a step: given up after 3 s, the process group's own limit "
        "(init_process_group(timeout=...))"
    )


def stand_in_a_step(rank):
    signals, group = Signals(), dist.new_group([0, 1], timedelta(seconds=60.0))
    with staged(mlp(), process_group=group, late_handling=LateHandling(give_up_s=GIVE_UP_S)) as model:
        try:
            with model.step():
                if rank == 0:
                    signals.wait("given up")
                model(features(rank, 0)).sum().backward()
        finally:
            signals.send("given up")


def test_rank_that_stands_still_in_a_step_is_given_up_after_give_up_s_and_the_error_says_so():
    _, end = run_forked(stand_in_a_step, 2, outcomes=True)
    assert end.kind == "PeerFailed"
    assert end.message.endswith("rank 0 is in a step: given up after give_up_s=1 (LateHandling)")


def pause_for_long(rank, board, group_s):
    """A member's pause after step 3 lasts until its peer has begun anew in groups that gloo's limit has not ended."""
    elastic.OLD_S = group_s
    signals = Signals()
    logging.getLogger("straggle").addHandler(Tells(signals, "generation 1, the same members"))
    members, late_handling = Elastic(min_ranks=1), LateHandling(give_up_s=GIVE_UP_S, stuck_after_s=2.0)
    with staged(mlp(), members=members, late_handling=late_handling) as model:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        step = model.register_state(optimizer=optimizer)
        while step < board.end:
            if (rank, step) == (1, 4):
                with model.pause():
                    signals.wait("logged")
            with model.step():
                model(features(rank, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            step = model.last_report.step + 1
            board.note(rank, step)
        return digest(model.module.parameters()), model.member_ranks


@pytest.mark.slow
def test_member_in_a_pause_is_named_as_that_and_waited_for_longer_than_gloo_waits():
    with run_forked_job(2, pause_for_long, 3.0) as job:
        job.walk(8)
        outcomes = job.finish()
        log = job.log()
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == (0, 1)
    assert "rank 1 is in model.pause(), for which there is no limit" in log
    assert "rank 0 has waited for rank 1 in step 4 for " in log
    assert "it is in model.pause(), for " in log
    assert "no word of itself" not in log


def come_while_the_only_member_is_away(rank, board, away, group_s):
    """Rank 0 stays ``away`` once the file "away" is there."""
    set_time_limit(dist.group.WORLD, group_s)

    def wait():
        while rank == 0 and (board.folder / "away").exists():
            (board.folder / "is away").touch()
            time.sleep(0.01)

    members, late_handling = Elastic(min_ranks=1), LateHandling(give_up_s=GIVE_UP_S)
    with staged(mlp(), members=members, late_handling=late_handling) as model:
        step = model.register_state(optimizer=torch.optim.SGD(model.parameters(), 0.01))
        while step < board.end:
            with model.step():
                if away == "in a step":
                    wait()
                model(features(rank, step)).sum().backward()
            if away == "outside":
                wait()
            step = model.last_report.step + 1
            board.note(rank, step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("away", "limit"),
    [
        ("in a step", "give_up_s=1 (LateHandling)"),
        ("outside", "4 s, the process group's own limit (init_process_group(timeout=...))"),
    ],
)
def test_newcomer_waits_for_a_member_as_long_as_others_would_and_says_which_limit_is_over(away, limit):
    with run_forked_job(2, come_while_the_only_member_is_away, away, 4.0) as job:
        job.walk(3)
        (job.folder / "away").touch()
        job.wait(lambda: (job.folder / "is away").exists(), "rank 0 is away")  # and no more in the step before
        job.kill(1)
        job.start(1)
        end = job.result(1)
    assert end.kind == "PeerFailed"
    assert end.message.endswith(f"the members (ranks [0]) have not answered within {limit}")
