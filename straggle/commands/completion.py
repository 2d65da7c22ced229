"""A script for bash that completes commands, keys and their choices at a TAB; it starts no Python when it does.

straggle completion bash > ~/.local/share/bash-completion/completions/straggle
source <(straggle completion bash)    # in this shell only
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from straggle.commands.plain_args import Words, run_command
from straggle.commands.words import COMMANDS

_USAGE = """\
straggle completion bash
  prints a script that completes commands, keys and their choices
  straggle completion bash > ~/.local/share/bash-completion/completions/straggle    for each new shell
  source <(straggle completion bash)                                                for this one
"""
# Readline replaces only what stands after the last "=", where that breaks words; a key has one.
_SCRIPT = """\
_straggle() {
  local line=${COMP_LINE:0:COMP_POINT}
  local word=${line##*[[:space:]]} choices=
  local -a given
  read -ra given <<<"$line"
  [ -n "$word" ] || given+=("")
  if [ "${#given[@]}" -le 2 ]; then
    choices="%(commands)s"
  else
    case ${given[1]} in
%(cases)s
    esac
  fi
  COMPREPLY=($(compgen -W "$choices" -- "$word"))
  [ "${#COMPREPLY[@]}" = 1 ] && [ "${COMPREPLY[0]: -1}" = = ] && compopt -o nospace
  case $word in
    *=*) case $COMP_WORDBREAKS in *=*) COMPREPLY=("${COMPREPLY[@]#*=}") ;; esac ;;
  esac
}
complete -o default -F _straggle straggle
"""


def script(choices: Mapping[str, Collection[str]]) -> str:
    """What bash sources; ``choices``: of each command the words that may follow. Where none fits, it offers files."""
    cases = [f'      {name}) choices="{" ".join(sorted(words))}" ;;' for name, words in choices.items() if words]
    return _SCRIPT % {"commands": " ".join(choices), "cases": "\n".join(cases)}


def keys_of(folder: Path, name: str) -> set[str]:
    """``key=`` and ``key=choice`` of the configuration ``name`` in ``folder``, with those of its groups' options."""
    from omegaconf import DictConfig, OmegaConf

    file = OmegaConf.load(folder / f"{name}.yaml")
    assert isinstance(file, DictConfig)
    read = OmegaConf.to_container(file)
    assert isinstance(read, dict)
    found: set[str] = set()
    for default in read.pop("defaults", []):
        if isinstance(default, dict):
            for group, chosen in default.items():
                words = str(group).removeprefix("override ")
                found |= {f"{words}="} if isinstance(chosen, list) else _options(folder, words)
        elif default != "_self_":
            found |= keys_of(folder, default)
    read.pop("hydra", None)
    return found | set(_flat(read))


def _options(folder: Path, group: str) -> set[str]:
    """``group=option`` of each file of a group, and the keys that the options have."""
    files = sorted((folder / group).glob("*.yaml"))
    inside = {f"{group}.{key}" for file in files for key in keys_of(file.parent, file.stem)}
    return inside | {f"{group}={file.stem}" for file in files}


def _flat(read: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    for key, value in read.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, bool):
            yield from (f"{prefix}{key}=true", f"{prefix}{key}=false")
        elif not str(key).startswith("_"):  # not _target_
            yield f"{prefix}{key}="


def _choices() -> dict[str, set[str]]:
    from straggle.commands.config_keys import config_dir
    from straggle.commands.launching.options import parser

    choices: dict[str, set[str]] = {name: set() for name in COMMANDS}
    for name in choices:
        if (config_dir() / f"{name}.yaml").exists():
            choices[name] = keys_of(config_dir(), name)
    options = re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", parser().format_help(), re.MULTILINE)
    choices["launch"] = {"--store-only", *options}
    return choices


def completion(words: Sequence[str]) -> int:
    """Print the script."""
    if (names := Words.of(words, ()).names) != ("bash",):
        raise ValueError(f"{' '.join(names)}: there is a script for bash")
    sys.stdout.write(script(_choices()))
    return 0


def main() -> int:
    """The command; returns its exit status."""
    return run_command(sys.argv[1:], _USAGE, completion, extra="train")
