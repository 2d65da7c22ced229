"""The configuration of a command: loaded from its command line, or refused in words that list what is valid.

python -m straggle check train steps=10 deadline=fixed     # exit status 2 and a message if something is wrong
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import NoReturn

from straggle.extras import needs_extra

with needs_extra("train"):
    import hydra
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from straggle.commands.configuration.checks import check
from straggle.commands.configuration.schema import (
    COMMANDS,
    OF_METHOD,
    ConfigurationError,
    config_dir,
    option,
    options_of,
    register,
    unknown_key,
    usual_values,
)
from straggle.commands.plain_args import run_command
from straggle.commands.saved.run_dir import check_run_dir

# of `hydra --hydra-help`
_HYDRAS_FLAGS = re.compile(
    "-h|--help|--hydra-help|--version|-c|--cfg|--resolve|-p|--package|-r|--run|-m|--multirun|-sc|--shell-completion|"
    "-cp|--config-path|-cn|--config-name|-cd|--config-dir|--experimental-rerun|-i|--info"
)


def load(name: str, overrides: Sequence[str]) -> DictConfig:
    """The configuration ``name`` with ``overrides`` such as ``steps=10``; raises `ConfigurationError`."""
    if unknown := [own for own in overrides if own.startswith("-")]:
        raise ConfigurationError(_unknown_option(unknown[0]))
    if wrong := [own for own in overrides if not re.match(r"~|[^=]+=(?!=)", own)]:
        raise ConfigurationError(f"{wrong[0]!r} is no key=value, such as steps=10")
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        try:
            config = compose(name, list(overrides))
            check(name, config)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigurationError(_explained(error, name, overrides)) from None
    return config


def _explained(error: Exception, name: str, overrides: Sequence[str]) -> str:
    """The complaint of hydra or OmegaConf in one line, with the key; of an unknown key or option, the valid ones."""
    if isinstance(error, MissingConfigException):
        group, _, wanted = str(error.missing_cfg_file).partition("/")
        return f"{group}={wanted}: choose one of {', '.join(options_of(group))}"
    cause = error.__cause__ or error
    key = getattr(cause, "full_key", None)
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) or "Could not override" in str(error):
        found = re.match("Could not override '(.*?)'", str(error))
        return _unknown_key(found[1] if found else str(key), name, overrides)
    return f"{key}: {str(cause).splitlines()[0]}" if key else " ".join(str(error).split())


def _unknown_key(key: str, name: str, overrides: Sequence[str]) -> str:
    """The message for a key that does not exist: the keys beside it, with the options that were chosen."""
    default = compose(name)
    groups = [group.name for group in config_dir().iterdir() if group.is_dir() and group.name in default]
    chosen = compose(name, [override for override in overrides if override.partition("=")[0] in groups])
    parent, last = key, key.rpartition(".")[2]
    while parent := parent.rpartition(".")[0]:
        if isinstance(part := OmegaConf.select(chosen, parent), DictConfig):
            others = [f"; {parent}={name} has {last}" for name in options_of(parent) if last in option(parent, name)]
            keys = OF_METHOD if parent.startswith("methods.") else [str(own) for own in part if own != "_target_"]
            return f"unknown key {key}; {parent} has {', '.join(keys) or 'no keys'}{''.join(others)}"
    return str(unknown_key(key, usual_values(name)))


def run_configured(name: str, work: Callable[[DictConfig], None], usage: str) -> None:
    """The command ``name``: ``work`` with the configuration that the command line asks for.

    Ends the program with status 2, and a message from rank 0, if the command line is not valid, as `complain_and_exit`
    says, or ``work`` raises `ConfigurationError`. What the program logs goes to its standard output.

    Hydra's own flags, such as ``--help``, ``--multirun`` and ``--cfg job``, and its keys are left to `hydra.main`.
    """
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        sys.stdout.write(f"{usage.strip()}\n\n")

    if (unknown := _unknown_flag(words)) is not None:
        refuse(ConfigurationError(_unknown_option(unknown)))
    by_hydra = any(word.startswith("-") or "hydra" in word for word in words)

    @wraps(work)  # hydra looks for the module that it is of
    def checked(config: DictConfig) -> None:
        try:
            if by_hydra:
                check(name, config)
            work(config)
        except ConfigurationError as error:
            refuse(error)

    if by_hydra:
        register()
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=name)(checked)()
        return
    config = complain_and_exit(name, words)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    checked(config)


def _unknown_option(word: str) -> str:
    return f"unknown option {word}; keys are written without dashes, such as steps=10"


def _unknown_flag(words: Sequence[str]) -> str | None:
    """The first word with dashes that is none of Hydra's flags."""
    dashed = (word for word in words if word.startswith("-"))
    return next((word for word in dashed if not _HYDRAS_FLAGS.fullmatch(word.partition("=")[0])), None)


def refuse(error: Exception, status: int = 2) -> NoReturn:
    """End the program with this status; rank 0 reports why."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{error}\n")
    raise SystemExit(status) from None


def complain_and_exit(name: str, arguments: Sequence[str]) -> DictConfig:
    """Load the configuration; if the command line is wrong, end the program with a message from rank 0.

    It is also wrong if ``run_dir`` cannot be written, or another run writes into it; rank 0 checks that. The run that
    writes may be the one that a member comes back to, whose other ranks share the folder.
    """
    try:
        config = load(name, arguments)
        if os.environ.get("RANK", "0") == "0" and config.get("run_dir"):
            check_run_dir(Path(config.run_dir), comes_back=_may_come_back(config))
    except ValueError as error:
        refuse(error)
    return config


def _may_come_back(config: DictConfig) -> bool:
    """Whether others may train already in the job that `straggle launch` starts this worker for.

    The number of its starts does not tell: a store that was lost with this machine has forgotten it.
    """
    return "STRAGGLE_ELASTIC" in os.environ and bool(config.get("members"))


def _check_command(words: Sequence[str]) -> int:
    if words[0] not in COMMANDS:
        raise ValueError(f"no command {words[0]} with a configuration: choose one of {', '.join(sorted(COMMANDS))}")
    complain_and_exit(words[0], words[1:])
    return 0


def main() -> int:
    """The command ``check``; returns its exit status."""
    return run_command(
        sys.argv[1:], "python -m straggle check COMMAND [key=value ...]\n", _check_command, extra="train"
    )
