"""What a configuration may say: each part is checked, and a refusal lists what is valid."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

from straggle.extras import needs_extra

with needs_extra("train"):
    from hydra.utils import get_class, instantiate
    from omegaconf import DictConfig, ListConfig
    from omegaconf.errors import OmegaConfBaseException

from straggle.backward.stages import plan_stages
from straggle.commands import durable
from straggle.commands.config_keys import METHODS, ConfigurationError, options_of, unknown_key
from straggle.commands.config_parts import of_method
from straggle.data.rebalance import Rebalance, check_shares
from straggle.lab.build import build_estimator, build_faults, build_members, build_optimizer, stages_of

_AT_LEAST = {
    "steps": 1,
    "ranks": 1,
    "history_ranks": 1,
    "num_microbatches": 1,
    "batch_size": 1,
    "seed": 0,
    "block": 1,
    "checkpoint_every": 0,
    "collect_garbage_every": 0,
}
_PARTS = (
    "workload",
    "deadline",
    "estimator",
    "optimizer",
    "merge",
    "late_handling",
    "delays",
    "work",
    "network",
)
_BUILT = ("deadline", "merge", "late_handling", "delays", "work", "network")
_OF_A_METHOD = ("job", "deadline", "estimator", "late_handling", "merge", "optimizer", "stages", "rebalance", "work")
_AT_LEAST_OF_A_JOB = {"every": 2, "warmup_steps": 0}
_NOT_COMPARED = ("resume", "replay", "report", "checkpoint_every")  # keys that only train follows
_WORK = ("dealt", "pulled")
_METRICS_PARTS = ("security", "targets")


def check(config: DictConfig, valid: DictConfig) -> None:
    """Raise `ConfigurationError` for what hydra itself accepts: added keys and values out of range."""
    if unknown := [str(key) for key in config if key not in valid]:
        raise ConfigurationError(unknown_key(unknown[0], valid))
    if METHODS in config:
        _check_compared(config, valid)
    for key, least in _AT_LEAST.items():
        check_at_least(key, config.get(key, least), least)
    for group in _PARTS:
        if not isinstance(config.get(group), str) or group != "work":
            _check_arguments(group, config.get(group))
    _check_work(config)
    if metrics := config.get("metrics"):
        for key, part in (("metrics", metrics), *((f"metrics.{key}", metrics.get(key)) for key in _METRICS_PARTS)):
            _check_arguments(key, part)
    for group in ("rebalance", "members"):
        _check_arguments(group, config.get(group) or None)
    if config.get("members") and config.get("replay"):
        raise ConfigurationError(
            "members=elastic and replay=... exclude each other: a replay is of steps in which no rank left, and "
            "its own processes stay; leave members out"
        )
    if not isinstance(pings := config.get("pings", True), bool):
        raise ConfigurationError(f"pings={pings}: choose one of true, false")
    for name, fault in config.get("faults", {}).items():
        _check_arguments(f"faults.{name}", fault)
    if config.get("replay") and not (Path(config.replay) / "decisions").is_dir():
        raise ConfigurationError(f"replay={config.replay}: no recorded run there; give the run_dir of an earlier one")
    if config.get("resume") and config.get("replay"):
        raise ConfigurationError("resume=true and replay=... exclude each other: a replay begins at step 0")
    if config.get("resume") not in (None, True, False, "auto"):
        raise ConfigurationError(f"resume={config.resume}: choose one of true, false, auto")
    if config.get("resume") is True and not durable.exists(Path(config.run_dir) / "checkpoint"):
        raise ConfigurationError(f"resume=true: there is no checkpoint in run_dir={config.run_dir}")
    if METHODS in config:
        _check_methods(config)
    scenarios = config.get("scenarios")
    if scenarios is not None and not isinstance(scenarios, ListConfig):
        raise ConfigurationError(f"scenarios={scenarios}: give a list, such as [{','.join(options_of('faults')[:2])}]")
    for name in scenarios or []:
        if name not in options_of("faults"):
            raise ConfigurationError(f"scenarios={config.scenarios}: choose of {', '.join(options_of('faults'))}")
    try:
        _build_all(config)
    except Exception as error:  # the constructor's own complaint, whatever it is
        raise ConfigurationError(complaint(error)) from None


def _check_work(config: DictConfig) -> None:
    """Refuse what ranks that draw a step's micro-batches cannot do."""
    if not isinstance(work := config.get("work", "dealt"), str):
        return  # what `simulate` is told of the work
    if work not in _WORK:
        raise ConfigurationError(f"work={work}: choose one of {', '.join(_WORK)}")
    if work == "dealt":
        return
    if config.num_microbatches < 2:
        raise ConfigurationError(
            "work=pulled needs num_microbatches above 1: ranks draw micro-batches, and with one for each there is "
            "nothing to draw"
        )


def complaint(error: Exception) -> str:
    """A constructor's complaint, with the key: for a value of a wrong type the constructor does not name it."""
    cause = error.__cause__ or error
    where = re.search("^full_key: (.+)$", str(error), re.MULTILINE)
    return f"{where[1]}: {cause}" if where and isinstance(cause, (AttributeError, TypeError)) else str(cause)


def check_at_least(key: str, value: Any, least: int) -> None:
    """Raise `ConfigurationError` unless this is an integer of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{key}={value}: must be an integer of at least {least}")


def _check_compared(config: DictConfig, valid: DictConfig) -> None:
    """Refuse keys that only ``train`` supports."""
    for key in _NOT_COMPARED:
        if config.get(key) != valid.get(key):
            raise ConfigurationError(f"{key}={config.get(key)}: only train does that, compare does not")
    if config.get("metrics"):
        raise ConfigurationError("metrics: only train exports them, compare does not")


def _check_methods(config: DictConfig) -> None:
    """Check the parts of each method of ``compare``, as if they were the run's own."""
    if "ddp" not in config.methods:
        raise ConfigurationError(f"methods={list(config.methods)}: ddp must be among them, for comparison")
    for name, method in config.methods.items():
        if unknown := [str(key) for key in method if key not in _OF_A_METHOD]:
            raise ConfigurationError(f"unknown key methods.{name}.{unknown[0]}; it has {', '.join(_OF_A_METHOD)}")
        _check_arguments(METHODS, method.get("job", {}), f"methods.{name}.job")
        for key, least in _AT_LEAST_OF_A_JOB.items():
            check_at_least(f"methods.{name}.job.{key}", method.job.get(key, least), least)
        try:
            own = of_method(config, str(name))
        except OmegaConfBaseException as error:
            raise ConfigurationError(f"methods.{name}: {str(error).splitlines()[0]}") from None
        _check_work(own)
        for part in (*_PARTS, "rebalance"):
            if part in method and part != "work":
                _check_arguments(part, own[part] or None, f"methods.{name}.{part}")


def _build_all(config: DictConfig) -> None:
    """What each rank will build, once before there are ranks, so that a wrong value is reported once."""
    built = {part: instantiate(own) for part in _BUILT if not isinstance(own := config.get(part), str)}
    if "faults" in config:
        build_faults(config)
    if metrics := config.get("metrics"):
        from straggle.observe.metrics_endpoint import check_port  # needs an extra

        check_port(metrics.get("port"))
        for part in _METRICS_PARTS:
            instantiate(metrics.get(part))
    ranks = int(config.get("ranks") or os.environ.get("WORLD_SIZE") or 0)  # 0: not known yet
    if ranks and built["late_handling"] is not None:
        built["late_handling"].quorum_of(ranks, built["deadline"].quorum)
    if config.get("rebalance"):
        _check_shares(config, ranks)
    if (members := build_members(config)) is not None and ranks:
        members.least(ranks)
    if "workload" not in config:
        return
    model = instantiate(config.workload).model()
    for own in (config, *(of_method(config, str(name)) for name in config.get(METHODS, {}))):
        parts = {part: instantiate(own.get(part)) for part in ("deadline", "merge", "late_handling")}
        if ranks and parts["late_handling"] is not None:
            parts["late_handling"].quorum_of(ranks, parts["deadline"].quorum)
        if "optimizer" in own:
            build_estimator(own, build_optimizer(own, model))
        plan_stages(model, stages_of(own.stages))


def _check_shares(config: DictConfig, ranks: int) -> None:
    """Check what `Rebalance` would refuse, if it is used; it deals out samples, or complete micro-batches."""
    if get_class(config.rebalance._target_) is Rebalance:
        total = ranks * (config.num_microbatches if config.num_microbatches > 1 else config.batch_size)
        check_shares(
            ranks, total=total or None, **{key: value for key, value in config.rebalance.items() if key != "_target_"}
        )


def _check_arguments(key: str, config: Any, name: str | None = None) -> None:
    """The class's constructor is the schema of its part of the configuration; ``name``: where that part is written."""
    if config is None:
        return
    if not isinstance(config, DictConfig) or "_target_" not in config:
        raise ConfigurationError(
            f"{name or key}={config}: choose one of {', '.join(options_of(key.partition('.')[0]))}"
        )
    key = name or key
    try:
        parameters = inspect.signature(get_class(config._target_)).parameters
    except Exception as error:
        raise ConfigurationError(f"{key}._target_={config._target_}: {error}") from None
    own = {str(name) for name in config if not str(name).startswith("_")}
    if unknown := sorted(own - parameters.keys()):
        raise ConfigurationError(f"unknown key {key}.{unknown[0]}; {key} has {', '.join(parameters)}")
