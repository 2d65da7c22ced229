"""A replica of which no rank died comes back in the same processes, and one that is told to end leaves as a whole."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from members import Board, run_forked_job, run_job
from ranks import Raised
from replicas import SHARDS, end, hold, hold_up, late, processes, ranks_of, start_again, train

import straggle
from straggle.members import agents
from straggle.members.healed import healing

LOSES = "loses"  # while this file exists, rank 3 loses the state that comes
DEADLINE = straggle.QuantileDeadline(0.9, slack=1.5)


@pytest.mark.slow
def test_replica_that_fell_behind_comes_back_in_the_same_processes() -> None:
    with run_job(6, train, DEADLINE, replica_size=SHARDS) as job:
        job.walk(10)
        before = processes(job)
        for rank in ranks_of(1):
            hold_up(job, rank)
            job.walk(5)
        results = end(job)
        assert processes(job) == before
    assert [own["first"] for own in results] == [0] * 6
    assert sum(1 in own.joined for own in results[0]["changes"]) >= 2  # on a busy machine it may fall behind again


@pytest.mark.slow
def test_replica_that_is_held_up_in_its_first_step_comes_back_in_the_same_processes() -> None:
    """As one does that compiles."""
    with run_job(6, train, DEADLINE, replica_size=SHARDS) as job:
        job.walk(10)
        job.kill(3)
        job.walk(4, ranks_of(0, 2))
        hold(job.board, 2).touch()
        start_again(job, 1)
        hold_up(job, 2)
        before = processes(job)
        job.walk(5)
        results = end(job)
        assert processes(job) == before
    assert results[2]["first"] == results[3]["first"] > 10


@pytest.mark.slow
def test_replica_of_a_rank_that_is_stopped_for_a_while_comes_back_in_the_same_processes() -> None:
    with run_job(6, train, replica_size=SHARDS) as job:
        job.walk(4)
        before = processes(job)
        job.stop(3)
        job.wait(lambda: "replica 1 left: rank 3 of it: no sign of life" in job.log(), "the replica leaves")
        job.walk(4, ranks_of(0, 2))
        store, looked_at = job.connect(), set[int]()

        def asked() -> bool:
            looked_at.update(rank for rank in range(6) if agents.take_silent(store, rank))
            return len(looked_at) >= SHARDS

        job.wait(asked, "agents are asked to look at the ranks of the replica")
        assert looked_at == {*ranks_of(1)}
        job.resume(3)
        job.walk(5)
        end(job)
        assert processes(job) == before


@pytest.mark.slow
def test_rank_that_is_killed_while_its_replica_is_healed_in_place_takes_it_out_again() -> None:
    with run_job(6, train, DEADLINE, replica_size=SHARDS) as job:
        job.walk(10)
        hold_up(job, 2)
        job.wait(lambda: "replica 1 joined" in job.log(), "the replica is let in")
        job.kill(3)
        job.walk(4, ranks_of(0, 2))
        assert isinstance(job.result(2), Raised)
        start_again(job, 1)
        job.walk(5)
        assert [own["first"] > 10 for own in end(job)] == [False, False, True, True, False, False]


@pytest.mark.slow
def test_ranks_of_a_replica_go_on_from_one_step_though_one_of_them_has_lost_its_state_once() -> None:
    with run_job(6, _train_and_lose_a_state, DEADLINE, replica_size=SHARDS) as job:
        job.walk(4)
        job.kill(3)
        job.walk(4, ranks_of(0, 2))
        lost = job.board.folder / LOSES
        lost.touch()
        start_again(job, 1)
        job.wait(lambda: not lost.exists(), "a state is lost")
        job.walk(5)
        results = end(job)
    assert results[2]["first"] == results[3]["first"] > 4


def _train_and_lose_a_state(rank: int, board: Board, deadline: straggle.Deadline) -> dict[str, object]:
    receive, lost = healing.receive, board.folder / LOSES

    def receive_or_lose(*words: Any, **options: Any) -> object:
        state = receive(*words, **options)
        if rank == 3 and lost.exists():
            lost.unlink()
            raise OSError("lost on its way, by the test")
        return state

    healing.receive = receive_or_lose
    return train(rank, board, deadline)


@pytest.mark.slow
def test_replica_is_let_in_though_one_shard_is_merged_long_after_the_other() -> None:
    """The view is written before the members of that shard have the step: they wait for no other one."""
    with run_job(4, train, replica_size=SHARDS) as job:
        job.walk(4)
        job.kill(3)
        job.walk(4, ranks_of(0))
        late(job.board, 1).touch()
        start_again(job, 1)
        job.wait(lambda: "replicas [0, 1]: replica 1 joined" in job.log(), "the replica is let in")
        late(job.board, 1).unlink()
        job.walk(5)
        results = end(job)
    assert results[2]["first"] == results[3]["first"] > 4


@pytest.mark.slow
def test_replica_leaves_after_a_step_if_one_of_its_ranks_is_told_to_end() -> None:
    with run_forked_job(6, train, served=True, replica_size=SHARDS) as job:
        job.walk(4)
        os.kill(job.process(3).pid, signal.SIGTERM)
        left = [job.result(rank) for rank in ranks_of(1)]
        job.walk(4, ranks_of(0, 2))
        stayed = job.finish(ranks_of(0, 2))
    assert not any(isinstance(own, Raised) for own in left), left
    assert left[0]["step"] == left[1]["step"]
    assert all(own["requested"] and own["peers_go_on"] for own in left)
    assert stayed[0]["changes"][0].left_kinds == {1: "notice"}
    assert [own["hash"] for own in stayed[:2]] == [own["hash"] for own in stayed[2:]]


@pytest.mark.slow
def test_all_end_after_the_same_step_if_a_rank_is_told_whose_replica_cannot_be_spared() -> None:
    with run_forked_job(4, train, None, None, served=True, replica_size=SHARDS) as job:
        job.walk(4)
        os.kill(job.process(3).pid, signal.SIGTERM)
        results = [job.result(rank) for rank in range(4)]
    assert not any(isinstance(own, Raised) for own in results), results
    assert len({own["step"] for own in results}) == 1
    assert not any(own["peers_go_on"] for own in results)
    assert [own["hash"] for own in results[:2]] == [own["hash"] for own in results[2:]]
