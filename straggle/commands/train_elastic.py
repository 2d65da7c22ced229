"""`train` where ranks die, freeze and come back: from the first step on no rank waits here for another.

What rank 0 does in `train`, the lowest member does. A rank that comes to the running job takes its state from the
others, and not from a checkpoint.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from hydra.utils import instantiate
from omegaconf import DictConfig

from straggle.commands.agreement import on_all_ranks
from straggle.commands.checkpoint import Checkpoint, NotSaved
from straggle.commands.replaying import decisions_of, write_decision, write_shares
from straggle.commands.result import finish, metrics_of, write_config, write_page
from straggle.commands.run_dir import one_run_of_members
from straggle.lab.jobs import StagedJob, process_group
from straggle.members.agents import DO_NOT_RESTART
from straggle.members.membership import JobDone, TooFewRanks
from straggle.merge.store import StoreUnreachable, connect_all, default_store
from straggle.observe.console import LiveView
from straggle.observe.members import HandedOnTrace, MembersWriter, writer_of
from straggle.observe.recording import DecisionWriter, file_of
from straggle.observe.run import read_reports
from straggle.observe.stuck import StuckWriter
from straggle.report import StepReport
from straggle.stop_signal import StopSignal, exit_at_once

_HASHES_S = 10.0  # for the other members to say what their parameters are
_STORE_LOST = (StoreUnreachable, dist.DistStoreError, dist.DistNetworkError)
_log = logging.getLogger(__name__)


def train_elastic(config: DictConfig, *, resumes: Callable[[Checkpoint], bool]) -> None:
    """The complete run, on one rank. Ends the process with `DO_NOT_RESTART` where the job cannot go on.

    That is where too few ranks are left, and where the job's store is gone.

    Raises `RefusedByAll` on all ranks if it cannot begin, and `NotSaved` if its result could not be saved.
    """
    run_dir = Path(config.run_dir)
    with process_group(elastic=True) as device, StopSignal() as stop, ExitStack() as held:
        told = connect_all(default_store(), "straggle/train")
        if told.check(["over"]):
            sys.stdout.write("the run is over: there is nothing left to do for this rank\n")
            exit_at_once()
        job = StagedJob(config, instantiate(config.workload), device, stop)
        checkpoint = Checkpoint(run_dir / "checkpoint")
        if job.model.comes_late:
            first_step = 0
            held.enter_context(one_run_of_members(run_dir, begins=False))
        else:
            first_step = _begin(job, config, checkpoint, held, resumes)
        try:
            with ExitStack() as observed:
                _train(job, config, checkpoint, first_step, observed)
            if stop.peers_go_on:
                _say_left(job)
            else:
                told.set("over", "")
                _end(job, config, checkpoint, told)
            if job.report.step + 1 < config.steps:
                _end_early(job, stop)
        except JobDone as error:
            sys.stdout.write(f"{error}: there is nothing left to do for this rank\n")
        except TooFewRanks as error:
            if told.check(["over"]):  # the others are done, and have left
                exit_at_once()
            _give_up(job, checkpoint, error, error.ranks)
        except _STORE_LOST as error:
            _give_up(job, checkpoint, error, job.model.member_ranks)
        job.close()


def _begin(
    job: StagedJob, config: DictConfig, checkpoint: Checkpoint, held: ExitStack, resumes: Callable[[Checkpoint], bool]
) -> int:
    """What all ranks do together when the job begins; returns its first step."""
    is_first, run_dir = dist.get_rank() == 0, Path(config.run_dir)
    on_all_ranks(lambda: held.enter_context(one_run_of_members(run_dir, begins=True)) if is_first else None)
    on_all_ranks(lambda: None if is_first else held.enter_context(one_run_of_members(run_dir, begins=False)))
    resume = resumes(checkpoint)
    if not resume:
        on_all_ranks(lambda: checkpoint.set_aside() if is_first else None)
    first_step = checkpoint.load(job.model, job.optimizer, job.dealt) if resume else 0
    on_all_ranks(lambda: write_config(config) if is_first else None)
    return first_step


def _train(job: StagedJob, config: DictConfig, checkpoint: Checkpoint, first_step: int, observed: ExitStack) -> None:
    run_dir, rank = Path(config.run_dir), job.model.rank
    begins = rank == 0 and not job.model.comes_late
    trace = HandedOnTrace(rank, run_dir / "trace.jsonl", first_step=first_step, begins=begins)
    observed.callback(trace.close)
    observed.enter_context(MembersWriter(job.model, run_dir, begins=begins))
    observed.enter_context(StuckWriter(job.model, run_dir, begins=begins))
    decisions: DecisionWriter | None = None
    if first_step == 0 and not job.model.comes_late:  # the other ranks' random states are in no checkpoint
        decisions = observed.enter_context(DecisionWriter(file_of(decisions_of(run_dir), rank)))
    observed.enter_context(metrics_of(job, config))
    view: LiveView | None = None
    saves, shares_from = False, -1
    for report in _steps(job, config.steps):
        if decisions is not None:
            write_decision(job, decisions)
        if not trace.add(report):
            continue
        if job.rebalance is not None and job.rebalance.schedule[-1][0] != shares_from:
            write_shares(run_dir, job.rebalance)
            shares_from = job.rebalance.schedule[-1][0]
        if view is None:  # this rank is the lowest member now
            view = observed.enter_context(LiveView(config.steps, first_step=report.step))
            change = job.model.last_members_report  # by which it has come to that; that it came itself was said
            if change is not None and rank not in change.joined:
                view.changed(change)
            job.model.register_members_hook(view.changed)
        view.show(report)
        saves |= bool(config.checkpoint_every) and (report.step + 1) % config.checkpoint_every == 0
        if saves and report.step + 1 < config.steps and not job.asked_to_stop:
            saves = not _save(checkpoint, job)


def _steps(job: StagedJob, steps: int) -> Iterator[StepReport]:
    """The steps from the one that the job is in; a rank that was away goes on with the one that the others are in."""
    number = job.model.register_state(optimizer=job.optimizer, **job.dealt)
    while number < steps:
        job.step(number)
        yield job.report
        if job.asked_to_stop:
            return
        number = job.report.step + 1


def _save(checkpoint: Checkpoint, job: StagedJob) -> bool:
    """Save alone, after the step that was just made; false where this rank is behind its peers, and is to try again."""
    try:
        return checkpoint.save_alone(job.report.step + 1, job.model, job.optimizer, job.dealt)
    except NotSaved as error:  # there may be room for the next one
        _log.warning("%s; training goes on", error)
        return True


def _end(job: StagedJob, config: DictConfig, checkpoint: Checkpoint, told: Any) -> None:
    """The last step is made: the lowest member saves, and says what came of it; the others leave."""
    report, rank = job.report, job.model.rank
    told.set(f"parameters/{rank}", job.parameters_sha256())
    if writer_of(report) != rank:
        return
    checkpoint.save_alone(report.step + 1, job.model, job.optimizer, job.dealt)
    if (done := report.step + 1) < config.steps:
        sys.stdout.write(f"stopped after step {done} of {config.steps}; resume=true goes on from there\n")
        return
    members = [own.rank for own in report.ranks if not own.absent]
    run_dir = Path(config.run_dir)
    finish(job, run_dir, list(read_reports(run_dir / "trace.jsonl")), job.evaluate(), _hashes(told, members))
    if config.report:
        write_page(run_dir)


def _end_early(job: StagedJob, stop: StopSignal) -> NoReturn:
    """End the process at once: who sent the signal may not wait for long."""
    job.close()
    if not stop.requested:
        sys.stderr.write("others were told to end, and too few ranks would be left\n")
    exit_at_once(0 if stop.requested else DO_NOT_RESTART)


def _say_left(job: StagedJob) -> None:
    step = job.report.step
    sys.stdout.write(f"rank {job.model.rank} was told to end: it has left after step {step}, and the others go on\n")


def _hashes(told: Any, members: list[int]) -> list[str]:
    """What the members' parameters are, as far as they come to say it."""
    until = time.monotonic() + _HASHES_S
    while (missing := [rank for rank in members if not told.check([f"parameters/{rank}"])]) and (
        time.monotonic() < until
    ):
        time.sleep(0.05)
    if missing:
        _log.warning("ranks %s have not said what their parameters are", missing)
    return [told.get(f"parameters/{rank}").decode() for rank in members if rank not in missing]


def _give_up(job: StagedJob, checkpoint: Checkpoint, error: Exception, members: Sequence[int]) -> None:
    """The job cannot go on: the lowest of its members saves what there is."""
    sys.stderr.write(f"{error}\n")
    lowest = job.model.rank == min(members, default=None) and job.model.last_report is not None
    if lowest and _save(checkpoint, job):
        sys.stderr.write(f"{checkpoint.directory} has step {job.report.step + 1}; resume=true goes on from there\n")
    exit_at_once(DO_NOT_RESTART)
