"""A job of replicas that leave and come back: two ranks each, which shard a copy (FSDP2)."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from members import Board, Job
from sharding import Blocks, batch, shard
from torch.distributed.device_mesh import DeviceMesh

import straggle
from straggle.lab.world.store import PrefixStore
from straggle.merge.wire.groups import begin_as_part
from straggle.merge.wire.store import default_store
from straggle.stop_signal import StopSignal

SHARDS = 2
LATE_S = 1.5


def sharded(depth: int = 2) -> torch.nn.Module:
    """The model, sharded over the ranks of this rank's replica."""
    first = dist.get_rank() // SHARDS * SHARDS
    group = dist.new_group(list(range(first, first + SHARDS)), use_local_synchronization=True)
    torch.manual_seed(0)
    return shard(Blocks(depth), DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",)))


def train(
    rank: int,
    board: Board,
    deadline: straggle.Deadline | None = None,
    min_ranks: int | None = 1,
    after: Callable[[], object] | None = None,
) -> dict[str, object]:
    """Train until the test ends it; what there is of the parameters, and what was reported.

    ``after()``: what this rank does before it closes its model.
    """
    net = sharded()
    net.blocks[1].register_forward_pre_hook(lambda *_: _stay(rank, board))  # type: ignore[union-attr,operator]
    model = straggle.StagedDataParallel(
        net,
        deadline=deadline,
        members=straggle.Elastic(min_ranks),
        merge=straggle.Merge(check_every=1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    first = step = model.register_state(optimizer=optimizer)
    changes: list[straggle.MembersReport] = []
    model.register_members_hook(changes.append)
    different = []
    with StopSignal() as stop:
        while step < board.end:
            with model.step() as open_step:
                stop.tell(open_step)
                time.sleep(board.step_s)
                model(batch(step, rank)).square().mean().backward()
                if late(board, rank).exists():
                    time.sleep(LATE_S)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            report = model.last_report
            assert report is not None
            different += [step] if report.different_ranks else []
            step = report.step + 1
            board.note(rank, step)
            _rest(rank, board)
            if stop.agreed(report):
                break
    content = hashlib.sha256()
    for value in (*net.parameters(), *(own for state in optimizer.state.values() for own in state.values())):
        content.update((value.to_local() if hasattr(value, "to_local") else value).detach().numpy().tobytes())
    if after is not None:
        after()
    model.close()
    told = {"requested": stop.requested, "peers_go_on": stop.peers_go_on}
    own = {"first": first, "hash": content.hexdigest(), "different": different, "changes": changes, "step": step}
    return {**own, **told}


def train_in_own_group(rank: int, board: Board) -> dict[str, object]:
    """The same if the default group has the ranks of this rank's replica alone."""
    own_group(rank)
    return train(rank, board)


def own_group(rank: int) -> None:
    """Make such a group the default, as `init_replica` does."""
    store, num_ranks = default_store(), dist.get_world_size()
    dist.destroy_process_group()
    corner = PrefixStore(f"replica{rank // SHARDS}", store)
    dist.init_process_group("gloo", store=corner, rank=rank % SHARDS, world_size=SHARDS)
    begin_as_part(rank // SHARDS * SHARDS, num_ranks)
    assert dist.get_world_size() == SHARDS


def _stay(rank: int, board: Board) -> None:
    """In the middle of the forward pass: hold this rank up for as long as the test wants that."""
    while hold(board, rank).exists():
        (board.folder / f"held{rank}").touch()
        time.sleep(0.02)


def _rest(rank: int, board: Board) -> None:
    """Between two steps: the same."""
    while rest(board, rank).exists():
        (board.folder / f"rests{rank}").touch()
        time.sleep(0.02)


def rest(board: Board, rank: int) -> Path:
    """While this file exists, the rank rests between two steps, as in an evaluation."""
    return board.folder / f"rest{rank}"


def hold(board: Board, rank: int) -> Path:
    """While this file exists, the rank stays in its forward pass."""
    return board.folder / f"hold{rank}"


def late(board: Board, rank: int) -> Path:
    """While this file exists, the rank leaves each step so late that its shards are merged long after the others."""
    return board.folder / f"late{rank}"


def start_again(job: Job, *replicas: int) -> None:
    """Start all ranks of these replicas again, as the launcher does, when all have ended."""
    for rank in ranks_of(*replicas):
        with contextlib.suppress(ProcessLookupError):
            job.kill(rank)
    for rank in ranks_of(*replicas):
        job.start(rank)


def ranks_of(*replicas: int) -> list[int]:
    return [replica * SHARDS + shard for replica in replicas for shard in range(SHARDS)]


def end(job: Job) -> list[dict[str, object]]:
    """End the job; the ranks with the same shard have the same parameters and the same state of the optimizer."""
    job.meet()
    results = job.finish(last_steps=5)
    for shard_number in range(SHARDS):
        assert len({own["hash"] for own in results[shard_number::SHARDS]}) == 1, job.log()
    assert not any(own["different"] for own in results)
    assert len({own["step"] for own in results}) == 1
    return results


def hold_up(job: Job, rank: int) -> None:
    """Hold this rank up until its replica has left; then let it go on."""
    words = "replica 1 left: it fell behind"
    num_before = job.log().count(words)
    hold(job.board, rank).touch()
    job.wait(lambda: job.log().count(words) > num_before, "the replica leaves")
    job.walk(4, ranks_of(0, 2))
    hold(job.board, rank).unlink()


def kill_in_forward(job: Job, rank: int) -> None:
    """SIGKILL in the middle of its forward pass: the other rank of its replica waits for it in a unit."""
    hold(job.board, rank).touch()
    job.wait((job.board.folder / f"held{rank}").exists, f"rank {rank} is in its forward pass")
    job.kill(rank)
    hold(job.board, rank).unlink()


def processes(job: Job) -> list[int]:
    return [job.process(rank).pid for rank in range(job.world_size)]
