"""The help of a command with a configuration: its groups and keys, on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from straggle.extras import needs_extra

with needs_extra("train"):
    from hydra import initialize_config_dir
    from omegaconf import DictConfig, ListConfig, OmegaConf

from straggle.commands.config_keys import (
    GROUPS,
    METHODS,
    ConfigurationError,
    check_choice,
    composed,
    config_dir,
    groups_of,
    options_of,
    register_resolvers,
    unknown_key,
)


def help_of(name: str, usage: str, words: Sequence[str] = ()) -> str:
    """``usage``, then the groups and the keys with their values, on one screen; or all of one group or key."""
    register_resolvers()
    choices = [word for word in words if word.partition("=")[0] in GROUPS and "=" in word]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        for choice in choices:
            check_choice(*choice.split("=", 1))
        valid = composed(name, *choices)
    if unknown := [word for word in words if word.partition("=")[0] not in valid]:
        raise ConfigurationError(unknown_key(unknown[0], valid))
    parts = [*(choice.partition("=")[0] for choice in choices), *(word for word in words if word in valid)]
    if parts:
        return "".join(OmegaConf.to_yaml({part: valid[part]}) for part in parts)
    lines = [usage.strip(), "", "groups (*: what is chosen now):", *groups_of(valid, chosen=_chosen(name))]
    nested = [str(key) for key in valid if isinstance(valid[key], DictConfig) and key not in (*GROUPS, METHODS)]
    plain_keys = [f"{key!s}={_plainly(valid[key])}" for key in valid if key not in (*GROUPS, METHODS, *nested)]
    lines += ["", "keys:", *wrap(" ".join(plain_keys), 110, initial_indent="  ", subsequent_indent="  ")]
    example = next((group for group in GROUPS if group in valid), "")
    more = ", ".join([example, f"{example}={options_of(example)[0]}", *nested]) if example else ", ".join(nested)
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
