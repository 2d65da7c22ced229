"""Write the report of a run as one HTML file, for which no network is needed.

python -m straggle report runs/latest
python -m straggle report runs/latest steps=0,30 out=report.html
python -m straggle report runs/latest compare=runs/other
python -m straggle report runs/latest --perfetto trace.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from straggle.commands.plain_args import Words, run_command

_KEYS = ("compare", "steps", "out", "perfetto")
_USAGE = """\
python -m straggle report RUN_DIR [key=value ...]
  compare=RUN_DIR   a second run beside it
  steps=0,30        the steps drawn in detail; default: the slowest, a typical one, one with a rank stood in for
  out=FILE          default: RUN_DIR/report.html
  perfetto=FILE     instead of the page, a trace that Perfetto opens; also: --perfetto FILE. FILE.gz is compressed
"""


def arguments(words: Sequence[str]) -> dict[str, Any]:
    """The command line: the arguments of `write_report`, and ``perfetto``; raises ``ValueError`` if it is wrong."""
    given = Words.of(_without_dashes(words), _KEYS)
    folders, keys = given.names, given.keys
    if len(folders) != 1:
        raise ValueError(f"one RUN_DIR is needed, not {len(folders)}; a second one is given as compare=RUN_DIR")
    numbers = [part for part in keys.get("steps", "").strip("[]").split(",") if part.strip()]
    if wrong := [part for part in numbers if not part.strip().isdigit()]:
        raise ValueError(f"steps={keys['steps']}: {wrong[0]!r} is no step; give numbers such as steps=0,30")
    if empty := [key for key in ("compare", "out", "perfetto") if keys.get(key) == ""]:
        raise ValueError(f"{empty[0]}=: a path is needed")
    if others := sorted(keys.keys() - {"perfetto"} if "perfetto" in keys else ()):
        raise ValueError(
            f"perfetto= and {others[0]}=: the trace has one run and all of its steps; leave {others[0]}= out"
        )
    return {
        "run_dir": Path(folders[0]),
        "compare": Path(keys["compare"]) if "compare" in keys else None,
        "steps": [int(part) for part in numbers],
        "path": Path(keys["out"]) if "out" in keys else None,
        "perfetto": Path(keys["perfetto"]) if "perfetto" in keys else None,
    }


def _without_dashes(words: Sequence[str]) -> list[str]:
    """``--perfetto FILE``, as trace tools are called, is ``perfetto=FILE``."""
    own = list(words)
    if "--perfetto" in own:
        at = own.index("--perfetto")
        own[at : at + 2] = [f"perfetto={''.join(own[at + 1 : at + 2])}"]  # without a file it is refused as empty
    return own


def report(words: Sequence[str]) -> int:
    """Write the page, and print where it is."""
    given = arguments(words)
    if trace := given.pop("perfetto"):
        from straggle.observe.perfetto import write_perfetto

        write_perfetto(given["run_dir"], trace)
        sys.stdout.write(f"trace: {trace} ({trace.stat().st_size / 1e6:.1f} MB); open it at https://ui.perfetto.dev\n")
        return 0
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
