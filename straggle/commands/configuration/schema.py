"""Which keys the commands' configurations have, and which of their values go together.

The keys and their kinds are those of ``conf/``. A part whose class is named by ``_target_`` checks what it is given
when it is built.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from straggle.extras import needs_extra

with needs_extra("train"):
    from hydra.core.config_store import ConfigStore
    from omegaconf import DictConfig, OmegaConf

from straggle.commands.saved import durable

COMMANDS = ("train", "compare", "simulate")
OF_METHOD = ("job", "deadline", "estimator", "late_handling", "merge", "optimizer", "stages", "rebalance", "work")

# the option `none` of groups, which needs no file
_NONE: dict[str, dict[str, Any]] = {
    "deadline": {"_target_": "straggle.WaitForAll"},
    "delays": {"_target_": "straggle.lab.simulate.delays.NoDelay"},
    "faults": {},
    "members": {},
    "metrics": {},
    "parallel": {},
    "network": {"_target_": "straggle.lab.simulate.communication.Constant", "seconds": 0.0},
    "rebalance": {},
}
_WORK = ("dealt", "pulled")
_LEAST = {"steps": 1, "seed": 0, "batch_size": 1, "num_microbatches": 1, "checkpoint_every": 0}
_LEAST |= {"collect_garbage_every": 0, "block": 1, "ranks": 1, "history_ranks": 1}
_KINDS = {bool: "true or false", int: "an integer", str: "text", list: "a list", dict: "a part with keys of its own"}
_OR_NULL = {"replay": str, "links": bool, "scenarios": list}
_ONLY_TRAIN = ("resume", "replay", "report", "checkpoint_every", "metrics")


class ConfigurationError(ValueError):
    """A key or value that the configuration does not have; the message lists the valid ones."""


def unknown_key(key: str, valid: Iterable[str]) -> ConfigurationError:
    """The error for a key that a command has not."""
    return ConfigurationError(f"unknown key {key}; valid keys: {', '.join(valid)}")


def check_at_least(least: dict[str, int], values: dict[str, Any]) -> None:
    """Raise `ConfigurationError` for an integer that is too small."""
    for key, bound in least.items():
        if not isinstance(value := values[key], int) or value < bound:
            raise ConfigurationError(f"{key}={value}: must be an integer of at least {bound}")


def check_work(work: str, num_microbatches: int) -> None:
    """Raise `ConfigurationError` for what ranks that draw a step's micro-batches cannot do."""
    if work not in _WORK:
        raise ConfigurationError(f"work={work}: choose one of {', '.join(_WORK)}")
    if work == "pulled" and num_microbatches < 2:
        raise ConfigurationError(
            "work=pulled needs num_microbatches above 1: ranks draw micro-batches, and with one for each there is "
            "nothing to draw"
        )


def check_values(name: str, config: DictConfig) -> None:
    """Raise `ConfigurationError` for keys that the command has not, values of other kinds, and what excludes another.

    It raises OmegaConf's errors for values that refer to others that are not there.
    """
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    _check_keys(values, usual := usual_values(name))
    for key, value in values.items():
        kind = _OR_NULL.get(key, type(usual[key]))
        is_null = value is None and (key in _OR_NULL or kind is dict)
        if kind in _KINDS and type(value) is not kind and key != "resume" and not is_null:
            raise ConfigurationError(f"{key}={value}: must be {_KINDS[kind]}")
    check_at_least({key: least for key, least in _LEAST.items() if key in values}, values)
    if name == "compare":
        _check_compare(values)
    if name != "simulate":
        _check_run(values)


def _check_keys(values: dict[str, Any], usual: dict[str, Any]) -> None:
    if unknown := [key for key in values if key not in usual]:
        raise unknown_key(unknown[0], usual)
    if missing := [key for key in usual if key not in values]:
        raise ConfigurationError(f"{missing[0]} has no value: leave out what takes it away, such as ~{missing[0]}")


def _check_run(own: dict[str, Any]) -> None:
    """Of ``train``, and of each method of ``compare``."""
    check_work(own["work"], own["num_microbatches"])
    if own["resume"] not in (None, True, False, "auto"):
        raise ConfigurationError(f"resume={own['resume']}: choose one of true, false, auto")
    if own["replay"] is not None:
        _check_replay(own, Path(own["replay"]))
    if own["resume"] is True and not durable.exists(Path(own["run_dir"]) / "checkpoint"):
        raise ConfigurationError(f"resume=true: there is no checkpoint in run_dir={own['run_dir']}")
    if own["parallel"]:
        _check_sharded(own)


def _check_sharded(own: dict[str, Any]) -> None:
    """What is there for ranks that each have a copy of the model is refused."""
    if own["rebalance"]:
        raise _excluded("rebalance=by_speed", "samples are dealt out to ranks, and a replica is several")
    if _is_of("Paced", own["workload"]):
        raise _excluded("workload=paced", "its sleeps are hooks on whole parameters")


def _excluded(key: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"{key} and parallel=sharded exclude each other: {why}; leave {key} out")


def _is_of(name: str, part: Any) -> bool:
    """Whether a part of the configuration builds this class."""
    return part is not None and str(part.get("_target_")).rpartition(".")[2] == name


def _check_replay(own: dict[str, Any], source: Path) -> None:
    if own["members"]:
        raise ConfigurationError(
            "members=elastic and replay=... exclude each other: a replay is of steps in which no rank left, and "
            "its own processes stay; leave members out"
        )
    if not (source / "decisions").is_dir():
        raise ConfigurationError(f"replay={source}: no recorded run there; give the run_dir of an earlier one")
    if own["resume"]:
        raise ConfigurationError("resume=true and replay=... exclude each other: a replay begins at step 0")


def _check_compare(own: dict[str, Any]) -> None:
    if wrong := [key for key in _ONLY_TRAIN if own[key]]:
        raise ConfigurationError(f"{wrong[0]}: only train does that, compare does not")
    if own["members"] and own["parallel"]:
        raise _excluded("members=elastic", "FSDP2's own replicas do not come back")
    for name, method in own["methods"].items():
        if not isinstance(method, dict):
            raise ConfigurationError(f"methods.{name}={method}: must be parts, such as {{deadline: {{q: 0.5}}}}")
        if unknown := [key for key in method if key not in OF_METHOD]:
            raise ConfigurationError(
                f"unknown key methods.{name}.{unknown[0]}; methods.{name} has {', '.join(OF_METHOD)}"
            )
        if own["parallel"] and _is_of("LocalSgdJob", method.get("job")):
            raise _excluded(name, "its ranks train alone, each with a copy")
        if own["parallel"] and _is_of("WithoutJob", method.get("job")):
            raise _excluded(name, "it leaves out ranks, each with a copy")
    if "ddp" not in own["methods"]:
        raise ConfigurationError(f"methods={list(own['methods'])}: ddp must be among them, for comparison")
    for name in own["scenarios"] or ():
        if name not in options_of("faults"):
            raise ConfigurationError(f"scenarios={own['scenarios']}: choose of {', '.join(options_of('faults'))}")


# -- what conf/ has


def config_dir() -> Path:
    """``conf/`` of the checkout, or the copy that an installed wheel carries."""
    package = Path(__file__).parents[2]
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


@cache
def usual_values(name: str) -> dict[str, Any]:
    """The keys of a command's configuration, each with the value that ``conf/`` gives it; a group's is ``None``."""
    own: Any = OmegaConf.to_container(OmegaConf.load(config_dir() / f"{name}.yaml"), resolve=True)
    values, groups = {key: value for key, value in own.items() if key != "hydra"}, dict[str, Any]()
    for entry in values.pop("defaults"):
        if entry in COMMANDS:
            values = usual_values(entry) | values
        elif entry != "_self_":
            groups |= dict.fromkeys(str(group).removeprefix("override ") for group in entry)
    return values | {group: None for group in groups if "/" not in group}


def options_of(group: str) -> list[str]:
    """The names that may be chosen in a group."""
    return sorted([path.stem for path in (config_dir() / group).glob("*.yaml")] + ["none"] * (group in _NONE))


def option(group: str, name: str) -> DictConfig:
    """What an option of a group has."""
    found = OmegaConf.create(_NONE[group]) if name == "none" else OmegaConf.load(config_dir() / group / f"{name}.yaml")
    assert isinstance(found, DictConfig)
    return found


def register() -> None:
    """Tell hydra of the options that have no file, and of values that follow from others.

    These follow from the number of ranks, or of replicas of several (at least 1), and from the run that is repeated.
    """
    for group, node in _NONE.items():
        ConfigStore.instance().store(group=group, name="none", node=node)
    OmegaConf.register_new_resolver("all_ranks_but", _all_ranks_but, replace=True)
    OmegaConf.register_new_resolver("more_than_half", _more_than_half, replace=True)
    OmegaConf.register_new_resolver("steps_of", _steps_of, replace=True)


def _all_ranks_but(number: int, *, _root_: DictConfig) -> int:
    if not isinstance(number, int) or number < 0:
        raise ConfigurationError(f"${{all_ranks_but:{number}}}: must be an integer of at least 0")
    return max(1, _num_ranks(_root_) - number)


def _more_than_half(*, _root_: DictConfig) -> int:
    return _num_ranks(_root_) // 2 + 1


def _steps_of(run_dir: object, otherwise: int) -> object:
    recorded = None if run_dir is None else Path(str(run_dir), "config.yaml")
    if recorded is None or not recorded.exists():
        return otherwise
    return OmegaConf.select(OmegaConf.load(recorded), "steps", default=otherwise)


def _num_ranks(root: DictConfig) -> int:
    """Those that may be late: replicas, if each is several ranks."""
    shards = OmegaConf.select(root, "parallel.shards", default=1)
    return int(os.environ.get("WORLD_SIZE") or 1) // int(shards)  # torchrun's
