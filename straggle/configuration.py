"""The configuration of the commands: where it lies, and refusals that list what is valid.

python -m straggle.configuration train steps=10 deadline=fixed     # exit status 2 and a message if something is wrong
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.optim import Optimizer

from straggle.estimators import Estimator
from straggle.faults import Fault
from straggle.stages import BalancedByTime, plan_stages

GROUPS = ("workload", "deadline", "estimator", "faults", "optimizer", "metrics", "delays", "network")
_AT_LEAST = {
    "steps": 1,
    "ranks": 1,
    "history_ranks": 1,
    "num_microbatches": 1,
    "batch_size": 1,
    "seed": 0,
    "block": 1,
    "checkpoint_every": 0,
}
_BUILT = ("deadline", "merge", "patience", "delays", "work", "network")
_METRICS_PARTS = ("security", "targets", "push")


class ConfigurationError(ValueError):
    """A key or value that the configuration does not have; the message lists the valid ones."""


def config_dir() -> Path:
    """``conf/`` of the checkout, or the copy that an installed wheel carries."""
    package = Path(__file__).parent
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


def load(name: str, overrides: Sequence[str]) -> DictConfig:
    """The configuration ``name`` with ``overrides`` such as ``steps=10``; raises `ConfigurationError`."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        if wrong := [override for override in overrides if "=" not in override and not override.startswith("~")]:
            raise ConfigurationError(f"{wrong[0]!r} is no key=value, such as steps=10")
        choices = [override for override in overrides if override.partition("=")[0] in GROUPS]
        for choice in choices:
            _check_choice(*choice.split("=", 1))
        valid = compose(name, choices)
        try:
            config = compose(name, list(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigurationError(_explain(str(error), valid)) from None
    check(config, valid)
    return config


def check(config: DictConfig, valid: DictConfig) -> None:
    """Raise `ConfigurationError` for what hydra itself lets through: added keys and values out of range."""
    if unknown := [str(key) for key in config if key not in valid]:
        raise ConfigurationError(_unknown_key(unknown[0], valid))
    for key, least in _AT_LEAST.items():
        value = config.get(key, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigurationError(f"{key}={value}: must be a whole number of at least {least}")
    for group in ("workload", "deadline", "estimator", "optimizer", "merge", "patience", "delays", "work", "network"):
        _check_arguments(group, config.get(group))
    if metrics := config.get("metrics"):
        for key, part in (("metrics", metrics), *((f"metrics.{key}", metrics.get(key)) for key in _METRICS_PARTS)):
            _check_arguments(key, part)
    for name, fault in config.get("faults", {}).items():
        _check_arguments(f"faults.{name}", fault)
    if config.get("replay") and not (Path(config.replay) / "decisions").is_dir():
        raise ConfigurationError(f"replay={config.replay}: no recorded run there; give the run_dir of an earlier one")
    if config.get("resume") and config.get("replay"):
        raise ConfigurationError("resume=true and replay=... exclude each other: a replay begins at step 0")
    if config.get("resume") not in (None, True, False, "auto"):
        raise ConfigurationError(f"resume={config.resume}: choose one of true, false, auto")
    if config.get("resume") is True and not (Path(config.run_dir) / "checkpoint").is_dir():
        raise ConfigurationError(f"resume=true: there is no checkpoint in run_dir={config.run_dir}")
    try:
        _build_all(config)
    except Exception as error:  # the constructor's own complaint, whatever it is
        cause = error.__cause__ or error
        raise ConfigurationError(str(cause)) from None


def _build_all(config: DictConfig) -> None:
    """What each rank will build, once before there are ranks, so that a wrong value is told once."""
    built = {part: instantiate(config.get(part)) for part in _BUILT}
    if "faults" in config:
        build_faults(config)
    if metrics := config.get("metrics"):
        from straggle.endpoint import check_port  # needs an extra

        check_port(metrics.get("port"))
        for part in _METRICS_PARTS:
            instantiate(metrics.get(part))
    if "ranks" in config:
        built["patience"].quorum_of(config.ranks, built["deadline"].quorum)
    if "workload" not in config:
        return
    model = instantiate(config.workload).model()
    if "optimizer" in config:
        build_estimator(config, build_optimizer(config, model))
    plan_stages(model, stages_of(config.stages))


def build_faults(config: DictConfig) -> dict[str, Fault]:
    """The faults by name, without those that ``null`` switches off."""
    parts = config.get("faults") or {}
    return {str(name): instantiate(part) for name, part in parts.items() if part is not None}


def build_optimizer(config: DictConfig, model: nn.Module) -> Optimizer:
    """The optimizer over all parameters of ``model``."""
    optimizer: Optimizer = instantiate(config.optimizer, params=model.parameters(), _convert_="all")
    return optimizer


def build_estimator(config: DictConfig, optimizer: Optimizer) -> Estimator:
    """The estimator; one that takes an optimizer is given the run's own, also inside of another."""
    return _build_estimator(config.estimator, optimizer)


def _build_estimator(config: DictConfig, optimizer: Optimizer) -> Estimator:
    wanted = inspect.signature(get_class(config._target_)).parameters
    given: dict[str, Any] = {"optimizer": optimizer} if "optimizer" in wanted else {}
    if isinstance(config.get("inner"), DictConfig):
        given["inner"] = _build_estimator(config.inner, optimizer)
        config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "inner"])
    estimator: Estimator = instantiate(config, **given)
    return estimator


def _check_choice(group: str, option: str) -> None:
    if option not in _options(group):
        raise ConfigurationError(f"{group}={option}: choose one of {', '.join(_options(group))}")


def _check_arguments(key: str, config: Any) -> None:
    """The class's constructor is the schema of its part of the configuration."""
    if config is None:
        return
    if not isinstance(config, DictConfig) or "_target_" not in config:
        raise ConfigurationError(f"{key}={config}: choose one of {', '.join(_options(key.partition('.')[0]))}")
    try:
        parameters = inspect.signature(get_class(config._target_)).parameters
    except Exception as error:
        raise ConfigurationError(f"{key}._target_={config._target_}: {error}") from None
    own = {str(name) for name in config if not str(name).startswith("_")}
    if unknown := sorted(own - parameters.keys()):
        raise ConfigurationError(f"unknown key {key}.{unknown[0]}; {key} has {', '.join(parameters)}")


def _explain(problem: str, valid: DictConfig) -> str:
    """Hydra's complaint in one line, or what stands in place of an unknown key."""
    found = re.match("Could not override '(.*)'", problem)
    return _unknown_key(found[1], valid) if found else problem.strip().splitlines()[0]


def _unknown_key(key: str, valid: DictConfig) -> str:
    root, _, rest = key.partition(".")
    if rest and root in valid and isinstance(valid[root], DictConfig):
        return f"unknown key {key}; {root} has {', '.join(str(name) for name in valid[root] if name != '_target_')}"
    plain = [str(name) for name in valid if name not in GROUPS]
    groups = [f"  {group}={'|'.join(_options(group))}" for group in GROUPS if group in valid]
    lines = [f"unknown key {key}; valid keys: {', '.join(plain)}", "and groups, with keys of their own:", *groups]
    return "\n".join(lines)


def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


def plain(config: DictConfig) -> dict[str, Any]:
    """The configuration as ordinary dictionaries and lists, with everything resolved."""
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def stages_of(stages: int | ListConfig | DictConfig | None) -> int | list[str] | BalancedByTime | None:
    """The key ``stages`` as the library takes it."""
    if isinstance(stages, DictConfig):
        by_time: BalancedByTime = instantiate(stages)
        return by_time
    return [str(name) for name in stages] if isinstance(stages, ListConfig) else stages


def complain_and_exit(name: str, arguments: Sequence[str]) -> None:
    """End the program, with a message from rank 0, if the command line is not valid; flags are left to hydra."""
    if any(argument.startswith("-") for argument in arguments):
        return
    try:
        load(name, arguments)
    except ConfigurationError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    complain_and_exit(sys.argv[1], sys.argv[2:])
