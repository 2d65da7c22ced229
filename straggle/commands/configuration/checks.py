"""What is done with a configuration before there are ranks.

It is built once, so that what its parts refuse is reported once. Configurations are made from one another, of a method
or of a scenario. One that is not the user's own, such as that of a run to repeat, may build only what is known.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from straggle.extras import needs_extra

with needs_extra("train"):
    from hydra.utils import get_class, instantiate
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
from torch import nn

from straggle.backward.stages import plan_stages
from straggle.commands.configuration.schema import ConfigurationError, check_at_least, check_values, check_work, option
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


# -- made from one another


def of_method(config: DictConfig, name: str) -> DictConfig:
    """``config`` with the parts that the method ``name`` of ``compare`` replaces, and without the methods."""
    own = OmegaConf.to_container(config.methods[name], resolve=True)
    assert isinstance(own, dict)
    merged = OmegaConf.masked_copy(config, [str(key) for key in config if key != "methods"])  # the copy takes its time
    OmegaConf.set_struct(merged, False)
    for key, part in own.items():
        if key != "job":
            replaces = not isinstance(part, dict) or "_target_" in part
            merged[key] = part if replaces else OmegaConf.merge(merged[key], part)
    return merged


def of_scenario(config: DictConfig, name: str) -> DictConfig:
    """``config`` under the faults of this name, with a separate folder for its files.

    Faults that have a pace get ``config``'s.
    """
    merged = config.copy()
    OmegaConf.set_struct(merged, False)
    merged.update(faults=option("faults", name), run_dir=str(Path(config.run_dir) / name))
    if "pace" in merged.faults and "pace" in config.faults:
        merged.faults.update(pace=config.faults.pace)
    return merged


def slows_ranks(config: DictConfig) -> bool:
    """Whether there are faults beside the pace; all ranks have the pace."""
    return bool(build_faults(config).keys() - {"pace"})


# -- of others: which classes it may build


def check_targets(config: DictConfig, own: DictConfig, where: str) -> None:
    """Raise `ConfigurationError` if a configuration that is not the user's own builds what it should not.

    It may build classes of this project and of ``torch.optim``, and classes that this run's ``own`` configuration
    names.
    """
    try:
        theirs, ours = (OmegaConf.to_container(each, resolve=True) for each in (config, own))
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{where}: {str(error).splitlines()[0]}") from None
    trusted = {target for _, target in _targets(ours, "")}
    for key, target in _targets(theirs, ""):
        if target in trusted:
            continue
        module = _module_of(target)
        if not f"{module}.".startswith(("straggle.", "torch.optim.")):
            unknown = module is None and target.startswith("straggle.")
            raise ConfigurationError(
                f"{where}: {key}={target}: only classes of straggle and torch.optim are built from there; if you trust "
                f"this one, name it on the command line too: {key}={target}"
                + ("; this version of straggle has none of that name: repeat a run with its own version" * unknown)
            )


def _targets(config: Any, key: str) -> Iterator[tuple[str, str]]:
    """The keys that name what is built, and the names."""
    parts = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for name, part in parts:
        at = f"{key}.{name}" if key else str(name)
        if name == "_target_":
            yield at, str(part)
        yield from _targets(part, at)


def _module_of(target: str) -> str | None:
    """The module that defines a class, which straggle or ``torch.optim`` may only import; ``None`` for other classes.

    Imports nothing else. ``None``, too, if there is no such class.
    """
    if not target.startswith(("straggle.", "torch.optim.")):
        return None
    try:
        return str(get_class(target).__module__)
    except Exception:
        return None
