"""A configuration is built once before there are ranks, so that what its parts refuse is reported once."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args, get_origin, get_type_hints

from straggle.extras import needs_extra

with needs_extra("train"):
    from hydra.utils import get_class, instantiate
    from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import nn

from straggle.backward.stages import plan_stages
from straggle.commands.config_parts import of_method
from straggle.commands.config_schema import ConfigurationError, check_at_least, check_values, check_work
from straggle.data.rebalance import Rebalance, check_shares
from straggle.lab.build import build_estimator, build_faults, build_members, build_optimizer, stages_of
from straggle.lab.sharding import Sharded

_AT_LEAST_OF_A_JOB = {"every": 2, "warmup_steps": 0}


def check(name: str, config: DictConfig) -> None:
    """Raise for keys that the command ``name`` has not, for values of other types, and for those that are refused.

    It raises `ConfigurationError`, or OmegaConf's errors.
    """
    check_values(name, config)
    if config.get("run_dir") == "":
        raise ConfigurationError("run_dir=: give a folder, such as runs/mine")
    with _naming_the_part(config):
        model = instantiate(config.workload).model() if "workload" in config else None
        _build(config, model)
    for method, own in config.get("methods", {}).items():
        with _naming_the_part(config, f"methods.{method}: "):
            _build_method(of_method(config, str(method)), own.get("job"), model)


@contextmanager
def _naming_the_part(config: DictConfig, prefix: str = "") -> Iterator[None]:
    """Raise `ConfigurationError` for whatever a constructor complains of, with the key of that constructor.

    If that is a ``TypeError``, it is said instead which value is of another type than the constructor's.
    """
    try:
        yield
    except Exception as error:
        where = re.search("^full_key: (.+)$", str(error), re.MULTILINE)
        cause = error.__cause__ if where else error
        if where and isinstance(cause, TypeError) and (misfit := _misfit(OmegaConf.select(config, where[1]))):
            raise ConfigurationError(f"{prefix}{where[1]}.{misfit}") from None
        complaint = " ".join(str(cause).split())
        raise ConfigurationError(f"{prefix}{where[1]}: {complaint}" if where else f"{prefix}{complaint}") from None


def _misfit(part: Any) -> str | None:
    """The first value of a part that is no number or list, though its constructor takes only such."""
    if not isinstance(part, DictConfig):
        return None
    built: Any = get_class(part._target_)
    hints = get_type_hints(built.__init__)
    for key, value in ((str(key), part[key]) for key in part):
        wanted = hints.get(key)
        kinds = {get_origin(kind) or kind for kind in (wanted, *get_args(wanted))}
        if value is None or bool in kinds or str in kinds:
            continue
        numbers, listed = not kinds.isdisjoint((int, float)), not kinds.isdisjoint((list, Sequence, Collection))
        if listed and not (isinstance(value, (list, ListConfig)) and all(isinstance(own, int) for own in value)):
            return f"{key}={value}: must be a list of numbers, such as [0,1]"
        if numbers and not listed and not isinstance(value, (int, float)):
            return f"{key}={value}: must be a number"
    return None


def _build(config: DictConfig, model: nn.Module | None) -> None:
    """Build the run's own parts; ``model``: its workload's, if it has one."""
    for part in ("delays", "network", "work"):
        if isinstance(own := config.get(part), DictConfig):
            instantiate(own)
    build_faults(config)
    if metrics := config.get("metrics"):
        _check_metrics(metrics)
    ranks = _num_ranks(config)
    if config.get("rebalance"):
        _check_shares(config, ranks)
    if (members := build_members(config, ranks)) is not None and ranks:
        members.least(ranks)
    _build_merge(config, model)


def _build_method(config: DictConfig, job: DictConfig | None, model: nn.Module | None) -> None:
    """Build the parts of a method of ``compare`` as if they were the run's own."""
    if job is not None:
        arguments = _check_arguments("job", job)
        check_at_least({key: least for key, least in _AT_LEAST_OF_A_JOB.items() if key in arguments}, arguments)
    check_work(config.work, config.num_microbatches)
    if config.rebalance:
        _check_shares(config, _num_ranks(config))
    _build_merge(config, model)


def _build_merge(config: DictConfig, model: nn.Module | None) -> None:
    deadline, _, late_handling = (instantiate(config.get(part)) for part in ("deadline", "merge", "late_handling"))
    if late_handling is not None and (ranks := _num_ranks(config)):
        late_handling.quorum_of(ranks, deadline.quorum)
    if model is not None and "optimizer" in config:
        build_estimator(config, build_optimizer(config, model))
    if model is not None:
        plan_stages(model, stages_of(config.stages))


def _num_ranks(config: DictConfig) -> int:
    """As many ranks, or replicas of several, as it is for; 0: not known yet."""
    ranks = int(config.get("ranks") or os.environ.get("WORLD_SIZE") or 0)
    sharded: Sharded | None = instantiate(config.parallel) if config.get("parallel") else None
    return ranks if sharded is None else sharded.replicas(ranks)


def _check_metrics(metrics: DictConfig) -> None:
    from straggle.observe.metrics_endpoint import check_port  # needs an extra

    _check_arguments("metrics", metrics)
    check_port(metrics.get("port"))
    for part in metrics.values():
        if isinstance(part, DictConfig):
            instantiate(part)


def _check_shares(config: DictConfig, ranks: int) -> None:
    """Check what `Rebalance` would refuse, if it is used; it deals out samples, or complete micro-batches."""
    arguments = _check_arguments("rebalance", config.rebalance)
    if get_class(config.rebalance._target_) is Rebalance:
        total = ranks * (config.num_microbatches if config.num_microbatches > 1 else config.batch_size)
        check_shares(ranks, total=total or None, **arguments)


def _check_arguments(key: str, part: DictConfig) -> dict[str, Any]:
    """The arguments of a class that cannot be built yet; raises `ConfigurationError` for one that it does not take."""
    arguments = {str(name): value for name, value in part.items() if name != "_target_"}
    if unknown := arguments.keys() - (taken := inspect.signature(get_class(part._target_)).parameters).keys():
        raise ConfigurationError(f"unknown key {key}.{min(unknown)}; {key} has {', '.join(taken)}")
    return arguments
