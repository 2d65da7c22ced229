"""Replicas that leave as a whole and come back: real processes, each replica is two ranks that shard a copy (FSDP2)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from members import Board, Job, run_job
from ranks import Raised, run_ranks
from sharding import Blocks, batch, mesh_of, shard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import straggle
from straggle.source.given_state import given, taken
from straggle.stop_signal import StopSignal

SHARDS = 2


def _sharded(depth: int = 2) -> torch.nn.Module:
    """The model, sharded over the ranks of this rank's replica."""
    first = dist.get_rank() // SHARDS * SHARDS
    group = dist.new_group(list(range(first, first + SHARDS)), use_local_synchronization=True)
    torch.manual_seed(0)
    return shard(Blocks(depth), DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",)))


def _train(
    rank: int, board: Board, deadline: straggle.Deadline | None = None, min_ranks: int | None = 1
) -> dict[str, object]:
    """Train until the test ends it; what there is of the parameters, and what was reported."""
    net = _sharded()
    net.blocks[1].register_forward_pre_hook(lambda *_: _held_up(rank, board))  # type: ignore[union-attr,operator]
    model = straggle.StagedDataParallel(
        net,
        deadline=deadline,
        members=straggle.Elastic(min_ranks),
        merge=straggle.Merge(check_every=1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = step = model.register_state(optimizer=optimizer)
    changes: list[straggle.MembersReport] = []
    model.register_members_hook(changes.append)
    different = []
    with StopSignal() as stop:
        while step < board.end:
            with model.step() as open_step:
                stop.tell(open_step)
                time.sleep(0.01)
                model(batch(step, rank)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            report = model.last_report
            assert report is not None
            different += [step] if report.different_ranks else []
            step = report.step + 1
            board.note(rank, step)
            if stop.agreed(report):
                break
    content = hashlib.sha256()
    for value in (*net.parameters(), *(own for state in optimizer.state.values() for own in state.values())):
        content.update((value.to_local() if hasattr(value, "to_local") else value).detach().numpy().tobytes())
    model.close()
    told = {"requested": stop.requested, "peers_go_on": stop.peers_go_on}
    own = {"first": first, "hash": content.hexdigest(), "different": different, "changes": changes, "step": step}
    return {**own, **told}


def _held_up(rank: int, board: Board) -> None:
    """In the middle of the forward pass: hold this rank up for as long as the test wants that."""
    while _hold(board, rank).exists():
        time.sleep(0.02)


def _hold(board: Board, rank: int) -> Path:
    return board.folder / f"hold{rank}"


def _start_again(job: Job, *replicas: int) -> None:
    """Start all ranks of these replicas again, as the launcher does, when all have ended."""
    for rank in _ranks(*replicas):
        with contextlib.suppress(ProcessLookupError):
            job.kill(rank)
    for rank in _ranks(*replicas):
        job.start(rank)


def _ranks(*replicas: int) -> list[int]:
    return [replica * SHARDS + shard for replica in replicas for shard in range(SHARDS)]


def _end(job: Job) -> list[dict[str, object]]:
    """End the job; the ranks with the same shard have the same parameters and the same state of the optimizer."""
    job.meet()
    results = job.finish()
    for shard_number in range(SHARDS):
        assert len({own["hash"] for own in results[shard_number::SHARDS]}) == 1, job.log()
    assert not any(own["different"] for own in results)
    assert len({own["step"] for own in results}) == 1
    return results


@pytest.mark.slow
@pytest.mark.parametrize("deadline", [None, straggle.QuantileDeadline(0.9, slack=1.5)], ids=["waits", "deadline"])
def test_replica_of_a_killed_rank_leaves_and_comes_back_with_the_others_state(
    deadline: straggle.Deadline | None,
) -> None:
    with run_job(6, _train, deadline, served=True, replica_size=SHARDS) as job:
        job.walk(10)
        job.kill(3)
        job.walk(10, _ranks(0, 2))
        raised = job.result(2)
        assert isinstance(raised, Raised)
        assert raised.kind == "PeerFailed"
        assert "its replica, ranks [2, 3], is no member" in raised.message
        assert "rank 3 of it: no sign of life" in raised.message
        _start_again(job, 1)
        job.walk(20)
        results = _end(job)
    back = [own["first"] for own in results[2:4]]
    assert back[0] == back[1] > 10  # both go on from the same step
    first, second = results[0]["changes"]
    assert (list(first.left), list(second.joined), first.ranks) == ([1], [1], (0, 2))


@pytest.mark.slow
def test_two_ranks_of_different_replicas_are_killed_at_once() -> None:
    with run_job(6, _train, served=True, replica_size=SHARDS) as job:
        job.walk(10)
        job.kill(1, 4)
        job.walk(10, _ranks(1))
        _start_again(job, 0, 2)  # the only one that has the state gives it to both
        job.walk(20)
        assert [own["first"] > 10 for own in _end(job)] == [True, True, False, False, True, True]


@pytest.mark.slow
def test_rank_that_is_killed_while_its_replica_is_healed_takes_it_out_again() -> None:
    with run_job(6, _train, served=True, replica_size=SHARDS) as job:
        job.walk(10)
        job.kill(5)
        job.walk(5, _ranks(0, 1))
        _start_again(job, 2)
        job.wait(lambda: "replica 2 joined" in job.log(), "replica 2 is let in")
        job.kill(4)
        job.walk(10, _ranks(0, 1))
        _start_again(job, 2)
        job.walk(20)
        _end(job)


@pytest.mark.slow
def test_stopped_rank_takes_its_replica_out_and_no_process_of_it_stays() -> None:
    with run_job(6, _train, served=True, replica_size=SHARDS) as job:
        job.walk(10)
        job.stop(0)
        job.walk(10, _ranks(1, 2))
        process = job.process(1)  # hangs in a collective of FSDP's with a rank that neither answers nor has ended
        process.join(30)
        assert process.exitcode == 1
        job.resume(0)
        raised = job.result(0)
        assert isinstance(raised, Raised)
        assert "rank 0 of it: no sign of life" in raised.message
        _start_again(job, 0)
        job.walk(20)
        _end(job)


@pytest.mark.slow
def test_replica_comes_back_to_a_store_that_was_started_again() -> None:
    with run_job(6, _train, served=True, replica_size=SHARDS) as job:
        job.walk(10)
        job.kill_store()
        job.walk(10)
        job.start_store()
        words = "replicas [0, 1, 2]: the members, which the job's store has again"
        job.wait(lambda: words in job.log(), "the members fill it")
        log = (job.folder / "log5.0").read_text()
        assert "rank 5: the job's store does not answer" in log
        assert "rank 5: the job's store was restarted" in log
        assert "rank 2:" not in log  # its replica's number
        job.kill(3)
        job.walk(10, _ranks(0, 2))
        _start_again(job, 1)
        job.walk(20)
        _end(job)


@pytest.mark.slow
def test_job_ends_with_fewer_replicas_than_it_may_have() -> None:
    with run_job(4, _train, None, None, served=True, replica_size=SHARDS) as job:
        job.walk(10)
        job.kill(3)
        for rank in _ranks(0):
            raised = job.result(rank)
            assert isinstance(raised, Raised)
            assert raised.kind == "TooFewRanks"
            assert "1 of 2 replicas are left (replica 1 left: rank 3 of it: no sign of life" in raised.message


def _hold_up(job: Job, rank: int) -> None:
    """Hold this rank up until its replica has left; then let it go on."""
    words = "replica 1 left: it fell behind"
    num_before = job.log().count(words)
    _hold(job.board, rank).touch()
    job.wait(lambda: job.log().count(words) > num_before, "the replica leaves")
    job.walk(10, _ranks(0, 2))
    _hold(job.board, rank).unlink()


def _processes(job: Job) -> list[int]:
    return [job.process(rank).pid for rank in range(job.world_size)]


_DEADLINE = straggle.QuantileDeadline(0.9, slack=1.5)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, 3])
def test_replica_that_fell_behind_comes_back_in_the_same_processes(rank: int) -> None:
    with run_job(6, _train, _DEADLINE, served=True, replica_size=SHARDS) as job:
        job.walk(10)
        before = _processes(job)
        for _ in range(2):
            _hold_up(job, rank)
            job.walk(20)
        results = _end(job)
        assert _processes(job) == before
    assert [own["first"] for own in results] == [0] * 6
    assert sum(1 in own.joined for own in results[0]["changes"]) >= 2  # on a busy machine it may fall behind again


@pytest.mark.slow
def test_replica_that_is_held_up_in_its_first_step_comes_back_in_the_same_processes() -> None:
    """As one does that compiles."""
    with run_job(6, _train, _DEADLINE, served=True, replica_size=SHARDS) as job:
        job.walk(10)
        job.kill(3)
        job.walk(10, _ranks(0, 2))
        _hold(job.board, 2).touch()
        _start_again(job, 1)
        _hold_up(job, 2)
        before = _processes(job)
        job.walk(20)
        results = _end(job)
        assert _processes(job) == before
    assert results[2]["first"] == results[3]["first"] > 10


@pytest.mark.slow
def test_replica_of_a_rank_that_is_stopped_for_a_while_comes_back_in_the_same_processes() -> None:
    with run_job(6, _train, served=True, replica_size=SHARDS) as job:
        job.walk(10)
        before = _processes(job)
        job.stop(3)
        job.wait(lambda: "replica 1 left: rank 3 of it: no sign of life" in job.log(), "the replica leaves")
        job.walk(10, _ranks(0, 2))
        job.resume(3)
        job.walk(20)
        _end(job)
        assert _processes(job) == before


@pytest.mark.slow
def test_rank_that_is_killed_while_its_replica_is_healed_in_place_takes_it_out_again() -> None:
    with run_job(6, _train, _DEADLINE, served=True, replica_size=SHARDS) as job:
        job.walk(10)
        _hold_up(job, 2)
        job.wait(lambda: "replica 1 joined" in job.log(), "the replica is let in")
        job.kill(3)
        job.walk(10, _ranks(0, 2))
        raised = job.result(2)
        assert isinstance(raised, Raised)
        assert "its replica, ranks [2, 3], is no member, and cannot come back as it is (rank 3 of it" in raised.message
        _start_again(job, 1)
        job.walk(20)
        assert [own["first"] > 10 for own in _end(job)] == [False, False, True, True, False, False]


@pytest.mark.slow
def test_replica_leaves_after_a_step_if_one_of_its_ranks_is_told_to_end() -> None:
    with run_job(6, _train, served=True, replica_size=SHARDS) as job:
        job.walk(10)
        os.kill(job.process(3).pid, signal.SIGTERM)
        left = [job.result(rank) for rank in _ranks(1)]
        job.walk(10, _ranks(0, 2))
        stayed = job.finish(_ranks(0, 2))
    assert not any(isinstance(own, Raised) for own in left), left
    assert left[0]["step"] == left[1]["step"]
    assert all(own["requested"] and own["peers_go_on"] for own in left)
    assert stayed[0]["changes"][0].left_kinds == {1: "notice"}
    assert [own["hash"] for own in stayed[:2]] == [own["hash"] for own in stayed[2:]]


@pytest.mark.slow
def test_all_end_after_the_same_step_if_a_rank_is_told_whose_replica_cannot_be_spared() -> None:
    with run_job(4, _train, None, None, served=True, replica_size=SHARDS) as job:
        job.walk(10)
        os.kill(job.process(3).pid, signal.SIGTERM)
        results = [job.result(rank) for rank in range(4)]
    assert not any(isinstance(own, Raised) for own in results), results
    assert len({own["step"] for own in results}) == 1
    assert not any(own["peers_go_on"] for own in results)
    assert [own["hash"] for own in results[:2]] == [own["hash"] for own in results[2:]]


def _train_or_raise(rank: int, board: Board) -> dict[str, object]:
    net = _sharded()
    model = straggle.StagedDataParallel(net, members=straggle.Elastic(min_ranks=1, suspect_s=1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = model.register_state(optimizer=optimizer)
    caught = ""
    while step < board.end:
        try:
            with model.step():
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
    with run_job(4, _train_or_raise, served=True, replica_size=SHARDS) as job:
        job.walk(20, _ranks(0))
        for rank in _ranks(1):
            job.wait(lambda r=rank: job.ended(r) is not None or not job.process(r).is_alive(), f"rank {rank} ends")
            raised = job.ended(rank)  # nothing if it was ended, because it waited for the other one for too long
            words = job.log() if raised is None else raised.message
            assert raised is not None or job.process(rank).exitcode == 1
            assert f"rank {rank}, step" in words
            assert "rank 2 raised in step 5, forward: ArithmeticError('bad sample')" in words
        job.finish(_ranks(0))


def _wrap_over(rank: int, _board: Board, ranks: list[list[int]]) -> None:
    own = next(own for own in ranks if rank in own)
    group = dist.new_group(own, use_local_synchronization=True)
    net = shard(Blocks(1), DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",)))
    straggle.StagedDataParallel(net, members=straggle.Elastic())


@pytest.mark.parametrize("ranks", [[[0, 2], [1, 3]], [[0, 1, 2], [3]]], ids=["not in a row", "not equally many"])
def test_replicas_of_other_ranks_are_refused(ranks: list[list[int]]) -> None:
    with run_job(4, _wrap_over, ranks) as job:
        raised = job.result(0)
        assert isinstance(raised, Raised)
        assert f"is sharded over ranks {ranks[0]} of 4" in raised.message
        assert "write fully_shard(..., mesh=straggle.replica_mesh())" in raised.message


def _mesh_without(_rank: int) -> list[str]:
    """What `replica_mesh` says without its launcher, and where there is a process group."""
    said = []
    for size in ("0", "1"):
        os.environ["STRAGGLE_REPLICA_SIZE"] = size
        with pytest.raises(RuntimeError) as raised:
            straggle.replica_mesh()
        said.append(str(raised.value))
    return said


def test_mesh_of_a_replica_says_what_it_needs() -> None:
    """The example under `straggle launch` does as they say."""
    ((launcher, group),) = run_ranks(_mesh_without, 1)
    assert "start the script by `straggle launch --nproc-per-node N --replica-size S`" in launcher
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
    assert "shard it as a parameter, or keep it out of what you register" in run_ranks(_other_shards, 1)[0]
