"""Train a workload with straggle, under faults, and report what not waiting was worth.

torchrun --nproc-per-node 4 -m straggle train                          # or ./launch.sh
torchrun --nproc-per-node 4 -m straggle train workload=digits faults=none steps=200
torchrun --nproc-per-node 4 -m straggle train resume=true steps=800
torchrun --nproc-per-node 4 -m straggle train replay=runs/latest run_dir=runs/again
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

from straggle.extras import needs_extra, remedy

with needs_extra("train"):
    from hydra.utils import instantiate
    from omegaconf import DictConfig, OmegaConf

    from straggle.commands.checkpoint import Checkpoint, NotSaved
    from straggle.observe.console import LiveView, print_table
    from straggle.observe.summary import summarize

import torch.distributed as dist

from straggle.commands import durable
from straggle.commands.agreement import Refused, on_all_ranks
from straggle.commands.config import ConfigurationError, check_targets, refuse, run_configured
from straggle.commands.run_dir import one_run
from straggle.lab.jobs import StagedJob, gather, process_group
from straggle.observe.recording import DecisionWriter, read_recording
from straggle.observe.trace import TraceWriter
from straggle.rebalance import Rebalance
from straggle.report import StepReport
from straggle.stop_signal import StopSignal, exit_at_once

_log = logging.getLogger(__name__)


def train(config: DictConfig) -> None:
    """The complete run, on one rank; ends the process if it is asked to stop before the last step.

    Raises `Refused` on all ranks if it cannot begin, and `NotSaved` if its result could not be saved.
    """
    if config.replay is not None:
        config = recorded(config)
    run_dir = Path(config.run_dir)
    checkpoint = Checkpoint(run_dir / "checkpoint")
    with process_group() as device, StopSignal() as stop, ExitStack() as held:
        is_first = dist.get_rank() == 0
        on_all_ranks(lambda: held.enter_context(one_run(run_dir)) if is_first else None)
        resume = _resumes(config, checkpoint)
        if not resume:
            on_all_ranks(lambda: checkpoint.set_aside() if is_first else None)
        job = StagedJob(config, instantiate(config.workload), device, stop)
        if config.replay is not None:
            on_all_ranks(lambda: _replay(job, config))
        first_step = checkpoint.load(job.model, job.optimizer, job.rebalance) if resume else 0
        on_all_ranks(lambda: _write_config(config) if is_first else None)
        train_rank = _rank_zero if is_first else _other_rank
        with _metrics(job, config):
            reports = train_rank(job, config, first_step)
            dist.barrier()
        done = job.model.history.num_steps
        not_saved = _save(checkpoint, done, job)
        if done < config.steps and not_saved is None:
            if is_first:
                sys.stdout.write(f"stopped after step {done} of {config.steps}; resume=true goes on from there\n")
            exit_at_once()
        if done == config.steps:
            _end(job, config, reports)
        job.close()
    if not_saved is not None:
        raise not_saved
    if is_first and config.report:
        write_page(run_dir)


def _resumes(config: DictConfig, checkpoint: Checkpoint) -> bool:
    """Whether the run goes on from a checkpoint; as with auto when torchrun has started the workers again."""
    restarted = any(gather(int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0))  # nodes count differently
    if config.resume is True:
        return True
    wanted = config.resume == "auto" or (restarted and config.replay is None)
    return any(gather(checkpoint.exists())) and wanted


def _write_config(config: DictConfig) -> None:
    """Write the configuration as it was given: a name that stands for a secret in the environment stays that name."""
    durable.write_text(Path(config.run_dir) / "config.yaml", OmegaConf.to_yaml(config))


def _replay(job: StagedJob, config: DictConfig) -> None:
    """Make the job decide as recorded. Raises ``ValueError`` if the recording lacks steps or ranks."""
    source, world_size = Path(config.replay), dist.get_world_size()
    if (ranks := len(list(decisions_of(source, 0).parent.glob("rank*.jsonl")))) != world_size:
        raise ValueError(f"replay={source}: recorded on {ranks} ranks, and this run has {world_size}: start as many")
    recording = read_recording(decisions_of(source, dist.get_rank()))
    if (num_steps := len(recording.decisions)) < config.steps:
        raise ValueError(
            f"replay={source}: the recording has {num_steps} of {config.steps} steps, as of a run that was ended or "
            f"could not write; repeat what it has with steps={num_steps}"
        )
    job.model.replay(recording)
    if job.rebalance is not None:
        job.rebalance.replay(json.loads(shares_of(source).read_text()))


def _save(checkpoint: Checkpoint, step: int, job: StagedJob) -> NotSaved | None:
    """Save; returns the problem, if there was one."""
    try:
        checkpoint.save(step, job.model, job.optimizer, job.rebalance)
    except NotSaved as error:
        return error
    return None


def write_page(run_dir: Path) -> None:
    """Write the run as a page; what goes wrong with it does not change the run's result."""
    try:
        from straggle.observe.page.page import write_report

        sys.stdout.write(f"report: {write_report(run_dir)}\n")
    except ImportError as error:
        _log.warning("no report: %s", remedy(error, "report"))
    except Exception as error:
        _log.warning("no report: %r; try again with: python -m straggle report %s", error, run_dir)


def _end(job: StagedJob, config: DictConfig, reports: list[StepReport]) -> None:
    """All steps are done: report the result."""
    hashes = gather(job.parameters_sha256())
    if dist.get_rank() == 0:
        _finish(job, Path(config.run_dir), reports, hashes)
        if config.replay is not None:
            _compare_with_recorded(Path(config.replay), config.steps, hashes)


def _metrics(job: StagedJob, config: DictConfig) -> AbstractContextManager[object]:
    """The exporter of this rank's metrics, if there is one."""
    if not config.get("metrics"):
        return nullcontext()
    exporter: AbstractContextManager[object] = instantiate(
        config.metrics, job.model, samples_per_step=job.samples_per_step, _convert_="all"
    )
    return exporter


def recorded(config: DictConfig) -> DictConfig:
    """The configuration of the run that ``config.replay`` names, without its faults, up to ``config.steps``.

    Raises `ConfigurationError` where there is no recorded run, or one of classes that this run does not name.
    """
    source = Path(config.replay)
    if source.resolve() == Path(config.run_dir).resolve():
        raise ConfigurationError(
            f"replay={source} is run_dir itself, which this run would overwrite: give another run_dir"
        )
    if not (source / "config.yaml").exists():
        raise ConfigurationError(f"replay={source}: no recorded run; it is the run_dir of an earlier run")
    own = OmegaConf.load(source / "config.yaml")
    assert isinstance(own, DictConfig)
    own.update(replay=config.replay, run_dir=config.run_dir, faults={}, resume=False, report=config.report)
    own.metrics = config.get("metrics")  # where they go is for who starts this run to say
    own.steps = min(own.steps, config.steps) if config.steps else own.steps
    check_targets(own, config, f"replay={source}")
    return own


def decisions_of(run_dir: Path, rank: int) -> Path:
    """The file in which a rank's decisions are recorded."""
    return run_dir / "decisions" / f"rank{rank}.jsonl"


def shares_of(run_dir: Path) -> Path:
    """The file that says which shares the ranks had from which step on."""
    return run_dir / "decisions" / "shares.json"


def _compare_with_recorded(source: Path, steps: int, hashes: list[str]) -> None:
    before = json.loads((source / "summary.json").read_text()) if (source / "summary.json").exists() else {}
    if before.get("steps") != steps:
        return
    same = before["parameters_sha256"] == hashes
    sys.stdout.write(f"parameters as in {source}: {'identical' if same else 'DIFFERENT'}\n")


def _rank_zero(job: StagedJob, config: DictConfig, first_step: int) -> list[StepReport]:
    """Train, show and record."""
    run_dir, reports = Path(config.run_dir), list[StepReport]()
    trace = TraceWriter(run_dir / "trace.jsonl", first_step=first_step)
    decisions = DecisionWriter(decisions_of(run_dir, 0), first_step=first_step)
    with trace, decisions, LiveView(config.steps, first_step=first_step) as view:
        for number in range(first_step, config.steps):
            if job.rebalance is not None and number in (first_step, job.rebalance.schedule[-1][0]):
                _write_shares(run_dir, job.rebalance)
            _step(job, number, decisions)
            reports.append(job.report)
            trace.write(job.report)
            view.show(job.report)
            _checkpoint(job, config, number)
            if job.asked_to_stop:
                break
    return reports


def _other_rank(job: StagedJob, config: DictConfig, first_step: int) -> list[StepReport]:
    with DecisionWriter(decisions_of(Path(config.run_dir), dist.get_rank()), first_step=first_step) as decisions:
        for number in range(first_step, config.steps):
            _step(job, number, decisions)
            _checkpoint(job, config, number)
            if job.asked_to_stop:
                break
    return []


def _step(job: StagedJob, number: int, decisions: DecisionWriter) -> None:
    job.step(number)
    assert job.model.last_decision is not None
    decisions.write(job.model.last_decision, job.model.learned)


def _checkpoint(job: StagedJob, config: DictConfig, number: int) -> None:
    """Save after step ``number``, if it is time to; the run's files have this step before the checkpoint has it."""
    if config.checkpoint_every and (number + 1) % config.checkpoint_every == 0 and number + 1 < config.steps:
        dist.barrier()  # all ranks come here, so none is late
        not_saved = _save(Checkpoint(Path(config.run_dir) / "checkpoint"), number + 1, job)
        if not_saved is not None and dist.get_rank() == 0:  # there may be room for the next one
            _log.warning("%s; training goes on", not_saved)


def _write_shares(run_dir: Path, rebalance: Rebalance) -> None:
    """Write the schedule so far; if it cannot be written, there is none, and no replay is possible."""
    try:
        durable.write_text(shares_of(run_dir), json.dumps(rebalance.schedule))
    except OSError as error:
        _log.warning("%s cannot be written (%s): training goes on, and cannot be replayed", shares_of(run_dir), error)
        with suppress(OSError):
            shares_of(run_dir).unlink(missing_ok=True)


def _finish(job: StagedJob, run_dir: Path, reports: list[StepReport], hashes: list[str]) -> None:
    """Evaluate, write ``summary.json`` and print the table."""
    if not reports:
        sys.stdout.write("nothing left to train: the checkpoint has all steps already\n")
        return
    summary = summarize(reports, job.evaluate(), hashes, job.samples_per_step)
    try:
        durable.write_text(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
    except OSError as error:
        _log.warning("%s cannot be written: %s", run_dir / "summary.json", error)
    _print(summary, run_dir)


def _print(summary: dict[str, Any], run_dir: Path) -> None:
    median_ms, waited_ms = (1e3 * summary[key] for key in ("step_seconds_median", "wait_for_all_seconds_median"))
    mean_ms, waited_mean_ms = (1e3 * summary[key] for key in ("step_seconds_mean", "wait_for_all_seconds_mean"))
    same = len(set(summary["parameters_sha256"])) == 1
    rows = [
        ("step time, median", f"{median_ms:.0f} ms", f"waiting for all ranks: {waited_ms:.0f} ms"),
        ("step time, mean", f"{mean_ms:.0f} ms", f"waiting for all ranks: {waited_mean_ms:.0f} ms"),
        ("gradients dropped", f"{summary['dropped_share']:.1%}", _shares("rank", summary["dropped_share_per_rank"])),
        ("times that a rank was late", _late(summary), _counts(summary)),
        ("fairness over ranks", f"{summary['fairness']:.2f}", _least(summary, "")),
        ("in the stage at the input", f"{summary['fairness_input_stage']:.2f}", _least(summary, "_input_stage")),
        (
            "depth bias",
            f"{summary['depth_bias']:.1%}",
            "came in for the first stage of backward beyond the last",
        ),
        ("training loss", f"{summary['loss']:.3f}", "mean of the last 20 steps"),
        ("validation loss", f"{summary['validation_loss']:.3f}", _accuracy(summary)),
        ("parameters on all ranks", "identical" if same else "DIFFERENT", summary["parameters_sha256"][0][:12]),
    ]
    if summary["shadow_dropped_share"] is not None:
        rows.insert(3, ("with the deadline enforced", *_would(summary)))
    print_table(f"{summary['steps']} steps", ("", "", ""), rows)
    stages = [(name, f"{share:.1%}") for name, share in summary["dropped_share_per_stage"].items()]
    print_table("dropped per stage, in the order of backward", ("stage", "dropped"), stages, {"files": run_dir})


def _would(summary: dict[str, Any]) -> tuple[str, str]:
    """What a policy that stopped no rank would have done."""
    dropped, seconds = summary["shadow_dropped_share"], summary["shadow_step_seconds_mean"]
    saved = 1 - seconds / summary["step_seconds_mean"]
    return f"would have dropped {dropped:.1%}", f"and saved {saved:.1%} of the mean step: {1e3 * seconds:.0f} ms"


def _shares(name: str, shares: list[float]) -> str:
    return ", ".join(f"{name} {index}: {share:.1%}" for index, share in enumerate(shares) if share > 0) or "nothing"


def _late(summary: dict[str, Any]) -> str:
    late = summary["late_steps_per_rank"]
    return f"{sum(late)} of {summary['steps'] * len(late)}"


def _counts(summary: dict[str, Any]) -> str:
    counts = zip(summary["late_steps_per_rank"], summary["stood_in_steps_per_rank"], strict=True)
    late = [f"rank {rank}: {late} ({stood_in} stood in for)" for rank, (late, stood_in) in enumerate(counts) if late]
    return ", ".join(late) or "no rank"


def _least(summary: dict[str, Any], where: str) -> str:
    return f"least from one rank: {summary[f'least_contribution{where}']:.0%} of the mean"


def _accuracy(summary: dict[str, Any]) -> str:
    return f"accuracy {summary['validation_accuracy']:.1%}" if "validation_accuracy" in summary else ""


def _run(config: DictConfig) -> None:
    try:
        train(config)
    except (Refused, NotSaved) as error:  # the same on all ranks
        refuse(error, status=1 if isinstance(error, NotSaved) else 2)


def main() -> None:
    """The command."""
    run_configured("train", _run, __doc__ or "")
