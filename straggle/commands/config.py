"""The configuration of the commands: where it is, and refusals that list what is valid.

python -m straggle check train steps=10 deadline=fixed     # exit status 2 and a message if something is wrong
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, wraps
from pathlib import Path
from textwrap import wrap
from typing import Any, NoReturn

from straggle.extras import needs_extra

with needs_extra("train"):
    import hydra
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from hydra.utils import get_class, instantiate
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

from straggle.backward.stages import plan_stages
from straggle.commands import durable
from straggle.commands.plain_args import run_command
from straggle.commands.run_dir import check_run_dir
from straggle.data.rebalance import Rebalance, check_shares
from straggle.lab.build import build_estimator, build_faults, build_members, build_optimizer, stages_of

METHODS = "methods"  # a group with several options chosen at once
GROUPS = (
    "workload",
    "deadline",
    "estimator",
    "faults",
    "optimizer",
    "metrics",
    "delays",
    "network",
    "rebalance",
    "lateness",
    "members",
)
_AT_LEAST = {
    "steps": 1,
    "ranks": 1,
    "seeds": 1,
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
    "lateness",
)
_BUILT = ("deadline", "merge", "late_handling", "delays", "work", "network", "lateness")
_OF_A_METHOD = ("job", "deadline", "estimator", "late_handling", "merge", "optimizer", "stages", "rebalance", "work")
_AT_LEAST_OF_A_JOB = {"every": 2, "warmup_steps": 0}
_NOT_COMPARED = ("resume", "replay", "report", "checkpoint_every")  # keys that only train follows
_WORK = ("dealt", "pulled")
_METRICS_PARTS = ("security", "targets", "push")


class ConfigurationError(ValueError):
    """A key or value that the configuration does not have; the message lists the valid ones."""


def config_dir() -> Path:
    """``conf/`` of the checkout, or the copy that an installed wheel carries."""
    package = Path(__file__).parents[1]
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


def load(name: str, overrides: Sequence[str]) -> DictConfig:
    """The configuration ``name`` with ``overrides`` such as ``steps=10``; raises `ConfigurationError`."""
    register_resolvers()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        if wrong := [override for override in overrides if "=" not in override and not override.startswith("~")]:
            raise ConfigurationError(f"{wrong[0]!r} is no key=value, such as steps=10")
        choices = [override for override in overrides if override.partition("=")[0] in (*GROUPS, METHODS)]
        valid = _composed(name)
        for choice in choices:
            if choice.partition("=")[0] not in valid:
                raise ConfigurationError(_unknown_key(choice.partition("=")[0], valid))
            _check_choice(*choice.split("=", 1))
        valid = _composed(name, *choices)
        try:
            config = compose(name, list(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigurationError(_explain(str(error), valid)) from None
    check(config, valid)
    return config


@cache
def _composed(name: str, *choices: str) -> DictConfig:
    """The valid configuration. It is kept, because composing takes a third of a second: do not change it."""
    valid = compose(name, list(choices))
    OmegaConf.set_readonly(valid, True)
    return valid


def register_resolvers() -> None:
    """Values that depend on the number of ranks: ``${all_ranks_but:1}`` and ``${more_than_half:}``, at least 1."""
    OmegaConf.register_new_resolver("all_ranks_but", _all_ranks_but, replace=True)
    OmegaConf.register_new_resolver("more_than_half", lambda: _num_ranks() // 2 + 1, replace=True)


def _all_ranks_but(number: int) -> int:
    if not isinstance(number, int) or number < 0:
        raise ConfigurationError(f"${{all_ranks_but:{number}}}: must be an integer of at least 0")
    return max(1, _num_ranks() - number)


def _num_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE") or 1)  # torchrun's


def check(config: DictConfig, valid: DictConfig) -> None:
    """Raise `ConfigurationError` for what hydra itself accepts: added keys and values out of range."""
    if unknown := [str(key) for key in config if key not in valid]:
        raise ConfigurationError(_unknown_key(unknown[0], valid))
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
            "members=elastic and replay=... exclude each other: a replay has the members of the recorded run, and its "
            "own processes stay; leave members out"
        )
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
        raise ConfigurationError(f"scenarios={scenarios}: give a list, such as [{','.join(_options('faults')[:2])}]")
    for name in scenarios or []:
        if name not in _options("faults"):
            raise ConfigurationError(f"scenarios={config.scenarios}: choose of {', '.join(_options('faults'))}")
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
    if config.get("members"):
        raise ConfigurationError(
            "work=pulled and members=elastic exclude each other here: the epochs of members are dealt to the ranks; a "
            "loop of your own may have both"
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


def of_method(config: DictConfig, name: str) -> DictConfig:
    """``config`` with the parts that the method ``name`` of ``compare`` replaces."""
    own = OmegaConf.to_container(config.methods[name], resolve=True)
    assert isinstance(own, dict)
    merged = config.copy()
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
    merged.faults = OmegaConf.load(config_dir() / "faults" / f"{name}.yaml")
    if "pace" in merged.faults and "pace" in config.faults:
        merged.faults.pace = config.faults.pace
    merged.run_dir = str(Path(config.run_dir) / name)
    return merged


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


def slows_ranks(config: DictConfig) -> bool:
    """Whether there are faults beside the pace; all ranks have the pace."""
    return bool(build_faults(config).keys() - {"pace"})


def _check_choice(group: str, option: str) -> None:
    chosen = [name.strip() for name in option.strip("[]").split(",")] if group == METHODS else [option]
    if not set(chosen) <= set(_options(group)):
        raise ConfigurationError(f"{group}={option}: choose one of {', '.join(_options(group))}")


def _check_arguments(key: str, config: Any, name: str | None = None) -> None:
    """The class's constructor is the schema of its part of the configuration; ``name``: where that part is written."""
    if config is None:
        return
    if not isinstance(config, DictConfig) or "_target_" not in config:
        raise ConfigurationError(f"{name or key}={config}: choose one of {', '.join(_options(key.partition('.')[0]))}")
    key = name or key
    try:
        parameters = inspect.signature(get_class(config._target_)).parameters
    except Exception as error:
        raise ConfigurationError(f"{key}._target_={config._target_}: {error}") from None
    own = {str(name) for name in config if not str(name).startswith("_")}
    if unknown := sorted(own - parameters.keys()):
        raise ConfigurationError(f"unknown key {key}.{unknown[0]}; {key} has {', '.join(parameters)}")


def _explain(problem: str, valid: DictConfig) -> str:
    """Hydra's complaint in one line; for an unknown key, the valid ones."""
    found = re.match("Could not override '(.*)'", problem)
    return _unknown_key(found[1], valid) if found else problem.strip().splitlines()[0]


def _unknown_key(key: str, valid: DictConfig) -> str:
    names = key.split(".")
    for depth in range(len(names) - 1, 0, -1):
        root = ".".join(names[:depth])
        if isinstance(part := OmegaConf.select(valid, root), DictConfig):
            keys = ", ".join(str(name) for name in part if name != "_target_") or "no keys"
            return f"unknown key {key}; {root} has {keys}"
    plain = [str(name) for name in valid if name not in GROUPS]
    lines, groups = [f"unknown key {key}; valid keys: {', '.join(plain)}"], _groups_of(valid)
    return "\n".join([*lines, "and groups, with keys of their own:", *groups] if groups else lines)


def _groups_of(valid: DictConfig, chosen: Collection[str] = ()) -> list[str]:
    def marked(group: str, between: str) -> str:
        return between.join(option + "*" * (f"{group}/{option}" in chosen) for option in _options(group))

    groups = [f"  {group}={marked(group, '|')}" for group in GROUPS if group in valid]
    return [*groups, *([f"  {METHODS}=[{marked(METHODS, ',')}]"] if METHODS in valid else [])]


def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


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


def plain(config: DictConfig) -> dict[str, Any]:
    """The configuration as ordinary dictionaries and lists, with everything resolved."""
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def run_configured(name: str, work: Callable[[DictConfig], None], usage: str) -> None:
    """The command ``name``: ``work`` with the configuration that the command line asks for, or its help.

    Ends the program with status 2, and a message from rank 0, if the command line is not valid, as `complain_and_exit`
    says, or ``work`` raises `ConfigurationError`.
    """
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        try:
            sys.stdout.write(_help_of(name, usage, [word for word in words if not word.startswith("-")]))
        except ConfigurationError as error:
            refuse(error)
        return
    complain_and_exit(name, words)

    @wraps(work)  # hydra looks for the module that it is of
    def checked(config: DictConfig) -> None:
        try:
            work(config)
        except ConfigurationError as error:
            refuse(error)

    hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=name)(checked)()


def _help_of(name: str, usage: str, words: Sequence[str] = ()) -> str:
    """``usage``, then the groups and the keys with their values, on one screen; or all of one group or key."""
    register_resolvers()
    choices = [word for word in words if word.partition("=")[0] in GROUPS and "=" in word]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        for choice in choices:
            _check_choice(*choice.split("=", 1))
        valid = _composed(name, *choices)
    if unknown := [word for word in words if word.partition("=")[0] not in valid]:
        raise ConfigurationError(_unknown_key(unknown[0], valid))
    parts = [*(choice.partition("=")[0] for choice in choices), *(word for word in words if word in valid)]
    if parts:
        return "".join(OmegaConf.to_yaml({part: valid[part]}) for part in parts)
    lines = [usage.strip(), "", "groups (*: what is chosen now):", *_groups_of(valid, chosen=_chosen(name))]
    nested = [str(key) for key in valid if isinstance(valid[key], DictConfig) and key not in (*GROUPS, METHODS)]
    plain_keys = [f"{key!s}={_plainly(valid[key])}" for key in valid if key not in (*GROUPS, METHODS, *nested)]
    lines += ["", "keys:", *wrap(" ".join(plain_keys), 110, initial_indent="  ", subsequent_indent="  ")]
    example = next((group for group in GROUPS if group in valid), "")
    more = ", ".join([example, f"{example}={_options(example)[0]}", *nested]) if example else ", ".join(nested)
    return "\n".join([*lines, "", f"keys of a group, as GROUP.KEY=value: --help {more}", ""])


def _chosen(name: str) -> set[str]:
    """``group/option`` of all that a configuration has by default."""
    config = OmegaConf.load(config_dir() / f"{name}.yaml")
    entries = config.get("defaults", []) if isinstance(config, DictConfig) else []
    pairs = [
        (str(group), options) for entry in entries if isinstance(entry, DictConfig) for group, options in entry.items()
    ]
    lists = [(group, options if isinstance(options, ListConfig) else [options]) for group, options in pairs]
    return {f"{group}/{option}" for group, options in lists for option in options}


def _plainly(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def refuse(error: Exception, status: int = 2) -> NoReturn:
    """End the program with this status; rank 0 says why."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{error}\n")
    raise SystemExit(status) from None


def complain_and_exit(name: str, arguments: Sequence[str]) -> None:
    """End the program, with a message from rank 0, if the command line is wrong; flags are left to hydra.

    It is also wrong if ``run_dir`` cannot be written, or another run writes into it; rank 0 checks that, unless it was
    started again: then the run that it comes back to may be the one that writes.
    """
    register_resolvers()
    if any(argument.startswith("-") for argument in arguments):
        return
    try:
        config = load(name, arguments)
        if os.environ.get("RANK", "0") == "0" and config.get("run_dir") and not _started_again():
            check_run_dir(Path(config.run_dir))
    except ValueError as error:
        refuse(error)


def _started_again() -> bool:
    """Whether `straggle launch` has started this worker before."""
    return "STRAGGLE_ELASTIC" in os.environ and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _check_command(words: Sequence[str]) -> int:
    names = sorted(path.stem for path in config_dir().glob("*.yaml"))
    if words[0] not in names:
        raise ValueError(f"no command {words[0]} with a configuration: choose one of {', '.join(names)}")
    complain_and_exit(words[0], words[1:])
    return 0


def main() -> int:
    """The command ``check``; returns its exit status."""
    return run_command(
        sys.argv[1:], "python -m straggle check COMMAND [key=value ...]\n", _check_command, extra="train"
    )
