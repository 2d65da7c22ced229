"""Do drawn schedules of the simulated world find faults? The share of planted ones that so many schedules find.

python benchmarks/planted.py                          # each of the faults in 1,000 schedules
python benchmarks/planted.py schedules=100 minutes=5  # at most so long for each fault
python benchmarks/planted.py only=old-decision,view-overwritten

Each fault (`planted_faults.py`) is put into a copy of the package, by which `tests/support/schedules.py` runs
schedules until one fails: first those that have found a fault before it here, the most often first, then drawn ones of
a kind that goes through its file (with members for `members/`, with a pool for `pools/`). First there is no fault: no
schedule may fail then, and one that fails with a fault is run without it: if it fails, too, it counts as none. A fault
whose schedule does not come to its end in this machine's time is found, too, as a hang;
one that ends the program in another way is not. What is not found says which property, or which kind of fault, the
schedules lack.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from planted_faults import FAULTS

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("straggle", "tests/support")
USUAL = {"schedules": "1000", "minutes": "60", "only": ""}
MORE_S = 300.0  # for a schedule that was begun in time: the world itself ends one that hangs outside of it before that
FAILED = re.compile(r"^seed (\d+): (.*)$", re.MULTILINE)
RUN = re.compile(r"^(\d+) schedules from seed", re.MULTILINE)
SAID = 60  # characters of what failed
KINDS: dict[str, Callable] = {
    "members/": lambda schedule: schedule.members and schedule.faults,
    "pools/": lambda schedule: schedule.num_parts,
    "loop/uneven": lambda schedule: schedule.joins,
}


@dataclass(frozen=True)
class Outcome:
    """Whether a schedule has failed: its seed, after how many, and in which words."""

    seed: int | None
    after: str
    what: str
    seconds: float

    @property
    def found(self):
        return bool(self.after)


def copy_with(fault, folder):
    """The package in this folder, with the fault in it, if there is one."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    if fault is not None:
        path = fault.place(folder / "straggle")
        path.write_text(fault.into(path.read_text()))


def seeds_for(fault, number, good):
    """The seeds to try: ``good`` ones, by how often they have found a fault, and drawn ones of its kind."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from schedules import draw

    kinds = [kind for part, kind in KINDS.items() if fault is not None and fault.file.startswith(part)]
    first = [seed for seed, _ in good.most_common(number)]
    drawn = (seed for seed in count(1) if seed not in good and all(kind(draw(seed)) for kind in kinds))
    return first + list(islice(drawn, number - len(first)))


def try_out(fault, seeds, minutes):
    """What comes of these schedules, or as many as are run in this time."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder = Path(name)
        copy_with(fault, folder)
        words = [f"these={','.join(map(str, seeds))}", f"minutes={minutes}", "most=1"]
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
            return Outcome(None, "?", "hang", time.monotonic() - began)
    return outcome_of(done, time.monotonic() - began)


def find(fault, seeds, minutes, bad):
    """What comes of these schedules; one that fails without the fault, too, is added to ``bad`` and left out."""
    began, outcome = time.monotonic(), try_out(fault, seeds, minutes)
    while outcome.seed is not None and try_out(None, [outcome.seed], minutes).found:
        bad.add(outcome.seed)
        seeds = seeds[seeds.index(outcome.seed) + 1 :]
        left = minutes - (time.monotonic() - began) / 60
        if not seeds or left <= 0:
            return Outcome(None, "", "the schedules that failed do without it, too", outcome.seconds)
        outcome = try_out(fault, seeds, left)
    return outcome


def outcome_of(done, seconds):
    """By what the schedules have written, and the status."""
    if done.returncode == 1 and (failed := FAILED.search(done.stdout)):
        number = RUN.search(done.stdout)
        return Outcome(int(failed[1]), number[1] if number else "?", failed[2], seconds)
    if done.returncode:
        error = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return Outcome(None, "", f"status {done.returncode}: {error}", seconds)
    said = (done.stdout.strip().splitlines() or [""])[-1]
    return Outcome(None, "", said.partition(";")[0], seconds)


def row(fault, outcome):
    """A line of the table."""
    what = outcome.what[:SAID].replace("|", "/")
    after = outcome.after or "not found"
    return f"| {fault.name} | `{fault.file}` | {after} | {outcome.seed or ''} | {what} | {outcome.seconds:.0f} |"


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
    faults, good, bad = chosen(options["only"]), Counter(), set()
    schedules, minutes = int(options["schedules"]), float(options["minutes"])
    without = try_out(None, seeds_for(None, schedules, good), minutes)
    if without.found or not without.what.endswith(" 0 failed"):
        sys.exit(f"without any fault: {without.what} (seed {without.seed})")
    print(f"without any fault: {without.what}\n", flush=True)
    print("| fault | file | found after schedules | seed | what failed | seconds |", flush=True)
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    number = 0
    for fault in faults:
        outcome = find(fault, [seed for seed in seeds_for(fault, schedules, good) if seed not in bad], minutes, bad)
        number += outcome.found
        good.update([outcome.seed] * (outcome.seed is not None))
        print(row(fault, outcome), flush=True)
    print(f"\n{number} of {len(faults)} found: {number / len(faults):.0%}")


if __name__ == "__main__":
    main(sys.argv[1:])
