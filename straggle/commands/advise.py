"""Say which ranks are slow, since when and in what, and what each policy would be worth.

python -m straggle advise runs/watch
python -m straggle advise runs/latest/trace.jsonl
python -m straggle advise runs/latest json=true
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from straggle.commands.plain_args import Words, run_command

_USAGE = """\
python -m straggle advise PATH [key=value ...]
  PATH        a run_dir of straggle train or straggle.watch, or a trace.jsonl
  json=true   the same for programs
"""


def arguments(words: Sequence[str]) -> tuple[Path, bool]:
    """The path, and whether the answer is for programs; raises ``ValueError`` if the command line is wrong."""
    given = Words.of(words, ("json",))
    if len(given.names) != 1:
        raise ValueError(f"one PATH is needed, not {len(given.names)}: a run_dir, or a trace.jsonl")
    return Path(given.names[0]), given.flag("json")


def advise(words: Sequence[str]) -> int:
    """Print which ranks are slow, and what to do."""
    path, as_json = arguments(words)
    from straggle.advise.answer import answer  # needs an extra

    found = answer(path)
    sys.stdout.write(f"{found.as_json()}\n" if as_json else str(found))
    return 0


def main() -> int:
    """The command; returns its exit status."""
    return run_command(sys.argv[1:], _USAGE, advise, extra="report")
