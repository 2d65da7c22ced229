"""`train` where ranks die, freeze and come back: from the first step on no rank waits here for another.

What rank 0 does in `train`, the lowest member does. If that is a replica of several ranks, the first of them does it,
and the others come where a shard of theirs is needed. A rank that comes to the running job takes its state from the
others, and not from a checkpoint.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch.distributed.device_mesh import DeviceMesh

from straggle.commands.configuration.schema import ConfigurationError
from straggle.commands.launching.workers_signs import first_step_is_made
from straggle.commands.result import finish, metrics_of, say_stopped, write_config, write_page
from straggle.commands.saved.agreement import ALL, OneReplica, OverStore, Ranks, on_all_ranks
from straggle.commands.saved.checkpoint import BehindPeers, Checkpoint, NotSaved
from straggle.commands.saved.replaying import decisions_of, write_decision, write_shares
from straggle.commands.saved.run_dir import one_run_of_members
from straggle.lab.jobs import StagedJob
from straggle.lab.process_group import process_group
from straggle.lab.sharding import Sharded
from straggle.members.agents import DO_NOT_RESTART
from straggle.members.replica_mesh import REPLICA_SIZE, replica_mesh
from straggle.members.views.membership import JobDone, TooFewRanks
from straggle.merge.wire.channel import PeerFailed
from straggle.merge.wire.groups import job_rank
from straggle.merge.wire.store import StoreUnreachable, connect_all, default_store, peek
from straggle.observe.console import LiveView
from straggle.observe.members import HandedOnTrace, MembersWriter
from straggle.observe.numbers.reader import Trace
from straggle.observe.recording import DecisionWriter, file_of
from straggle.observe.stuck import StuckWriter
from straggle.report import StepReport
from straggle.stop_signal import StopSignal, exit_at_once
from straggle.waits import until

_HASHES_S = 10.0  # for the other members to say what their parameters are
_STORE_LOST = (StoreUnreachable, dist.DistStoreError, dist.DistNetworkError)
_log = logging.getLogger(__name__)


def train_elastic(config: DictConfig, *, resumes: Callable[..., bool]) -> None:
    """The complete run, on one rank. Ends the process with `DO_NOT_RESTART` where the job cannot go on.

    That is where too few ranks are left, where the job's store is gone, and where its result could not be saved.

    ``resumes(checkpoint, begun=...)``: whether it goes on from a checkpoint; ``begun``: it had begun when a worker was
    started again. Raises `RefusedByAll` on all ranks if it cannot begin.
    """
    run_dir = Path(config.run_dir)
    with _started(config) as (device, replica), StopSignal() as stop, ExitStack() as held:
        told = connect_all(default_store(), "straggle/train")
        if (status := _status_if_over(told)) is not None:
            left = "there is nothing left to do for this rank" if status == 0 else "ranks were told to end"
            sys.stdout.write(f"the run is over: {left}\n")
            exit_at_once(status)
        job = StagedJob(config, instantiate(config.workload), device, stop, replica)
        limit_s = config.late_handling.give_up_s
        group = None if replica is None else _group_to_agree(replica, limit_s)
        checkpoint = Checkpoint(run_dir / "checkpoint", OneReplica(group))
        if job.model.comes_late:
            first_step = 0
            held.enter_context(one_run_of_members(run_dir, begins=False))
        else:
            ranks = ALL if group is None else OverStore(told, group, limit_s)
            begun = told.check(["begun"]) or "STRAGGLE_ELASTIC" not in os.environ  # else workers start again one by one
            all_begin = Checkpoint(checkpoint.directory, ranks)
            first_step = _begin(job, config, all_begin, held, partial(resumes, begun=begun))
            told.set("begun", "")
        try:
            with ExitStack() as observed:
                _train(job, config, checkpoint, first_step, observed)
            status = _loop_ended(job, config, checkpoint, told, stop)
        except (JobDone, NotSaved, PeerFailed, *_STORE_LOST) as error:
            if replica is None and isinstance(error, PeerFailed) and not isinstance(error, TooFewRanks):
                raise
            status = _status_after(error, job, checkpoint, told, stop)
        if status is not None:
            exit_at_once(status)
        job.close()


def _status_after(
    error: BaseException, job: StagedJob, checkpoint: Checkpoint, told: Any, stop: StopSignal
) -> int | None:
    """Say and save what is left after this error; the status with which this process ends at once, if it does.

    To free its groups would wait for ranks that are gone. ``None``: it ends as one whose loop is over.
    """
    match error:
        case JobDone():  # which is logged
            return None
        case NotSaved():
            job.close()
            if checkpoint.ranks.leads:  # which may be any rank
                sys.stderr.write(f"{error}\n")
            return DO_NOT_RESTART  # a rank that was started again would find that the run is over
        case TooFewRanks() if (status := _status_if_over(told)) is not None:  # the others have left
            if status:
                sys.stderr.write(f"{error}\n")
            return status
        case TooFewRanks():
            return _give_up(job, checkpoint, error, error.ranks)
        case PeerFailed() if stop.peers_go_on:  # another rank of the replica has left a step earlier
            _say_left(job)
            return 0
        case PeerFailed():
            sys.stderr.write(f"{error}\n")  # which says why its replica has left
            return 1
        case _:  # the store is lost
            return _give_up(job, checkpoint, error, job.model.member_ranks)


def _status_if_over(told: Any) -> int | None:
    """The status of a rank that has missed the end of the run: 0 if all steps are made; ``None``: it is not over."""
    if not told.check(["over"]):
        return None
    return DO_NOT_RESTART if told.check(["stopped"]) else 0


@contextmanager
def _started(config: DictConfig) -> Iterator[tuple[torch.device, DeviceMesh | None]]:
    """The process group of all ranks or, if members are replicas of several, that of this rank's, with its mesh."""
    if not config.get("parallel"):
        with process_group(elastic=True) as device:
            yield device, None
        return
    sharded: Sharded = instantiate(config.parallel)
    try:
        sharded.check_launched(int(os.environ.get(REPLICA_SIZE, "1")))
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    mesh = replica_mesh()
    try:
        yield torch.device("cpu"), mesh
    finally:
        dist.destroy_process_group()


def _group_to_agree(replica: DeviceMesh, limit_s: float) -> dist.ProcessGroup:
    """Of its ranks, for all that is not the model's own: a message of one is not taken for one of the other."""
    ranks = dist.get_process_group_ranks(replica.get_group())
    group: dist.ProcessGroup = dist.new_group(ranks, timedelta(seconds=limit_s), use_local_synchronization=True)
    dist.barrier(group)  # gloo connects now: later the store may be gone
    return group


def _begin(
    job: StagedJob, config: DictConfig, checkpoint: Checkpoint, held: ExitStack, resumes: Callable[[Checkpoint], bool]
) -> int:
    """What all ranks do together when the job begins; returns its first step."""
    is_first, run_dir, ranks = job_rank() == 0, Path(config.run_dir), checkpoint.ranks

    def hold(*, begins: bool) -> None:
        held.enter_context(one_run_of_members(run_dir, begins=begins))

    on_all_ranks(lambda: hold(begins=True) if is_first else None, ranks)
    on_all_ranks(lambda: None if is_first else hold(begins=False), ranks)
    resume = resumes(checkpoint)
    if not resume:
        on_all_ranks(lambda: checkpoint.set_aside() if is_first else None, ranks)
    first_step = checkpoint.load(job.model, job.optimizer, job.dealt) if resume else 0
    on_all_ranks(lambda: write_config(config) if is_first else None, ranks)
    return first_step


def _train(job: StagedJob, config: DictConfig, checkpoint: Checkpoint, first_step: int, observed: ExitStack) -> None:
    run_dir, rank = Path(config.run_dir), job.model.job_rank
    begins = rank == 0 and not job.model.comes_late
    trace: HandedOnTrace | None = None
    if checkpoint.ranks.leads:
        trace = HandedOnTrace(job.model.rank, run_dir / "trace.jsonl", first_step=first_step, begins=begins)
        observed.callback(trace.close)
        observed.enter_context(MembersWriter(job.model, run_dir, begins=begins))
    observed.enter_context(StuckWriter(job.model, run_dir, begins=begins))
    decisions: DecisionWriter | None = None
    if first_step == 0 and not job.model.comes_late:  # the other ranks' random states are in no checkpoint
        decisions = observed.enter_context(DecisionWriter(file_of(decisions_of(run_dir), rank)))
    observed.enter_context(metrics_of(job, config))
    shown, saves = _Shown(job, config, observed), False
    for report in _steps(job, config.steps):
        first_step_is_made()
        if decisions is not None:
            write_decision(job, decisions)
        if trace is not None and trace.add(report):
            shown.add(report)
        saves |= bool(config.checkpoint_every) and (report.step + 1) % config.checkpoint_every == 0
        if saves and report.step + 1 < config.steps:
            saves = _is_lowest(job, checkpoint.ranks) and not job.asked_to_stop and not _save(checkpoint, job)


class _Shown:
    """What the lowest member shows and writes of each step; nothing before this rank has become that."""

    def __init__(self, job: StagedJob, config: DictConfig, observed: ExitStack) -> None:
        self._job, self._config, self._observed = job, config, observed
        self._view: LiveView | None = None
        self._shares_from = -1

    def add(self, report: StepReport) -> None:
        """One more step."""
        if (rebalance := self._job.rebalance) is not None and rebalance.schedule[-1][0] != self._shares_from:
            write_shares(Path(self._config.run_dir), rebalance)
            self._shares_from = rebalance.schedule[-1][0]
        if self._view is None:
            self._view = self._begin(report)
        self._view.show(report)

    def _begin(self, report: StepReport) -> LiveView:
        model = self._job.model
        view = self._observed.enter_context(LiveView(self._config.steps, first_step=report.step))
        change = model.last_members_report  # by which it has come to that; that it came itself was said
        if change is not None and model.rank not in change.joined:
            view.changed(change)
        model.register_members_hook(view.changed)
        return view


def _steps(job: StagedJob, steps: int) -> Iterator[StepReport]:
    """The steps from the one that the job is in; a rank that was away goes on with the one that the others are in."""
    number = job.model.register_state(optimizer=job.optimizer, **job.dealt)
    while number < steps:
        job.step(number)
        yield job.report
        if job.asked_to_stop:
            return
        number = job.report.step + 1


def _is_lowest(job: StagedJob, ranks: Ranks) -> bool:
    """Whether this member saves what all have; the ranks of a replica may learn of a change in different steps."""
    return any(ranks.gather(job.model.is_lowest))


def _save(checkpoint: Checkpoint, job: StagedJob) -> bool:
    """Save, after the step that was just made; false if this member is behind its peers, and is to try again."""
    try:
        checkpoint.save(job.report.step + 1, job.model, job.optimizer, job.dealt)
    except BehindPeers:
        return False
    except NotSaved as error:  # there may be room for the next one
        if checkpoint.ranks.leads:
            _log.warning("%s; training goes on", error)
    return True


def _loop_ended(job: StagedJob, config: DictConfig, checkpoint: Checkpoint, told: Any, stop: StopSignal) -> int | None:
    """This rank makes no more steps: all are made, or it is told to end. Then the status to end with at once."""
    if job.model.last_report is None:  # the checkpoint that it goes on from has all steps
        told.set("over", "")
        if job.model.job_rank == 0:
            finish(job, Path(config.run_dir), (), {}, ())
        return None
    is_early = job.report.step + 1 < config.steps
    if stop.peers_go_on:
        _say_left(job)
    else:
        if is_early:
            told.set("stopped", "")  # before it is over: who missed the end reads both
        told.set("over", "")
        _end(job, config, checkpoint, told)
    return _end_early(job, stop) if is_early else None


def _end(job: StagedJob, config: DictConfig, checkpoint: Checkpoint, told: Any) -> None:
    """The last step is made: the lowest member saves, and says what came of it; the others leave."""
    report, ranks = job.report, checkpoint.ranks
    told.set(f"parameters/{job.model.job_rank}", job.parameters_sha256())
    if not _is_lowest(job, ranks):
        return
    done, not_saved = report.step + 1, None
    try:
        checkpoint.save(done, job.model, job.optimizer, job.dealt)
    except NotSaved as error:
        not_saved = error
    if done >= config.steps:
        _finish(job, config, ranks, told)
    elif ranks.leads and not_saved is None:
        say_stopped(config, done)
    if not_saved is not None:
        raise not_saved


def _finish(job: StagedJob, config: DictConfig, ranks: Ranks, told: Any) -> None:
    """Show the result of the complete run."""
    report, scores = job.report, job.evaluate()
    if not ranks.leads:
        return
    size, run_dir = job.ranks_per_replica, Path(config.run_dir)
    members = [own.rank * size + shard for own in report.ranks if not own.absent for shard in range(size)]
    finish(job, run_dir, list(Trace(run_dir / "trace.jsonl").reports()), scores, _hashes(told, members))
    if config.report:
        write_page(run_dir)


def _end_early(job: StagedJob, stop: StopSignal) -> int:
    """Leave the job; the status to end with at once, as who sent the signal may not wait for long."""
    job.close()
    if not stop.requested:
        sys.stderr.write("others were told to end, and too few ranks would be left\n")
    return 0 if stop.requested else DO_NOT_RESTART


def _say_left(job: StagedJob) -> None:
    step = job.report.step
    sys.stdout.write(
        f"rank {job.model.job_rank} was told to end: it has left after step {step}, and the others go on\n"
    )


def _hashes(told: Any, members: list[int]) -> list[str]:
    """What the members' parameters are, as far as they come to say it."""

    def said() -> dict[int, str]:
        return {rank: word for rank in members if (word := peek(told, f"parameters/{rank}")) is not None}

    until(lambda: len(said()) == len(members), every_s=0.05, limit_s=_HASHES_S)
    words = said()
    if missing := [rank for rank in members if rank not in words]:
        _log.warning("ranks %s have not said what their parameters are", missing)
    return list(words.values())


def _give_up(job: StagedJob, checkpoint: Checkpoint, error: BaseException, members: Sequence[int]) -> int:
    """The job cannot go on: the lowest of its members saves what there is. The status to end with at once."""
    sys.stderr.write(f"{error}\n")
    job.model.close()  # else a replica's process is ended after some seconds, and saving may take longer
    if job.model.rank == min(members, default=None) and job.model.last_report is not None:
        done = job.report.step + 1
        said = f"{checkpoint.directory} has step {done}; resume=true goes on from there"
        try:
            checkpoint.save(done, job.model, job.optimizer, job.dealt)
        except NotSaved as not_saved:
            said = str(not_saved)
        if checkpoint.ranks.leads:
            sys.stderr.write(f"{said}\n")
    return DO_NOT_RESTART
