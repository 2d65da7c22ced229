"""Train a workload with straggle, under faults, and report what not waiting was worth.

torchrun --nproc-per-node 4 -m straggle train                          # or ./launch.sh
torchrun --nproc-per-node 4 -m straggle train workload=digits faults=none steps=200
torchrun --nproc-per-node 4 -m straggle train resume=true steps=800
torchrun --nproc-per-node 4 -m straggle train replay=runs/latest run_dir=runs/again
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from straggle.extras import needs_extra
from straggle.merge.wire.groups import job_rank

with needs_extra("train"):
    from hydra.utils import instantiate
    from omegaconf import DictConfig

    from straggle.commands.result import finish, metrics_of, say_stopped, write_config, write_page
    from straggle.commands.saved.checkpoint import Checkpoint, NotSaved
    from straggle.commands.saved.replaying import (
        compare_with_recorded,
        decisions_of,
        recorded,
        replay,
        write_decision,
        write_shares,
    )
    from straggle.commands.train_elastic import train_elastic
    from straggle.observe.console import LiveView

import torch.distributed as dist

from straggle.commands.configuration.config import refuse, run_configured
from straggle.commands.launching.workers_signs import asked_at_terminal, end_file, first_step_is_made
from straggle.commands.saved.agreement import RefusedByAll, on_all_ranks
from straggle.commands.saved.run_dir import one_run
from straggle.lab.jobs import StagedJob
from straggle.lab.process_group import gather, process_group
from straggle.observe.recording import DecisionWriter, file_of
from straggle.observe.stuck import StuckWriter
from straggle.observe.trace import TraceWriter
from straggle.report import StepReport
from straggle.stop_signal import StopSignal, exit_at_once

_log = logging.getLogger(__name__)


def train(config: DictConfig) -> None:
    """The complete run, on one rank; ends the process if it is asked to stop before the last step.

    Raises `RefusedByAll` on all ranks if it cannot begin, and `NotSaved` if its result could not be saved.
    """
    if config.replay is not None:
        config = recorded(config)
    if config.get("members") and config.replay is None:
        train_elastic(config, resumes=partial(_resumes, config))
        return
    run_dir = Path(config.run_dir)
    checkpoint = Checkpoint(run_dir / "checkpoint")
    with process_group() as device, StopSignal(file=end_file()) as stop, ExitStack() as held:
        is_first = job_rank() == 0
        # the folder is this run's before anything in it is read or set aside
        on_all_ranks(lambda: held.enter_context(one_run(run_dir)) if is_first else None)
        resume = _resumes(config, checkpoint)
        if not resume:
            on_all_ranks(lambda: checkpoint.set_aside() if is_first else None)
        job = StagedJob(config, instantiate(config.workload), device, stop)
        if config.replay is not None:
            replay(job, config)
        first_step = checkpoint.load(job.model, job.optimizer, job.dealt) if resume else 0
        on_all_ranks(lambda: write_config(config) if is_first else None)
        with metrics_of(job, config):
            reports = _train(job, config, first_step)
            dist.barrier()
        done = job.model.history.num_steps
        not_saved = _save(checkpoint, done, job)
        if done < config.steps and not_saved is None:
            if is_first:
                say_stopped(config, done)
                if asked_at_terminal() and config.report:
                    write_page(run_dir)
            exit_at_once()
        if done == config.steps:
            _end(job, config, reports)
        job.close()
    if not_saved is not None:
        raise not_saved
    if is_first and config.report:
        write_page(run_dir)


def _resumes(config: DictConfig, checkpoint: Checkpoint, *, begun: bool = True) -> bool:
    """Whether the run goes on from a checkpoint; as with auto when torchrun has started the workers again.

    ``begun``: whether the run had begun then; if not, a checkpoint that is there is another run's.
    """
    gather = checkpoint.ranks.gather
    again = begun and int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0
    restarted = any(gather(again))  # nodes count differently
    if config.resume is True:
        return True
    wanted = config.resume == "auto" or (restarted and config.replay is None)
    return any(gather(checkpoint.exists())) and wanted


def _save(checkpoint: Checkpoint, step: int, job: StagedJob) -> NotSaved | None:
    """Save; returns the problem, if there was one."""
    try:
        checkpoint.save(step, job.model, job.optimizer, job.dealt)
    except NotSaved as error:
        return error
    return None


def _end(job: StagedJob, config: DictConfig, reports: list[StepReport]) -> None:
    """All steps are done: report the result."""
    hashes = gather(job.parameters_sha256())
    scores = job.evaluate() if job_rank() == 0 or job.mesh is not None else {}
    if job_rank() == 0:
        finish(job, Path(config.run_dir), reports, scores, hashes)
        if config.replay is not None:
            compare_with_recorded(Path(config.replay), config.steps, hashes)


def _train(job: StagedJob, config: DictConfig, first_step: int) -> list[StepReport]:
    """Train, and record this rank's decisions; rank 0 also shows and records the steps, and returns their reports."""
    run_dir, rank, reports = Path(config.run_dir), job_rank(), list[StepReport]()
    with ExitStack() as opened:
        decisions = DecisionWriter(file_of(decisions_of(run_dir), rank), first_step=first_step)
        opened.enter_context(decisions)
        opened.enter_context(StuckWriter(job.model, run_dir, begins=rank == 0 and not first_step))
        if rank == 0:
            trace = opened.enter_context(TraceWriter(run_dir / "trace.jsonl", first_step=first_step))
            view = opened.enter_context(LiveView(config.steps, first_step=first_step))
        for number in range(first_step, config.steps):
            if rank == 0 and job.rebalance is not None and number in (first_step, job.rebalance.schedule[-1][0]):
                write_shares(run_dir, job.rebalance)
            job.step(number)
            if number == first_step:
                first_step_is_made()
            write_decision(job, decisions)
            if rank == 0:
                reports.append(job.report)
                trace.write(job.report)
                view.show(job.report)
            _checkpoint(job, config, number)
            if job.asked_to_stop:
                break
    return reports


def _checkpoint(job: StagedJob, config: DictConfig, number: int) -> None:
    """Save after step ``number``, if it is time to; the run's files have this step before the checkpoint has it."""
    if config.checkpoint_every and (number + 1) % config.checkpoint_every == 0 and number + 1 < config.steps:
        dist.barrier()  # all ranks come here, so none is late
        not_saved = _save(Checkpoint(Path(config.run_dir) / "checkpoint"), number + 1, job)
        if not_saved is not None and job_rank() == 0:  # there may be room for the next one
            _log.warning("%s; training goes on", not_saved)


def _run(config: DictConfig) -> None:
    try:
        train(config)
    except (RefusedByAll, NotSaved) as error:  # the same on all ranks
        refuse(error, status=1 if isinstance(error, NotSaved) else 2)


def main() -> None:
    """The command."""
    run_configured("train", _run, __doc__ or "")
