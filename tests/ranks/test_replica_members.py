"""Replicas that leave as a whole and come back: each replica is two ranks that shard a copy (FSDP2)."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from members import Board, run_forked_job, run_job
from ranks import Raised, run_forked
from replicas import (
    SHARDS,
    end,
    kill_in_forward,
    own_group,
    ranks_of,
    rest,
    sharded,
    start_again,
    train,
    train_in_own_group,
)
from sharding import Blocks, batch, mesh_of, shard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import straggle
from straggle.members import agents
from straggle.members.agents import Exited
from straggle.merge.wire.groups import begin_as_part, ranks_of_job
from straggle.merge.wire.loop_collectives import LoopCollectives
from straggle.merge.wire.store import default_store
from straggle.source.sharded import given, taken

LONG_S = 7.0  # longer than what a process of a replica that hangs has to end by itself
MISSED_S = 20.0  # longer than that after another rank of its replica was missed


@pytest.mark.slow
@pytest.mark.parametrize("deadline", [None, straggle.QuantileDeadline(0.9, slack=1.5)], ids=["waits", "deadline"])
def test_replica_of_a_killed_rank_leaves_and_comes_back_with_the_others_state(
    deadline: straggle.Deadline | None,
) -> None:
    with run_job(6, train, deadline, replica_size=SHARDS) as job:
        job.walk(4)
        kill_in_forward(job, 3)
        job.walk(4, ranks_of(0, 2))
        raised = job.result(2)
        assert isinstance(raised, Raised)
        assert raised.kind == "PeerFailed"
        assert "its replica, ranks [2, 3], is no member" in raised.message
        assert "rank 3 of it: no sign of life" in raised.message
        start_again(job, 1)
        job.walk(5)
        results = end(job)
    back = [own["first"] for own in results[2:4]]
    assert back[0] == back[1] > 4  # both go on from the same step
    first, second, *_ = results[0]["changes"]
    assert (list(first.left), list(second.joined), first.ranks) == ([1], [1], (0, 2))


@pytest.mark.slow
def test_replica_whose_ranks_alone_are_the_default_group_leaves_and_comes_back() -> None:
    with run_job(6, train_in_own_group, replica_size=SHARDS) as job:
        job.walk(10)
        kill_in_forward(job, 3)
        job.walk(10, ranks_of(0, 2))
        raised = job.result(2)
        assert isinstance(raised, Raised)
        assert "its replica, ranks [2, 3], is no member" in raised.message  # as the job counts them
        assert "rank 3 of it: no sign of life" in raised.message
        start_again(job, 1)
        job.walk(20)
        results = end(job)
    assert [own["first"] > 10 for own in results] == [False, False, True, True, False, False]


def _own_collectives(rank: int, _board: Board) -> int:
    own_group(rank)
    counted = LoopCollectives(ranks_of_job(range(SHARDS)))
    counted.begin()
    dist.all_reduce(torch.zeros(1))
    return counted.number


def test_collectives_inside_of_a_replica_are_none_of_the_loop_though_its_ranks_have_other_numbers() -> None:
    """Its peers would count fewer, and a late replica would go on for them to the end of its step."""
    with run_job(4, _own_collectives, replica_size=SHARDS) as job:
        assert job.finish() == [0] * 4


def _wrap_in_own_group(rank: int, _board: Board) -> None:
    own_group(rank)
    straggle.StagedDataParallel(Blocks(1), members=straggle.Elastic())


def test_model_that_no_replica_shards_is_refused_in_a_group_of_its_own() -> None:
    with run_job(4, _wrap_in_own_group, replica_size=SHARDS) as job:
        raised = job.result(0)
        assert isinstance(raised, Raised)
        assert "began a replica of 2 ranks, and the model is sharded over 1: call fully_shard()" in raised.message


def _wrap_without_members(rank: int, _board: Board) -> None:
    own_group(rank)
    straggle.StagedDataParallel(Blocks(1))


def test_model_without_members_is_refused_where_it_would_meet_one_replica_alone() -> None:
    """Each replica would merge its own gradients, and their parameters would differ without a word."""
    with run_job(4, _wrap_without_members, replica_size=SHARDS) as job:
        for rank in range(4):
            raised = job.result(rank)
            assert isinstance(raised, Raised)
            assert "and each replica would train by itself: write members=Elastic()" in raised.message


def _watched_in_own_group(rank: int, folder: Path, in_ddp: bool) -> None:
    store = default_store()
    dist.destroy_process_group()
    corner = dist.PrefixStore(f"replica{rank // SHARDS}", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=corner, rank=rank % SHARDS, world_size=SHARDS)
    begin_as_part(rank // SHARDS * SHARDS, 4)
    model = DistributedDataParallel(Blocks(1)) if in_ddp else Blocks(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with straggle.watch(model, folder):
        for step in range(2):
            model(batch(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("in_ddp", [False, True], ids=["a loop", "DDP"])
def test_watched_ranks_of_all_replicas_write_files_of_their_own(in_ddp: bool, tmp_path: Path) -> None:
    run_forked(_watched_in_own_group, 4, tmp_path, in_ddp)
    heads = {
        str(path.relative_to(tmp_path)): json.loads(path.read_text().splitlines()[0])
        for path in tmp_path.rglob("rank*.jsonl")
    }
    if in_ddp:  # it merges over one replica
        assert heads.keys() == {f"{group}watch/rank{rank}.jsonl" for group in ("", "group2/") for rank in range(2)}
        assert "they are ranks [2, 3] of the job" in heads["group2/watch/rank0.jsonl"]["unknown"][0]
    else:
        assert heads.keys() == {f"watch/rank{rank}.jsonl" for rank in range(4)}
        assert {head["world_size"] for head in heads.values()} == {4}
        assert all("counts as waiting for the merge" in head["unknown"][0] for head in heads.values())


@pytest.mark.slow
def test_two_ranks_of_different_replicas_are_killed_at_once() -> None:
    with run_job(6, train, replica_size=SHARDS) as job:
        job.walk(4)
        job.kill(1, 4)
        job.walk(4, ranks_of(1))
        start_again(job, 0, 2)  # the only one that has the state gives it to both
        job.walk(5)
        assert [own["first"] > 4 for own in end(job)] == [True, True, False, False, True, True]


@pytest.mark.slow
def test_rank_that_is_killed_while_its_replica_is_healed_takes_it_out_again() -> None:
    with run_job(6, train, replica_size=SHARDS) as job:
        job.walk(4)
        job.kill(5)
        job.walk(5, ranks_of(0, 1))
        start_again(job, 2)
        job.wait(lambda: "replica 2 joined" in job.log(), "replica 2 is let in")
        job.kill(4)
        job.walk(4, ranks_of(0, 1))
        start_again(job, 2)
        job.walk(5)
        end(job)


@pytest.mark.slow
def test_stopped_rank_takes_its_replica_out_and_no_process_of_it_stays() -> None:
    with run_forked_job(6, train, served=True, replica_size=SHARDS) as job:
        job.walk(4)
        job.stop(0)
        job.walk(4, ranks_of(1, 2))
        process = job.process(1)  # hangs in a collective of FSDP's with a rank that neither answers nor has ended
        process.join(30)
        assert process.exitcode == 1
        job.resume(0)
        job.wait(lambda: job.ended(0) is not None or not job.process(0).is_alive(), "rank 0 ends")
        raised = job.ended(0)  # nothing if it was ended: gloo may not see in a collective that rank 1 is gone meanwhile
        assert raised is not None or job.process(0).exitcode == 1
        words = (job.folder / "log0.0").read_text() if raised is None else raised.message
        assert "its replica, ranks [0, 1], is no member, and cannot come back as it is" in words
        assert "rank 0 of it: no sign of life" in words
        start_again(job, 0)
        job.walk(5)
        end(job)


@pytest.mark.slow
def test_replica_comes_back_to_a_store_that_was_started_again() -> None:
    with run_job(6, train, replica_size=SHARDS) as job:
        job.walk(4)
        job.kill_store()
        log = job.folder / "log5.0"
        job.wait(lambda: "rank 5: the job's store does not answer" in log.read_text(), "rank 5 misses the store")
        job.walk(4)
        job.start_store()
        words = "replicas [0, 1, 2]: the members, which the job's store has again"
        job.wait(lambda: words in job.log(), "the members fill it")
        assert "the job's store was restarted" in job.log()  # said by who looks before others have filled it
        job.wait(lambda: "rank 5: the job's store answers again" in log.read_text(), "rank 5 looks at the store again")
        assert "rank 2:" not in log.read_text()  # its replica's number
        job.kill(3)
        job.walk(4, ranks_of(0, 2))
        start_again(job, 1)
        job.walk(5)
        end(job)


@pytest.mark.slow
def test_job_ends_with_fewer_replicas_than_it_may_have() -> None:
    with run_job(4, train, None, None, replica_size=SHARDS) as job:
        job.walk(4)
        job.kill(3)
        for rank in ranks_of(0):
            raised = job.result(rank)
            assert isinstance(raised, Raised)
            assert raised.kind == "TooFewRanks"
            assert "1 of 2 replicas are left (replica 1 left: rank 3 of it: no sign of life" in raised.message


def _train_and_save(rank: int, board: Board) -> str:
    try:
        train(rank, board, None, None)
    except straggle.PeerFailed as error:
        (board.folder / f"saves{rank}").touch()
        time.sleep(LONG_S)
        return str(error)
    return ""


@pytest.mark.slow
def test_ranks_whose_replica_is_whole_have_time_for_their_own_work_when_the_job_ends() -> None:
    """They evaluate when the job ends, and catch its error to save a checkpoint."""
    with run_job(4, _train_and_save, replica_size=SHARDS) as job:
        job.walk(4)
        for rank in ranks_of(0):
            rest(job.board, rank).touch()
        job.wait(lambda: all((job.folder / f"rests{rank}").exists() for rank in ranks_of(0)), "ranks 0 and 1 rest")
        job.kill(3)
        job.wait(lambda: "replica 1 left" in job.log(), "the replica leaves")
        job.sleep(LONG_S)
        for rank in ranks_of(0):
            rest(job.board, rank).unlink()
        for rank in ranks_of(0):
            job.wait((job.folder / f"saves{rank}").exists, f"rank {rank} saves")
            assert "1 of 2 replicas are left" in str(job.result(rank))


def _train_and_plot(rank: int, board: Board) -> dict[str, object]:
    """All ranks but one have work to do after the loop, and have not closed their models."""
    return train(rank, board, after=None if rank == 3 else partial(time.sleep, MISSED_S))


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False], ids=["process ends", "process goes on"])
def test_rank_of_a_replica_may_work_for_long_after_the_loop_when_the_others_have_ended(ends: bool) -> None:
    environment = {"STRAGGLE_ELASTIC": "1"}  # an agent, which the test is, reports who has ended
    with run_forked_job(4, _train_and_plot, environment=environment, served=True, replica_size=SHARDS) as job:
        job.walk(4)
        job.board.end = job.furthest + 20
        job.result(3)
        if ends:
            agents.post_exited(job.connect(), 3, Exited(0, 1.0, code=0))
        results = [job.result(rank) for rank in range(4)]
    assert not any(isinstance(own, Raised) for own in results), results
    assert len({own["step"] for own in results}) == 1
    assert {kind for change in results[0]["changes"] for kind in change.left_kinds.values()} <= {"done"}


def _train_or_raise(rank: int, board: Board) -> dict[str, object]:
    net = sharded()
    model = straggle.StagedDataParallel(net, members=straggle.Elastic(min_ranks=1, suspect_s=1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = model.register_state(optimizer=optimizer)
    caught = ""
    while step < board.end:
        try:
            with model.step():
                time.sleep(board.step_s)
                loss = model(batch(step, rank)).square().mean()
                if rank == 2 and step == 5:
                    raise ArithmeticError("bad sample")
                loss.backward()
        except ArithmeticError as error:  # a loop that goes on all the same
            caught = str(error)
            step += 1
            continue
        optimizer.step()
        optimizer.zero_grad()
        assert model.last_report is not None
        step = model.last_report.step + 1
        board.note(rank, step)
    model.close()
    return {"caught": caught}


@pytest.mark.slow
def test_replica_leaves_with_the_error_of_one_of_its_ranks() -> None:
    with run_job(4, _train_or_raise, replica_size=SHARDS) as job:
        job.walk(6, ranks_of(0))
        for rank in ranks_of(1):
            job.wait(lambda r=rank: job.ended(r) is not None or not job.process(r).is_alive(), f"rank {rank} ends")
            raised = job.ended(rank)  # nothing if it was ended, because it waited for the other one for too long
            words = job.log() if raised is None else raised.message
            assert raised is not None or job.process(rank).exitcode == 1
            assert f"rank {rank}, step" in words
            assert "rank 2 raised in step 5, forward: ArithmeticError('bad sample')" in words
        job.finish(ranks_of(0))


def _train_with_doubles(rank: int, board: Board) -> int:
    net = sharded()
    model = straggle.StagedDataParallel(net, members=straggle.Elastic(min_ranks=1, suspect_s=1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    first = next(net.parameters())
    optimizer.state[first]["moment"] = first.detach().double()
    step = model.register_state(optimizer=optimizer)
    while step < board.end:
        with model.step():
            model(batch(step, rank)).square().mean().backward()
        step += 1
        board.note(rank, step)
    model.close()
    return step


@pytest.mark.slow
def test_replica_that_cannot_be_given_the_state_of_the_optimizer_hears_it_and_no_member_ends() -> None:
    with run_job(4, _train_with_doubles, replica_size=SHARDS) as job:
        job.walk(6)
        job.kill(3)
        job.walk(6, ranks_of(0))
        start_again(job, 1)
        for rank in ranks_of(1):
            raised = job.result(rank)
            assert isinstance(raised, Raised)
            assert raised.kind == "Refused", raised
            assert "cannot give it their state: registered.optimizer: a tensor of shape (" in raised.message
            assert "torch.float64 is sharded as no parameter is" in raised.message
        job.walk(6, ranks_of(0))
        assert job.finish(ranks_of(0)) == [job.board.end] * SHARDS


def _wrap_over(rank: int, _board: Board, ranks: list[list[int]]) -> None:
    own = next(own for own in ranks if rank in own)
    group = dist.new_group(own, use_local_synchronization=True)
    net = shard(Blocks(1), DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",)))
    straggle.StagedDataParallel(net, members=straggle.Elastic())


@pytest.mark.parametrize("ranks", [[[0, 2], [1, 3]], [[0, 1, 2], [3]]], ids=["not in a row", "not equally many"])
def test_replicas_of_other_ranks_are_refused(ranks: list[list[int]]) -> None:
    with run_forked_job(4, _wrap_over, ranks) as job:
        raised = job.result(0)
        assert isinstance(raised, Raised)
        assert f"is sharded over ranks {ranks[0]} of 4" in raised.message
        assert "write fully_shard(..., mesh=straggle.replica_mesh())" in raised.message


def _mesh_without(_rank: int) -> list[str]:
    """What `replica_mesh` says without its launcher, and where there is a process group."""
    said = []
    for size in ("0", "1"):
        os.environ["STRAGGLE_REPLICA_SIZE"] = size
        for begin in (straggle.replica_mesh, straggle.init_replica):
            with pytest.raises(RuntimeError, match=rf"^{begin.__name__}\(\) ") as raised:
                begin()
            said.append(str(raised.value))
    return said


def test_mesh_of_a_replica_says_what_it_needs() -> None:
    """The example under `straggle launch` does as they say."""
    (said,) = run_forked(_mesh_without, 1)
    for launcher in said[:2]:
        assert "start the script by `straggle launch --nproc-per-node N --replica-size S`" in launcher
    for group in said[2:]:
        assert "leave init_process_group() out" in group


def _other_shards(_rank: int) -> str:
    """A state that no rank of another replica could be given; one that is sharded as a parameter is comes back."""
    net = shard(Blocks(1), mesh_of(1, 1)["dp_shard"])
    parameters = [*net.parameters()]
    with pytest.raises(TypeError) as raised:
        given({"sum": parameters[0].detach().unsqueeze(0)}, parameters)
    state = {"step": 3, "moments": [own.detach() * 2 for own in parameters], "none": (None, "word")}
    plain = given(state, parameters)
    assert not any(isinstance(own, DTensor) for of_one in plain["moments"] for own in of_one.values())
    again = taken(plain, parameters)
    assert again["step"] == 3
    assert again["none"] == (None, "word")
    for own, other in zip(again["moments"], state["moments"], strict=True):  # type: ignore[call-overload]
        assert own._spec == other._spec
        assert torch.equal(own.to_local(), other.to_local())
    return str(raised.value)


def test_state_is_given_as_shards_and_what_is_sharded_as_no_parameter_is_refused() -> None:
    assert "shard it as a parameter, or keep it out of what you register" in run_forked(_other_shards, 1)[0]
