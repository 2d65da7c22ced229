"""Run experiments and print what was expected beside what was measured.

python -m experiments E2
python -m experiments E1 E3 quick=true out=runs/experiments
"""

from __future__ import annotations

import json
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

import experiments
from experiments.result import Result
from straggle.commands.plain_args import Words, run_command

_KEYS = ("quick", "out")
_FRAME = ("__main__", "result")
_USAGE = """\
python -m experiments NAME ... [key=value ...]
  quick=true   smaller and sooner, for a first look; its numbers may miss their tolerance
  out=FOLDER   where NAME.json is written; default: runs/experiments
  all          as NAME: every experiment, one after another
"""

Experiment = Callable[[bool], Result]


@dataclass(frozen=True)
class Arguments:
    """The command line: ``names`` are modules of this package."""

    names: tuple[str, ...]
    quick: bool
    out: Path


def names() -> list[str]:
    """The experiments that there are: each module with a ``run(quick)``, private ones and the frame aside."""
    found = [module.name for module in pkgutil.iter_modules(experiments.__path__)]
    return sorted((n for n in found if n not in _FRAME and not n.startswith("_")), key=lambda n: (len(n), n))


def arguments(words: Sequence[str]) -> Arguments:
    """The command line, read; raises ``ValueError`` where it is wrong."""
    given = Words.of(words, _KEYS)
    quick = given.flag("quick")
    wanted = [name.lower().replace("-", "_") for name in given.names]
    wanted = names() if wanted == ["all"] else wanted
    if not wanted:
        raise ValueError(f"give one or more of {', '.join(name.upper() for name in names())}")
    if missing := [name for name in wanted if name not in names()]:
        raise ValueError(f"no experiment {missing[0].upper()}; there are {', '.join(name.upper() for name in names())}")
    return Arguments(tuple(wanted), quick, Path(given.keys.get("out", "runs/experiments")))


def experiment(words: Sequence[str]) -> int:
    """Perform all that are asked for, whatever the first ones say; 1 where something came out other than expected."""
    given = arguments(words)
    given.out.mkdir(parents=True, exist_ok=True)
    results = [perform(name, _experiment(name), quick=given.quick, out=given.out) for name in given.names]
    return int(not all(results))


def main() -> int:
    """The command; gives its exit status."""
    usage = f"{_USAGE}experiments: {', '.join(name.upper() for name in names())}\n"
    return run_command(sys.argv[1:], usage, experiment, extra="train")


def _experiment(name: str) -> Experiment:
    return cast(Experiment, import_module(f"experiments.{name}").run)


def perform(name: str, experiment: Experiment, *, quick: bool, out: Path) -> bool:
    """Run one, print and write what it found; whether all was as expected."""
    result = experiment(quick)
    path = out / f"{name.upper()}.json"
    path.write_text(json.dumps(result.as_dict(), indent=2) + "\n")
    sys.stdout.write(f"{name.upper()}: {result}\n\nfile: {path}\n\n")
    sys.stdout.flush()
    return result.ok


if __name__ == "__main__":
    raise SystemExit(main())
