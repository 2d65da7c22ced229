"""Members leave and come back while the others train on: at the end all have the same bits."""

import contextlib
import fcntl
import random
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from job_loop import (
    Loop,
    Position,
    absent,
    check_equal,
    gives_again,
    joined,
    left,
    plain,
    train,
    wider,
    with_state,
)
from members import run_job
from queued_device import queued_device
from ranks import Raised, die, digest, run_forked, run_ranks, staged
from telemetry_rows import ALL_COLUMNS, row_of
from training import features, mlp

from straggle import (
    Abstain,
    BalancedByTime,
    Elastic,
    FixedDeadline,
    JobDone,
    LateHandling,
    Merge,
    MovingAverage,
    StagedDataParallel,
    WaitForAll,
    building,
    world,
)
from straggle.backward.stages import plan_stages
from straggle.loop import model_parts
from straggle.members import member as member_module
from straggle.members.agents import over, post_stopped
from straggle.members.healed import healing, state_wire
from straggle.members.healed.pace import Pace
from straggle.members.regrouped.elastic import ElasticChannel
from straggle.members.views.view import Leaving, Repair
from straggle.members.views.view_chain import Hold
from straggle.members.wing import Members
from straggle.merge.late.current_deadline import CurrentDeadline
from straggle.merge.late.replica import Replica
from straggle.merge.late.sides import Entry
from straggle.merge.round.buffers import StageBuffers
from straggle.merge.round.coordinator import Coordinator
from straggle.merge.round.rank_parts import RankParts
from straggle.merge.rows.telemetry import Column, Columns
from straggle.merge.wing import Wings
from straggle.merge.wire.groups import GlooGroup, let_go
from straggle.merge.wire.store import default_store
from straggle.policies.estimators import FillIn
from straggle.source.replicated import slots_of

BALLAST = 2**24  # elements of a state that takes a while to send


def wait_logged(job, text):
    job.wait(lambda: text in job.log(), f"{text!r} in the log")


def test_killed_ranks_come_back_with_the_state_of_the_others():
    """Of model and optimizer, what a model holds beside, and the memory of an estimator that all ranks share."""
    with run_job(3, train, Loop(with_state, estimator=MovingAverage(0.999))) as job:
        job.walk(6)
        for rank in (2, 0):
            peers = [other for other in range(3) if other != rank]
            job.kill(rank)
            job.walk(12, peers)
            job.start(rank)
            job.walk(6)
        outcomes = job.finish()
        copied = [line for line in job.log().splitlines() if "copied its state" in line]
    check_equal(outcomes)
    assert outcomes[0].state["estimator"] != digest([])
    assert len(copied) == 2
    assert all("into memory that was there" in line for line in copied)  # the peers wait for the copy alone
    assert gives_again(outcomes[1], 0, 2)
    zero, one, two = outcomes
    assert one.begun == 0
    assert 18 <= two.begun < zero.begun < one.step
    assert set(left(one)) == {2, 0}
    assert joined(one) == {2, 0}
    for rank, begun in ((2, two.begun), (0, zero.begun)):
        without = absent(one, rank)
        assert without == list(range(without[0], begun))  # each step of its absence, and none before or after
        assert len(without) >= 12
    assert one.last_change is not None
    assert one.last_change.world_size == 3
    generations = [change.generation for change in one.changes]
    assert generations == sorted(set(generations))


def test_rank_that_was_stopped_for_seconds_is_healed_in_its_own_loop():
    with run_job(3, train, Loop(plain)) as job:
        job.walk(6)
        job.stop(1)
        job.walk(12, [0, 2])
        job.sleep(3.0)
        job.resume(1)
        job.walk(6)
        job.meet()
        outcomes = job.finish()
    check_equal(outcomes)
    assert gives_again(outcomes[0], 1)
    assert set(left(outcomes[0])) == {1}
    assert outcomes[1].begun == 0  # the same process
    assert len(outcomes[1].reports) == outcomes[1].step  # which has made each step
    assert len(absent(outcomes[0], 1)) >= 12
    # its loop needs seconds for the steps that it has missed, and no peer waits for it
    back = absent(outcomes[0], 1)[-1] + 1
    assert max(report.seconds for report in outcomes[0].reports[back + 1 :]) < 1.0


def test_rank_that_its_agent_says_is_stopped_is_put_out_as_soon_as_it_is_silent_and_no_other():
    with run_job(4, train, Loop(plain, elastic=Elastic(suspect_s=30.0))) as job:
        job.walk(6)
        post_stopped(job.connect(), 2, is_stopped=True)  # of a moment ago: it gives signs of life
        job.sleep(3.0)
        job.stop(1)
        post_stopped(job.connect(), 1, is_stopped=True)
        job.walk(12, [0, 2, 3])
        job.resume(1)
        post_stopped(job.connect(), 1, is_stopped=False)
        job.walk(6)
        job.meet()
        outcomes = job.finish()
    check_equal(outcomes)
    assert gives_again(outcomes[0], 1)
    assert left(outcomes[0]) == {1: "its process is stopped by a signal"}
    missed = absent(outcomes[0], 1)[0]
    assert max(report.seconds for report in outcomes[0].reports[missed - 1 : missed + 1]) < 1.5


def test_two_ranks_leave_at_once_and_come_back():
    with run_job(4, train, Loop(plain, elastic=Elastic(min_ranks=2, suspect_s=1.0))) as job:
        job.walk(6)
        job.kill(1, 3)
        job.walk(12, [0, 2])
        job.start(1)
        job.start(3)
        job.walk(6)
        outcomes = job.finish()
    check_equal(outcomes)
    assert gives_again(outcomes[0], 1, 3)
    assert set(left(outcomes[0])) == {1, 3}
    assert min(outcomes[1].begun, outcomes[3].begun) >= 18


def test_too_few_ranks_are_an_error_that_names_those_that_left():
    with run_job(3, train, Loop(plain)) as job:
        job.walk(6)
        job.kill(1, 2)
        error = job.result(0)
    assert isinstance(error, Raised)
    assert error.kind == "TooFewRanks", error
    assert "rank 0, step " in error.message
    assert "1 of 3 ranks are left" in error.message
    assert "rank 1 left: no sign of life" in error.message or "rank 2 left: no sign of life" in error.message
    assert "Elastic.min_ranks" in error.message


def train_whatever_is_raised(rank, board):
    """A loop that catches each error of a step and takes the next batch; it ends when its data does."""
    heard = []
    with staged(plain(), members=Elastic(suspect_s=0.5)) as model:
        for step in range(1000):
            try:
                with model.step():
                    if (rank, step) == (1, 5):
                        die()
                    model(torch.full((2, 4), rank + 1.0)).square().mean().backward()
            except Exception as error:
                heard.append(type(error).__name__)
                assert len(heard) < 10, heard
            board.note(rank, step + 1)


def test_loop_that_catches_what_ended_the_job_is_ended_and_does_not_go_through_its_data():
    with run_job(2, train_whatever_is_raised) as job:
        error = job.result(0)
    assert isinstance(error, Raised)
    assert error.kind == "SystemExit", error
    assert "1 of 2 ranks are left" in error.message
    assert error.message.endswith("the loop has caught this and goes on, and none of its steps is merged: it is ended")


def test_leader_that_dies_while_it_gives_its_state_is_replaced():
    with run_job(4, train, Loop(plain, ballast=BALLAST, elastic=Elastic(min_ranks=2, suspect_s=1.0))) as job:
        job.walk(6)
        job.kill(3)
        job.walk(6, [0, 1, 2])
        job.start(3)
        wait_logged(job, "rank 3 joined: came back")
        job.kill(0)
        job.walk(6, [1, 2, 3])
        job.start(0)
        job.walk(40)
        job.meet()  # its state takes a while, and its loop is hardly faster than theirs
        outcomes = job.finish()
    check_equal(outcomes)
    assert gives_again(outcomes[1], 0, 3)
    assert set(left(outcomes[1])) >= {0, 3}
    assert joined(outcomes[1]) == {0, 3}


def test_the_only_one_with_the_state_is_waited_for_while_it_is_stopped():
    with run_job(2, train, Loop(plain, ballast=BALLAST, elastic=Elastic(min_ranks=1, suspect_s=1.0))) as job:
        job.walk(6)
        job.kill(1)
        job.walk(6, [0])
        job.start(1)
        wait_logged(job, "rank 1 joined: came back")
        job.stop(0)
        job.sleep(4.0)  # nothing but waiting for four times suspect_s lets it go on
        job.resume(0)
        job.walk(6)
        outcomes = job.finish()
    check_equal(outcomes)
    assert set(left(outcomes[0])) == {1}
    assert outcomes[1].begun >= 6


def test_newcomer_that_dies_while_its_state_arrives_is_put_out_and_may_come_again():
    with run_job(3, train, Loop(plain, ballast=BALLAST)) as job:
        job.walk(6)
        job.kill(2)
        job.walk(6, [0, 1])
        job.start(2)
        wait_logged(job, "rank 2 joined: came back")
        job.kill(2)
        job.walk(12, [0, 1])
        job.start(2)
        job.walk(6)
        check_equal(job.finish())


def raise_once(rank, step, board):
    if (rank, step) == (1, 15):
        raise ValueError("no such batch")


def test_rank_whose_code_raises_leaves_with_its_reason():
    with run_job(3, train, Loop(plain, raise_once)) as job:
        job.walk(20, [0, 2])
        error = job.result(1)
        outcomes = job.finish([0, 2])
    assert (error.kind, error.message) == ("ValueError", "no such batch")
    check_equal(outcomes)
    for own in outcomes:
        assert "rank 1 raised in step 15, data: ValueError('no such batch')" in left(own)[1]
        assert joined(own) == set()
        assert absent(own, 1)[0] in (15, 16)


def end_by_an_error(rank, step, board):
    if (rank, step) == (1, 15):
        sys.last_value = ValueError("no such batch")  # where the interpreter leaves what no code has caught
        return True
    return False


def test_rank_whose_code_raises_between_two_steps_has_not_ended_its_loop(monkeypatch):
    monkeypatch.setattr(sys, "last_value", None, raising=False)  # what a rank sets is set back
    with run_job(3, train, Loop(plain, end_by_an_error)) as job:
        outcomes = job.finish()
    for own in (outcomes[0], outcomes[2]):
        assert left(own)[1] == "rank 1 raised after step 15, outside of a step: ValueError('no such batch')"
        assert own.changes[0].left_kinds == {1: "raised"}


class Seen:
    """What a wire of plain values refuses, as a rank that comes back would need it."""

    def state_dict(self):
        return {"seen": deque([1])}

    def load_state_dict(self, state):
        raise AssertionError(state)


def train_with_a_deque(rank, board, where):
    with staged(plain(), members=Elastic(min_ranks=1, suspect_s=1.0)) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if where == "optimizer":
            optimizer.state[next(model.parameters())] = {"seen": deque([1])}
        step = model.register_state(**{where: optimizer if where == "optimizer" else Seen()})
        while step < board.end:
            with model.step():
                time.sleep(0.01)
                model(torch.full((2, 4), rank + 1.0)).square().mean().backward()
            step += 1
            board.note(rank, step)
        return step


@pytest.mark.parametrize(("where", "place"), [("optimizer", "optimizer.state[0].seen"), ("sampler", "sampler.seen")])
def test_state_that_cannot_be_sent_ends_who_comes_back_with_the_reason_and_no_member(where, place):
    with run_job(3, train_with_a_deque, where) as job:
        job.walk(6)
        job.kill(2)
        job.walk(6, [0, 1])
        for _ in range(2):
            job.start(2)
            error = job.result(2)
            assert error.kind == "Refused", error
            assert f"cannot give it their state: registered.{place} is a collections.deque" in error.message
            assert "give the object that keeps it a state_dict() of" in error.message
            job.kill(2)
            job.walk(6, [0, 1])
        assert job.finish([0, 1])[0] == job.board.end
        assert job.log().count(f"no rank can come back to this job: registered.{place} is") == 1


def stay_in_step_12(rank, step, board):
    while (rank, step) == (1, 12) and "waiting for" not in (board.folder / "log0.0").read_text():
        time.sleep(0.05)


def test_long_wait_for_a_member_names_it_and_not_one_that_is_absent():
    elastic = Elastic(min_ranks=2, suspect_s=1.0)
    with run_job(3, train, Loop(plain, stay_in_step_12, elastic)) as job:
        job.walk(3)
        job.kill(2)
        job.walk(20, [0, 1])
        job.finish([0, 1])
        said = [line for line in job.log().splitlines() if "waiting for ranks" in line]
    assert len(said) == 1
    assert "rank 0, step 12" in said[0]
    assert "waiting for ranks [1]; rank 1 has been in data of step 12" in said[0]


def raise_on_all(rank, step, board):
    if step == 15:
        raise ValueError("no such batch")


def test_exception_on_all_ranks_ends_the_job_with_that_exception():
    with run_job(3, train, Loop(plain, raise_on_all)) as job:
        errors = [job.result(rank) for rank in range(3)]
        job.wait(lambda: over(job.connect()) is not None, "the end is in the store")
        why = over(job.connect())  # so that no agent starts one of them again
    assert [(error.kind, error.message) for error in errors] == [("ValueError", "no such batch")] * 3
    assert why is not None
    assert "raised in step 15, data: ValueError('no such batch')" in why


def die_in_the_first_step(rank, step, board):
    if (rank, step) == (0, 0):
        die()


@pytest.mark.parametrize("stages", [None, BalancedByTime(3)])
def test_rank_that_dies_before_the_stages_are_planned_is_done_without(stages):
    with run_job(3, train, Loop(plain, die_in_the_first_step, stages=stages)) as job:
        job.walk(10, [1, 2])
        job.start(0)
        job.walk(10)
        outcomes = job.finish()
    check_equal(outcomes)
    assert absent(outcomes[1], 0)[0] == 0
    assert outcomes[0].begun >= 10
    assert gives_again(outcomes[1], 0)


@pytest.mark.parametrize("place", [(ElasticChannel, "form"), (model_parts, "check_alike")], ids=["forms", "has met"])
def test_ranks_wrap_their_model_anew_with_one_that_died_meanwhile(place, monkeypatch):
    died, original = [], getattr(*place)

    def dies_once(*args):
        if dist.get_rank() == 1 and not died:
            died.append(True)
            die()
        return original(*args)

    monkeypatch.setattr(*place, dies_once)
    with run_job(3, train, Loop(plain)) as job:
        job.wait(lambda: bool(died), "rank 1 dies")
        job.start(1)
        job.walk(6)
        outcomes = job.finish()
    check_equal(outcomes)
    assert [own.begun for own in outcomes] == [0, 0, 0]
    assert not left(outcomes[0])


def test_rank_that_comes_when_the_others_are_done_is_told_so():
    with run_job(3, train, Loop(plain)) as job:
        job.walk(6)
        job.kill(2)
        job.walk(6, [0, 1])
        job.finish([0, 1])
        job.start(2)
        error = job.result(2)
    assert isinstance(error, Raised)
    assert (error.kind, error.message) == ("JobDone", "rank 2 comes late: ranks [0, 1] have ended their loops")


def train_to_the_end(rank, board, stuck_at):
    """Rank 2 stands still in one step until the others have made their last one, and walks on; they close late."""
    late_handling = LateHandling(max_lag=2)
    elastic = Elastic(min_ranks=1, suspect_s=1.0)
    with staged(plain(), deadline=FixedDeadline(0.02), late_handling=late_handling, members=elastic) as model:
        for step in range(30):
            with model.step():
                while (rank, step) == (2, stuck_at) and board.made(0) < 30:
                    time.sleep(0.005)
                model(torch.full((2, 4), rank + 1.0)).square().mean().backward()
            board.note(rank, step + 1)
        while board.made(2) < 29:
            time.sleep(0.005)
        return digest(model.module.parameters())


@pytest.mark.parametrize("stuck_at", [20, 25])
def test_rank_that_is_out_in_its_last_step_does_not_end_with_an_old_model(stuck_at):
    with run_job(3, train_to_the_end, stuck_at) as job:
        zero, one, two = (job.result(rank) for rank in range(3))
    assert zero == one
    assert isinstance(two, Raised)
    assert (two.kind, two.message) == ("JobDone", "rank 2 comes late: ranks [0, 1] have ended their loops")


def train_two_models(rank, board, first):
    """``first`` steps with one model and five with the next. Rank 1 dies in the middle of the first one, whose loop
    rank 0 ends without it, and skips a model that it is too late for.
    """
    made = []
    for number, steps in enumerate((first, 5)):
        try:
            with staged(plain(), members=Elastic(min_ranks=1, suspect_s=0.5)) as model:
                rank1_left = world.Event()
                model.register_members_hook(lambda report, left=rank1_left: 1 in report.left and left.set())
                begun = model.register_state()
                if (rank, number, steps) == (1, 0, 0):
                    die()
                for step in range(begun, steps):
                    if (rank, number, step) == (1, 0, 3):
                        die()
                    with model.step():
                        model(torch.full((2, 4), rank + 1.0)).square().mean().backward()
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter -= 0.1 * parameter.grad
                if (rank, number) == (0, 0):
                    assert rank1_left.wait(20.0)
                made.append((number, digest(model.module.parameters())))
        except JobDone:
            assert number == 0
        board.note(rank, number + 1)
    return made


@pytest.mark.parametrize("first", [5, 0])
def test_rank_that_is_too_late_for_a_model_goes_on_with_the_next_one(first, monkeypatch):
    ended = ValueError("of another cell of a notebook, which ends nothing")
    monkeypatch.setattr(sys, "last_value", ended, raising=False)
    with run_job(2, train_two_models, first) as job:
        job.wait(lambda: job.board.made(0) == 1, "rank 0 has ended its loop with the first model")
        job.start(1)
        outcomes = [job.result(0), job.result(1)]
    assert [number for number, _ in outcomes[0]] == [0, 1]
    assert outcomes[1] == outcomes[0][1:]


def end_early(rank, step, board):
    return (rank, step) == (1, 15)


def test_rank_whose_loop_ends_earlier_leaves_the_others_to_go_on():
    with run_job(3, train, Loop(plain, end_early)) as job:
        job.walk(20, [0, 2])
        assert job.result(1).step == 15
        outcomes = job.finish([0, 2])
    check_equal(outcomes)
    assert outcomes[0].changes[0].left == {1: "ended"}


def test_newcomer_with_another_model_torch_or_other_options_is_refused_and_the_job_goes_on(monkeypatch):
    with run_job(3, train, Loop(plain)) as job:
        job.walk(6)
        job.kill(2)
        job.walk(6, [0, 1])
        others = {"17": Loop(wider), "deadline": Loop(plain, deadline_s=1.0)}
        others |= {"has 2.0.1": Loop(plain), "the version of straggle is not": Loop(plain)}
        for named, other in others.items():
            with monkeypatch.context() as patch:
                if named == "has 2.0.1":  # the members' was read when they wrapped their model
                    patch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.0.1+cpu"))
                elif named.startswith("the version"):  # another build of it
                    patch.setattr(building, "all_columns", lambda: Columns([Column("of_another_build")]))
                job.start(2, other)
                error = job.result(2)
            assert (error.kind, named in error.message) == ("Refused", True), error
            job.kill(2)
            job.walk(6, [0, 1])
        job.start(2, Loop(plain))
        job.walk(6)
        outcomes = job.finish()
    check_equal(outcomes)
    assert gives_again(outcomes[0], 2)


def be_late(rank, step, board):
    if rank == 1 and step >= 10 and board.made(0) - step < 10:  # its peers make 40 steps meanwhile
        time.sleep(0.4)


def test_members_change_while_another_rank_is_late():
    with run_job(4, train, Loop(plain, be_late, deadline_s=0.1, max_lag=64)) as job:  # late, and not too late
        job.walk(15)
        job.kill(3)
        job.walk(20, [0, 1, 2])
        job.start(3)
        job.walk(25)
        outcomes = job.finish()
    check_equal(outcomes)
    late = [report.step for report in outcomes[0].reports if report.ranks[1].late and report.ranks[3].absent]
    assert late, "rank 1 was late while rank 3 was absent"


def be_stuck_until_others_are_far(rank, step, board):
    if (rank, step) == (1, 15):
        until = time.monotonic() + 20
        while min(board.made(0), board.made(2)) < 60:  # they would be at 25 if they waited for it
            if time.monotonic() > until:
                raise RuntimeError("its peers waited for it")
            time.sleep(0.01)


def test_rank_that_is_stuck_for_longer_than_max_lag_is_not_waited_for_and_is_healed():
    with run_job(3, train, Loop(plain, be_stuck_until_others_are_far, deadline_s=0.1, max_lag=10)) as job:
        job.walk(60)
        job.meet()
        outcomes = job.finish()
    check_equal(outcomes)
    zero, one, _ = outcomes
    assert len(one.reports) == one.step  # it has walked through each step
    assert [(list(change.left), list(change.joined)) for change in zero.changes[:2]] == [([1], []), ([], [1])]
    assert "max_lag" in left(zero)[1]
    without = absent(zero, 1)  # on a busy machine it may fall behind again, so soon is max_lag reached
    stood_in = [report.step for report in zero.reports[15 : without[0]] if report.ranks[1].stood_in]
    assert stood_in == list(range(15, without[0]))
    assert {report.ranks[1].cause for report in zero.reports[15 : without[0]]} == {"data"}
    assert gives_again(zero, 1)


def test_rank_that_cannot_be_spared_stays_a_member_while_it_is_stuck_and_is_healed():
    elastic = Elastic(min_ranks=3, suspect_s=1.0)
    with run_job(3, train, Loop(plain, be_stuck_until_others_are_far, elastic, deadline_s=0.1, max_lag=2)) as job:
        job.walk(45)
        job.meet()
        outcomes = job.finish()
    check_equal(outcomes)
    zero = outcomes[0]
    stuck = zero.reports[15:44]
    assert all(report.ranks[1].stood_in and not report.ranks[1].absent for report in stuck)
    assert {report.ranks[1].cause for report in stuck} == {"data"}
    assert "returns" in left(zero)[1]
    assert joined(zero) == {1}
    assert gives_again(zero, 1)


def stay_in_step_15(rank, step, board):
    while (rank, step) == (2, 15):
        time.sleep(0.05)


def test_what_was_in_flight_to_a_dead_rank_is_lost_for_one_step_and_reported():
    with run_job(3, train, Loop(plain, stay_in_step_15)) as job:
        job.walk(15)
        job.sleep(1.0)  # the others have launched their merges of step 15
        job.kill(2)
        job.walk(10, [0, 1])
        outcomes = job.finish([0, 1])
    check_equal(outcomes)
    for own in outcomes:
        reports = {report.step: report for report in own.reports}
        assert [reports[15].ranks[rank].cause for rank in (0, 1)] == ["members", "members"]
        assert [sum(reports[15].ranks[rank].stages) for rank in (0, 1, 2)] == [0, 0, 0]
        assert reports[15].ranks[2].absent
        assert [sum(reports[16].ranks[rank].stages) > 0 for rank in (0, 1, 2)] == [True, True, False]
        assert [reports[16].ranks[rank].cause for rank in (0, 1)] == [None, None]


@pytest.mark.parametrize("seed", range(10))
def test_replicas_stay_identical_whatever_happens_to_whom(seed):
    chance = random.Random(seed)
    with run_job(4, train, Loop(plain, elastic=Elastic(min_ranks=1, suspect_s=1.0)), seed=seed) as job:
        job.walk(6)
        for _ in range(3):
            job.sleep(chance.uniform(0.0, 0.04))  # any moment of two steps
            hit = chance.sample(range(4), chance.choice([1, 1, 2]))
            if chance.random() < 0.5:
                job.kill(*hit)
                job.sleep(chance.choice([0.0, 1.0]))  # the next start may come before the others notice
                for rank in hit:
                    job.start(rank)
            else:
                job.stop(*hit)
                job.sleep(chance.choice([0.3, 1.5]))
                job.resume(*hit)
            job.walk(5, chance.sample(range(4), 2))  # the others may still be on their way back
        job.walk(6)
        outcomes = job.finish()
    check_equal(outcomes)


def close_before_a_store_that_stands_still(rank):
    """Trains alone, and closes its model while another holds the lock of the store's file; whether that ended."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    model = StagedDataParallel(mlp(), members=Elastic())
    for number in range(5):
        with model.step():
            model(features(rank, number)).square().mean().backward()
    closing = threading.Thread(target=model.close, daemon=True)
    with open(store.path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        closing.start()
        closing.join(40)
        return not closing.is_alive()


@pytest.mark.slow
def test_store_that_stands_still_is_not_waited_for_at_the_end():
    # its requests have no time limit: without one of the library's own this ends with the lock, never
    assert run_forked(close_before_a_store_that_stands_still, 1) == [True]


class Broken(Exception):
    pass


def go_on_after_an_error(rank):
    """Rank 2's code raises in step 10, in the block, and its loop goes on; the parameters at the end."""
    model = StagedDataParallel(mlp(), members=Elastic())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.register_state(optimizer=optimizer)
    absent_in, step = [], 0
    while step < 60:
        with contextlib.suppress(Broken), model.step():
            time.sleep(0.01)
            model(features(rank, step)).square().mean().backward()
            if (rank, step, len(absent_in)) == (2, 10, 10):
                absent_in.append(-1)
                raise Broken
        optimizer.step()
        optimizer.zero_grad()
        assert model.last_report is not None
        absent_in.append(model.last_report.ranks[2].absent)
        step = model.last_report.step + 1
    return digest(model.parameters()), step, absent_in[-1], sum(absent_in), model.last_members_report


def test_rank_whose_loop_goes_on_after_its_own_error_is_healed():
    results = run_ranks(go_on_after_an_error, 3)
    assert len({result[:2] for result in results}) == 1
    assert results[0][2] is False
    assert results[0][3] > 0


def finish_steps_while_others_ask(rank):
    """What is held for newcomers after a step that this rank has merged itself, and after one that it was given."""
    model = mlp()
    channel = ElasticChannel(Elastic(), give_up_s=60.0)
    membership, view = channel.membership, channel.membership.view
    coordinator, member = coordinator_of(
        channel, slots := slots_of(model.named_parameters()), plan_stages(model), WaitForAll()
    )

    def begin_step():
        coordinator.enter(Entry())
        give_ones(coordinator, slots)

    held = []
    coordinator.start()
    try:
        begin_step()
        membership.joins.wanted = {rank: "another incarnation"}
        member.room.ask(1)()
        coordinator.finish(truncated=False, scalars={})
        held.append(membership.chain.held)
        membership.chain.held, admits = None, member.telemetry_of(0)
        member.regroup(channel.groups, view, Repair(1), torch.empty(0))
        begin_step()
        member.freeze()
        member.regroup(channel.groups, view, Repair(2, completed=1, giver=0), admits)
        coordinator.finish(truncated=False, scalars={})
        held.append(membership.chain.held)
    finally:
        coordinator.close()
    return held


def test_step_that_another_member_gave_holds_nobody_for_newcomers():
    # who was to come in after it has, or has not: a rank that waited for that would wait for ever
    assert run_forked(finish_steps_while_others_ask, 1) == [[Hold(1, leads=True), None]]


def change_members_on_a_device(rank):
    """How often the host had waited for its device when a round went on among other members, and afterwards."""
    seen, original, model = [], member_module.go_on, mlp()
    channel = ElasticChannel(Elastic(), give_up_s=60.0)
    slots = slots_of(model.named_parameters())
    with queued_device() as device:
        coordinator, member = coordinator_of(channel, slots, plan_stages(model), WaitForAll())
        member_module.go_on = lambda *args, **options: (seen.append(device.waits), original(*args, **options))
        coordinator.start()
        try:
            coordinator.enter(Entry())
            give_ones(coordinator, slots)
            member.freeze()
            member.regroup(channel.groups, channel.membership.view, Repair(0), torch.empty(0))
            seen.append(device.waits)
            coordinator.finish(truncated=False, scalars={})
        finally:
            coordinator.close()
    return seen


def test_round_goes_on_among_other_members_while_nothing_of_it_is_queued_on_its_device():
    # the thread that copies it has another queue than those that write to it before and read it later
    assert run_forked(change_members_on_a_device, 1) == [[1, 2]]


def coordinator_of(channel, slots, plan, policy):
    """The coordinator of a member of a job of one rank or two, and that member."""
    deadline = CurrentDeadline(policy, LateHandling(), world_size=channel.world_size)
    replica = Replica.of_one_rank(channel)
    rank = RankParts.build(slots, plan, channel, replica, deadline, Merge(), num_state=0, columns=ALL_COLUMNS)
    members = Members(rank, channel)
    coordinator = Coordinator(
        rank, slots, fill_in=FillIn(Abstain()), merge=Merge(), wings=Wings(members), submit_hooks={}
    )
    return coordinator, members.member


def give_ones(coordinator, slots):
    """All gradients of a step, in one backward pass."""
    coordinator.waiting.extend((index, torch.ones_like(own.tensor), 0.0) for index, own in enumerate(slots))
    coordinator.merge_waiting()


def begun_while_it_is_out(rank, catches_up):
    """A rank that has its state again is put out while it takes what was merged meanwhile, and its loop goes on.

    Whether it had to, and what is begun in its place while it is out and its peers take longer than the deadline.
    """
    model = mlp()
    channel = ElasticChannel(Elastic(min_ranks=1), give_up_s=60.0)
    view = channel.membership.view
    coordinator, member = coordinator_of(
        channel, slots_of(model.named_parameters()), plan_stages(model), FixedDeadline(0.001, warmup_steps=0)
    )
    merging, history = coordinator.merging, coordinator.history
    coordinator.start()
    try:
        member.put_out()
        member.waits_for_state()
        member.regroup(channel.groups, view.with_joined(view.members, step=0, giver=rank), Repair(0), torch.empty(0))
        while merging.step < 3:
            time.sleep(0.001)
        member.healed(0, history, {**coordinator.deadline.decided, "seconds": 0.001}, {})
        lags = coordinator.lag > 0
        member.put_out()
        coordinator.deadline.of_ranks(2)
        channel.post_finished(merging.step)
        if not catches_up:  # but makes a pause, for an evaluation
            coordinator.pause()
            coordinator.resume()
        while catches_up and coordinator.training.step <= merging.step:
            coordinator.enter(Entry())
            coordinator.finish(truncated=False, scalars={})
        time.sleep(0.3)
        return lags, merging.round
    finally:
        coordinator.close()


@pytest.mark.parametrize("catches_up", [True, False])
def test_nothing_is_begun_in_the_place_of_a_rank_that_is_out(catches_up):
    # it would be finished among the members that let the rank in again, and these are in another step
    assert run_forked(begun_while_it_is_out, 1, catches_up) == [(True, None)]


def take_telemetry_of_who_has_left(rank):
    """Rank 1 leaves when all has come of a step, its telemetry too, to a peer: who is absent in it for rank 0."""
    model = mlp()
    slots, plan = slots_of(model.named_parameters()), plan_stages(model)
    channel = ElasticChannel(Elastic(), give_up_s=60.0)
    view = channel.membership.view
    if rank == 1:
        buffers = StageBuffers(plan, slots, 2, columns=ALL_COLUMNS)
        for bucket in range(len(plan.buckets())):
            for work in buffers.all_reduce(bucket, {}, channel.groups):
                work.wait()
        return None
    coordinator, member = coordinator_of(channel, slots, plan, WaitForAll())
    coordinator.enter(Entry())
    give_ones(coordinator, slots)
    found = []
    thread = threading.Thread(target=lambda: found.append(coordinator.finish(truncated=False, scalars={})))
    thread.start()
    while (
        (current := coordinator.merging.round) is None or not current.works or not current.works[-1][0].is_completed()
    ):
        time.sleep(0.001)
    member.freeze()
    ones, zeros = (1.0,) * len(plan.stages), (0.0,) * len(plan.stages)
    row = row_of(computed=ones, estimated=zeros, stage_s=zeros).encode(ALL_COLUMNS)
    of_both = torch.cat([row, row])
    member.regroup(
        channel.groups, view.without({1: Leaving("ended", "gone")}), Repair(1, completed=0, giver=0), of_both
    )
    thread.join()
    return found[0].table.absent_ranks()


def test_rank_that_left_after_a_step_was_complete_is_not_absent_in_it():
    # who had the step before knows it as a member: others would deal the samples that it brought again
    assert run_forked(take_telemetry_of_who_has_left, 2) == [frozenset(), None]


def go_on_while_a_change_is_reported(rank):
    """Rank 2's code raises while a hook keeps the thread that follows the members busy, and its loop goes on."""
    model = StagedDataParallel(mlp(), members=Elastic(min_ranks=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.register_state(optimizer=optimizer)
    if rank == 2:
        model.register_members_hook(lambda _: time.sleep(0.5))
    num_raised, step = 0, 0
    while step < 150:
        with contextlib.suppress(Broken), model.step():
            time.sleep(0.01)
            model(features(rank, step)).square().mean().backward()
            others = model.member_ranks == (0, 2) if rank == 2 else step == 10
            if rank in (1, 2) and others and not num_raised:
                num_raised += 1
                raise Broken
        optimizer.step()
        optimizer.zero_grad()
        assert model.last_report is not None
        step = model.last_report.step + 1
    return digest(model.parameters()), step, num_raised, model.last_report.absent_ranks


def test_rank_that_enters_its_next_step_right_after_its_own_error_is_healed():
    results = run_ranks(go_on_while_a_change_is_reported, 3)
    assert [own[2] for own in results] == [0, 1, 1]
    assert len({own[:2] for own in results}) == 1
    assert results[0][3] == ()


def change_views_while_an_old_group_does_not_end(rank):
    """How many threads more there are after a change of members, after five more, and when that group has ended."""
    channel, store = ElasticChannel(Elastic(), give_up_s=60.0), dist.HashStore()
    with ThreadPoolExecutor(2) as places:
        here, there = places.map(lambda place: GlooGroup(store, place, 2, 60.0, 60.0), range(2))
    view, before = channel.membership.view, threading.active_count()

    def more_threads(most, *, after_changes):
        nonlocal view
        for _ in range(after_changes):
            view = view.with_joined(view.members, step=0, giver=rank)
            assert channel.form(view)
        until = time.monotonic() + 20.0  # the others end at once
        while threading.active_count() > before + most and time.monotonic() < until:
            time.sleep(0.01)
        return threading.active_count() - before

    try:
        here.all_reduce(torch.ones(1))  # as with a rank that is frozen
        here.drop()
        counts = [more_threads(1, after_changes=number) for number in (1, 5)]
        there.all_reduce(torch.ones(1)).wait()
        return [*counts, more_threads(0, after_changes=0)]
    finally:
        there.drop()
        channel.close()


def test_one_thread_waits_for_old_groups_however_many_views_come():
    # a rank that is frozen keeps its peers' group with it for minutes
    assert run_forked(change_views_while_an_old_group_does_not_end, 1) == [[1, 1, 0]]


def stay_out_while_a_peer_looks(rank):
    """Rank 1's code raises in a step that rank 0 merges, and stays away: whether rank 0 can free its old groups."""
    model, store = StagedDataParallel(mlp(), members=Elastic(min_ranks=1)), default_store()
    model.register_state()
    try:
        for step in range(1000):
            with contextlib.suppress(Broken), model.step():
                if (rank, step) == (1, 5):
                    time.sleep(0.5)  # rank 0 has launched its own by then
                    raise Broken
                model(features(rank, step)).square().mean().backward()
            if rank == 1 and step == 5:
                store.get("rank 0 has looked")
                return None
            if model.member_ranks == (0,):
                break
        until = time.monotonic() + 20.0
        while not (freed := let_go()) and time.monotonic() < until:
            time.sleep(0.01)
        store.set("rank 0 has looked", "")
        return freed
    finally:
        model.close()


def test_rank_that_is_put_out_does_not_keep_its_peers_old_groups():
    # they are not told that it takes part no more, as long as it has its own
    assert run_forked(stay_out_while_a_peer_looks, 2) == [True, None]


def walk_to_the_end(model, step, rank, board):
    """Steps of about 10 ms, until the test has said which is the last. Their number."""
    while step < board.end:
        with model.step():
            model(features(rank, step)).sum().backward()
        model.zero_grad()
        step = model.last_report.step + 1
        board.note(rank, step)
        time.sleep(0.01)
    return step


def wrap_and_walk(rank, board, ballast):
    """Training until the test ends it. The step of its end."""
    model = StagedDataParallel(mlp(), members=Elastic(min_ranks=1))
    return walk_to_the_end(model, model.register_state(data=Position(ballast)), rank, board)


def test_new_process_whose_first_state_did_not_come_asks_again(monkeypatch):
    refused = []

    def scarce(*size, **options):
        if options.get("dtype") is torch.uint8 and size[0] > 0 and not refused and dist.get_rank() == 2:
            refused.append(size)
            raise MemoryError("no memory")
        return torch.empty(*size, **options)

    for module in (state_wire, healing):
        monkeypatch.setattr(module, "torch", SimpleNamespace(**{**vars(torch), "empty": scarce}))
    with run_job(3, wrap_and_walk, 0) as job:
        job.walk(6)
        job.kill(2)
        job.walk(6, [0, 1])
        job.start(2)
        job.walk(6)
        outcomes = job.finish()
        log = job.log()
    assert len(set(outcomes)) == 1
    assert log.count("the state of the job did not come: no memory") >= 1


def test_who_gives_its_state_pauses_between_the_chunks(monkeypatch):
    pauses, pause = [], Pace.pause

    def noted(pace, num_bytes, seconds):
        pauses.append((dist.get_rank(), num_bytes, seconds))
        pause(pace, num_bytes, seconds)

    monkeypatch.setattr(Pace, "pause", noted)
    with run_job(2, wrap_and_walk, 2**20) as job:
        job.walk(6)
        job.kill(1)
        job.walk(6, [0])
        job.start(1)
        job.walk(6)
        job.finish()
    assert len(pauses) > 2
    assert all(rank == 0 and num_bytes > 0 and seconds > 0 for rank, num_bytes, seconds in pauses)
