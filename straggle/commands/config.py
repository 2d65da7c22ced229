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
    from hydra.errors import HydraException
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

from straggle.commands.config_checks import check
from straggle.commands.config_help import help_of
from straggle.commands.config_keys import (
    GROUPS,
    METHODS,
    ConfigurationError,
    check_choice,
    composed,
    config_dir,
    register_resolvers,
    unknown_key,
)
from straggle.commands.plain_args import run_command
from straggle.commands.run_dir import check_run_dir


def load(name: str, overrides: Sequence[str]) -> DictConfig:
    """The configuration ``name`` with ``overrides`` such as ``steps=10``; raises `ConfigurationError`."""
    register_resolvers()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        if wrong := [override for override in overrides if "=" not in override and not override.startswith("~")]:
            raise ConfigurationError(f"{wrong[0]!r} is no key=value, such as steps=10")
        choices = [override for override in overrides if override.partition("=")[0] in (*GROUPS, METHODS)]
        try:
            valid = composed(name, *choices)
        except (HydraException, OmegaConfBaseException):
            _check_choices(choices, composed(name))
            raise
        try:
            config = compose(name, list(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigurationError(_explain(str(error), valid)) from None
    check(config, valid)
    return config


def _check_choices(choices: Sequence[str], valid: DictConfig) -> None:
    """Raise `ConfigurationError` for the first choice that there is not."""
    for choice in choices:
        if choice.partition("=")[0] not in valid:
            raise ConfigurationError(unknown_key(choice.partition("=")[0], valid))
        check_choice(*choice.split("=", 1))


def _explain(problem: str, valid: DictConfig) -> str:
    """Hydra's complaint in one line; for an unknown key, the valid ones."""
    found = re.match("Could not override '(.*)'", problem)
    return unknown_key(found[1], valid) if found else problem.strip().splitlines()[0]


def run_configured(name: str, work: Callable[[DictConfig], None], usage: str) -> None:
    """The command ``name``: ``work`` with the configuration that the command line asks for, or its help.

    Ends the program with status 2, and a message from rank 0, if the command line is not valid, as `complain_and_exit`
    says, or ``work`` raises `ConfigurationError`. What the program logs goes to its standard output.

    Hydra's own flags, such as ``--multirun`` and ``--cfg job``, and its keys are left to `hydra.main`. Without them the
    configuration that was checked is used: that function composes it twice more, for half a second of each worker.
    """
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        try:
            sys.stdout.write(help_of(name, usage, [word for word in words if not word.startswith("-")]))
        except ConfigurationError as error:
            refuse(error)
        return
    config = complain_and_exit(name, words)

    @wraps(work)  # hydra looks for the module that it is of
    def checked(config: DictConfig) -> None:
        try:
            work(config)
        except ConfigurationError as error:
            refuse(error)

    if config is None or any("hydra" in word for word in words):
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=name)(checked)()
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    checked(config)


def refuse(error: Exception, status: int = 2) -> NoReturn:
    """End the program with this status; rank 0 says why."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{error}\n")
    raise SystemExit(status) from None


def complain_and_exit(name: str, arguments: Sequence[str]) -> DictConfig | None:
    """End the program, with a message from rank 0, if the command line is wrong; ``None`` where flags are for hydra.

    It is also wrong if ``run_dir`` cannot be written, or another run writes into it; rank 0 checks that, unless it was
    started again: then the run that it comes back to may be the one that writes.
    """
    register_resolvers()
    if any(argument.startswith("-") for argument in arguments):
        return None
    try:
        config = load(name, arguments)
        if os.environ.get("RANK", "0") == "0" and config.get("run_dir") and not _started_again():
            check_run_dir(Path(config.run_dir))
    except ValueError as error:
        refuse(error)
    return config


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
