"""Which configurations, groups and keys there are: as ``conf/`` has them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from straggle.extras import needs_extra

with needs_extra("train"):
    from hydra import compose
    from omegaconf import DictConfig, ListConfig, OmegaConf

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
    "members",
)


class ConfigurationError(ValueError):
    """A key or value that the configuration does not have; the message lists the valid ones."""


def config_dir() -> Path:
    """``conf/`` of the checkout, or the copy that an installed wheel carries."""
    package = Path(__file__).parents[1]
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


@cache
def composed(name: str, *choices: str) -> DictConfig:
    """The valid configuration, inside of hydra's `initialize_config_dir`.

    It is kept, because composing takes a third of a second: do not change it.
    """
    valid = compose(name, list(choices))
    OmegaConf.set_readonly(valid, True)
    return valid


def register_resolvers() -> None:
    """Values that follow from others: of the number of ranks (at least 1), and of the run that is repeated."""
    OmegaConf.register_new_resolver("all_ranks_but", _all_ranks_but, replace=True)
    OmegaConf.register_new_resolver("more_than_half", lambda: _num_ranks() // 2 + 1, replace=True)
    OmegaConf.register_new_resolver("steps_of", _steps_of, replace=True)


def _all_ranks_but(number: int) -> int:
    if not isinstance(number, int) or number < 0:
        raise ConfigurationError(f"${{all_ranks_but:{number}}}: must be an integer of at least 0")
    return max(1, _num_ranks() - number)


def _steps_of(run_dir: str | None, otherwise: int) -> object:
    recorded = None if run_dir is None else Path(run_dir, "config.yaml")
    if recorded is None or not recorded.exists():
        return otherwise
    return OmegaConf.select(OmegaConf.load(recorded), "steps", default=otherwise)


def _num_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE") or 1)  # torchrun's


def unknown_key(key: str, valid: DictConfig) -> str:
    """What to say of a key that there is none of; the keys that there are beside it."""
    names = key.split(".")
    for depth in range(len(names) - 1, 0, -1):
        root = ".".join(names[:depth])
        if isinstance(part := OmegaConf.select(valid, root), DictConfig):
            chosen, name = _keys_of(part), names[depth]
            others = () if get_close_matches(name, chosen) else _options_with(name, root)
            return "; ".join([f"unknown key {key}", f"{root} has {', '.join(chosen) or 'no keys'}", *others])
    plain = [str(name) for name in valid if name not in GROUPS]
    lines, groups = [f"unknown key {key}; valid keys: {', '.join(plain)}"], groups_of(valid)
    return "\n".join([*lines, "and groups, with keys of their own:", *groups] if groups else lines)


def _options_with(name: str, group: str) -> Iterator[str]:
    """What is said of each option of a group that has a key of this name, or of one that is nearly this."""
    for option in options_of(group) if group in GROUPS else ():
        option_keys = _keys_of(OmegaConf.load(config_dir() / group / f"{option}.yaml"))
        if similar := get_close_matches(name, option_keys, 1):
            yield f"{group}={option} has {similar[0]}"


def _keys_of(part: DictConfig | ListConfig) -> list[str]:
    return [str(name) for name in part if name != "_target_"]


def groups_of(valid: DictConfig, chosen: Collection[str] = ()) -> list[str]:
    """A line for each group of a configuration, with its options; those in ``chosen``, as ``group/option``, marked."""

    def marked(group: str, between: str) -> str:
        return between.join(option + "*" * (f"{group}/{option}" in chosen) for option in options_of(group))

    groups = [f"  {group}={marked(group, '|')}" for group in GROUPS if group in valid]
    return [*groups, *([f"  {METHODS}=[{marked(METHODS, ',')}]"] if METHODS in valid else [])]


def options_of(group: str) -> list[str]:
    """The names that may be chosen in a group."""
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


def check_choice(group: str, option: str) -> None:
    """Raise `ConfigurationError` unless the group has this option; of `METHODS`, these options."""
    chosen = [name.strip() for name in option.strip("[]").split(",")] if group == METHODS else [option]
    if not set(chosen) <= set(options_of(group)):
        raise ConfigurationError(f"{group}={option}: choose one of {', '.join(options_of(group))}")
