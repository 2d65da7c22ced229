"""Write the report of a run as one HTML file, for which no network is needed.

python -m straggle report runs/latest
python -m straggle report runs/latest steps=0,30 out=report.html
python -m straggle report runs/latest compare=runs/other
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from straggle.commands.plain_args import Words, run_command

_KEYS = ("compare", "steps", "out")
_USAGE = """\
python -m straggle report RUN_DIR [key=value ...]
  compare=RUN_DIR   a second run beside it
  steps=0,30        the steps drawn in detail; default: the slowest, a typical one, one with a rank stood in for
  out=FILE          default: RUN_DIR/report.html
"""


def arguments(words: Sequence[str]) -> dict[str, Any]:
    """The command line, with the names of the arguments of `write_report`; raises ``ValueError`` if it is wrong."""
    given = Words.of(words, _KEYS)
    folders, keys = given.names, given.keys
    if len(folders) != 1:
        raise ValueError(f"one RUN_DIR is needed, not {len(folders)}; a second one is given as compare=RUN_DIR")
    numbers = [part for part in keys.get("steps", "").strip("[]").split(",") if part.strip()]
    if wrong := [part for part in numbers if not part.strip().isdigit()]:
        raise ValueError(f"steps={keys['steps']}: {wrong[0]!r} is no step; give numbers such as steps=0,30")
    if empty := [key for key in ("compare", "out") if keys.get(key) == ""]:
        raise ValueError(f"{empty[0]}=: a path is needed")
    return {
        "run_dir": Path(folders[0]),
        "compare": Path(keys["compare"]) if "compare" in keys else None,
        "steps": [int(part) for part in numbers],
        "path": Path(keys["out"]) if "out" in keys else None,
    }


def report(words: Sequence[str]) -> int:
    """Write the page, and print where it is."""
    given = arguments(words)
    from straggle.observe.findings import drawn
    from straggle.observe.numbers.run_numbers import numbers_of
    from straggle.observe.page.page import FILE, read_runs, write_page  # needs an extra

    runs = read_runs(given["run_dir"], given["compare"])
    path = write_page(runs, given["steps"], given["path"] or given["run_dir"] / FILE)
    sys.stdout.write(f"report: {path} ({path.stat().st_size / 1e6:.1f} MB)\n")
    for run in runs:
        sys.stdout.writelines(f"{run.name}: {sentence}\n" for sentence in drawn(run, numbers_of(run)))
    return 0


def main() -> int:
    """The command; returns its exit status."""
    return run_command(sys.argv[1:], _USAGE, report, extra="report")
