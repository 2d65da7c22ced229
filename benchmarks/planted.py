"""Do drawn schedules of the simulated world find faults? The share of planted ones that so many schedules find.

python benchmarks/planted.py                          # each of the faults in 1,000 schedules
python benchmarks/planted.py schedules=100 minutes=5  # at most so long for each fault
python benchmarks/planted.py only=old-decision,view-overwritten
python benchmarks/planted.py jobs=1                   # faults at a time; two by default

Each fault (`planted_faults.py`) is put into a copy of the package, by which `tests/support/schedules.py` runs the
schedules 1, 2, ... until one fails. First there is no fault: no schedule may fail then. A fault whose schedule does not
come to its end in this machine's time is found, too, as a hang; one that ends the program in another way is not. What
is not found says which property, or which kind of fault, the schedules lack.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from planted_faults import FAULTS

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("straggle", "tests/support")
USUAL = {"schedules": "1000", "minutes": "60", "only": "", "jobs": "2"}
MORE_S = 300.0  # for a schedule that was begun in time: the world itself ends one that hangs outside of it before that
FAILED = re.compile(r"^seed (\d+): (.*)$", re.MULTILINE)
SAID = 60  # characters of what failed


@dataclass(frozen=True)
class Outcome:
    """Whether a schedule has failed, after how many, and in which words."""

    found: bool
    after: str
    what: str
    seconds: float


def copy_with(fault, folder):
    """The package in this folder, with the fault in it, if there is one."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    if fault is not None:
        path = folder / "straggle" / fault.file
        path.write_text(fault.into(path.read_text()))


def try_out(fault, schedules, minutes):
    """What comes of so many schedules, or as many as are run in this time."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder = Path(name)
        copy_with(fault, folder)
        words = [f"seeds={schedules}", f"minutes={minutes}", "first=1", "most=1"]
        try:
            done = subprocess.run(
                [sys.executable, "tests/support/schedules.py", *words],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=60 * minutes + MORE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(True, "", "hang", time.monotonic() - began)
    return outcome_of(done, time.monotonic() - began)


def outcome_of(done, seconds):
    """By what the schedules have written, and the status."""
    if done.returncode == 1 and (failed := FAILED.search(done.stdout)):
        return Outcome(True, failed[1], failed[2], seconds)
    if done.returncode:
        error = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return Outcome(False, "", f"status {done.returncode}: {error}", seconds)
    said = (done.stdout.strip().splitlines() or [""])[-1]
    return Outcome(False, "", said.partition(";")[0], seconds)


def row(fault, outcome):
    """A line of the table."""
    what = outcome.what[:SAID].replace("|", "/")
    after = (outcome.after or "?") if outcome.found else "not found"
    return f"| {fault.name} | `{fault.file}` | {after} | {what} | {outcome.seconds:.0f} |"


def chosen(only):
    """The faults with these names, or all."""
    names = [name for name in only.split(",") if name]
    if unknown := set(names) - {fault.name for fault in FAULTS}:
        sys.exit(f"only={','.join(sorted(unknown))}: no such fault; there are {', '.join(own.name for own in FAULTS)}")
    return [fault for fault in FAULTS if not names or fault.name in names]


def main(words):
    given = dict(word.partition("=")[::2] for word in words)
    if unknown := given.keys() - USUAL.keys():
        sys.exit(f"{', '.join(sorted(unknown))}: there are {', '.join(USUAL)}")
    options = {**USUAL, **given}
    faults = chosen(options["only"])
    attempt = partial(try_out, schedules=int(options["schedules"]), minutes=float(options["minutes"]))
    without = attempt(None)
    if without.found or not without.what.endswith(" 0 failed"):
        sys.exit(f"without any fault: {without.what} (seed {without.after})")
    print(f"without any fault: {without.what}\n", flush=True)
    print(
        "| fault | file | found after schedules | what failed | seconds |\n| --- | --- | --- | --- | --- |", flush=True
    )
    number = 0
    with ThreadPoolExecutor(int(options["jobs"])) as pool:
        for fault, outcome in zip(faults, pool.map(attempt, faults), strict=True):
            number += outcome.found
            print(row(fault, outcome), flush=True)
    print(f"\n{number} of {len(faults)} found: {number / len(faults):.0%}")


if __name__ == "__main__":
    main(sys.argv[1:])
