"""A recorded run of `train`, and running it again: its configuration, its decisions, and whether all is equal."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from straggle.commands.configuration.checks import check_targets
from straggle.commands.configuration.schema import ConfigurationError
from straggle.commands.saved import durable
from straggle.commands.saved.agreement import on_all_ranks
from straggle.data.rebalance import Rebalance
from straggle.lab.jobs import StagedJob
from straggle.merge.wire.groups import job_rank, job_size
from straggle.observe.recording import DecisionWriter, file_of, read_recording
from straggle.replay.wing import Recording, check_members

_log = logging.getLogger(__name__)


def recorded(config: DictConfig) -> DictConfig:
    """The configuration of the run that ``config.replay`` names, without its faults, up to ``config.steps``.

    Raises `ConfigurationError` if there is no recorded run, or one of classes that this run does not name.
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
    if own.get("parallel"):
        raise ConfigurationError(
            f"replay={source}: its model was sharded, which no replay is: give a run of parallel=none"
        )
    steps = min(own.steps, config.steps) if config.steps else own.steps
    own.update(metrics=config.get("metrics"), steps=steps)  # where metrics go is for who starts this run to say
    check_targets(own, config, f"replay={source}")
    return own


def decisions_of(run_dir: Path) -> Path:
    """The folder in which the ranks' decisions are recorded."""
    return run_dir / "decisions"


def shares_of(run_dir: Path) -> Path:
    """The file of which shares the ranks had from which step on."""
    return decisions_of(run_dir) / "shares.json"


def replay(job: StagedJob, config: DictConfig) -> None:
    """Make the job decide as recorded, on all ranks. Raises `RefusedByAll` if the recording lacks steps or ranks."""
    found: list[Recording] = []
    on_all_ranks(lambda: found.append(_read(config)))
    on_all_ranks(lambda: job.model.replay(found[0]))
    if (rebalance := job.rebalance) is not None:
        on_all_ranks(lambda: rebalance.replay(json.loads(shares_of(Path(config.replay)).read_text())))


def _read(config: DictConfig) -> Recording:
    source, world_size, rank = Path(config.replay), job_size(), job_rank()
    folder = decisions_of(source)
    if (ranks := len(list(folder.glob("rank*.jsonl")))) != world_size:
        raise ValueError(f"replay={source}: recorded on {ranks} ranks, and this run has {world_size}: start as many")
    recording = read_recording(file_of(folder, rank))
    recording = replace(recording, decisions=recording.decisions[: config.steps])
    check_members(recording.decisions)
    if (num_steps := len(recording.decisions)) < config.steps:
        raise ValueError(
            f"replay={source}: the recording has {num_steps} of {config.steps} steps, as of a run that was ended or "
            f"could not write; repeat what it has with steps={num_steps}"
        )
    return recording


def compare_with_recorded(source: Path, steps: int, hashes: list[str]) -> None:
    """Say whether the parameters are those that the recorded run ended with, if it had as many steps."""
    before = json.loads((source / "summary.json").read_text()) if (source / "summary.json").exists() else {}
    if before.get("steps") != steps:
        return
    same = set(before["parameters_sha256"]) == set(hashes)  # of members there, of all ranks here
    sys.stdout.write(f"parameters as in {source}: {'identical' if same else 'DIFFERENT'}\n")


def write_decision(job: StagedJob, decisions: DecisionWriter) -> None:
    """Write what this rank decided in the step that it just left."""
    assert job.model.last_decision is not None
    decisions.write(job.model.last_decision, job.model.learned)


def write_shares(run_dir: Path, rebalance: Rebalance) -> None:
    """Write the schedule so far; if it cannot be written, there is none, and no replay is possible."""
    try:
        durable.write_text(shares_of(run_dir), json.dumps(rebalance.schedule))
    except OSError as error:
        _log.warning("%s cannot be written (%s): training goes on, and cannot be replayed", shares_of(run_dir), error)
        with suppress(OSError):
            shares_of(run_dir).unlink(missing_ok=True)
