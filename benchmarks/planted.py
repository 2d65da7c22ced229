"""Do drawn schedules of the simulated world find faults? The share of planted ones that so many schedules find.

python benchmarks/planted.py                          # each of the faults in 1,000 schedules
python benchmarks/planted.py schedules=100 minutes=5  # at most so long for each fault
python benchmarks/planted.py only=old-decision,view-overwritten
python benchmarks/planted.py good=8,10,5              # seeds that have found a fault in another run

Each fault (`planted_faults.py`) is put into a copy of the package, by which `tests/support/schedules.py` runs
schedules until one fails: first those that have found a fault before it here, the most often first, then, of a kind
that goes through its file (with members for `members/`, with a pool for `pools/`), those that are written by hand
(`tests/support/directed.py`, negative numbers), and drawn ones. First there is no fault: no
schedule may fail then, and one that fails with a fault is run without it: if it fails, too, it counts as none. A fault
whose schedule does not come to its end in this machine's time is found, too, as a hang;
one that ends the program in another way is not. What is not found says which property, or which kind of fault, the
schedules lack.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest  # noqa: F401  # what schedules import is loaded by this process alone, which forks one for each fault
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401
from planted_faults import FAULTS

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("straggle", "tests/support")
USUAL = {"schedules": "1000", "minutes": "60", "only": "", "good": ""}
MORE_S = 300.0  # for a schedule that was begun in time: the world itself ends one that hangs outside of it before that
FAILED = re.compile(r"^seed (-?\d+): (.*)$", re.MULTILINE)
RUN = re.compile(r"^(\d+) schedules from seed", re.MULTILINE)
SAID = 60  # characters of what failed
KINDS = {"members/": "members", "pools/": "pool", "loop/uneven": "join"}


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
        shutil.copytree(ROOT / name, folder / name, copy_function=link)  # with what is compiled
    if fault is not None:
        path = fault.place(folder / "straggle")
        text = fault.into(path.read_text())
        path.unlink()  # first: it is a link to the package's own file
        path.write_text(text)


def link(old, new):
    """The same file, or a copy of it on another disk, with its time: what is compiled is newer."""
    try:
        os.link(old, new)
    except OSError:
        shutil.copy2(old, new)


def try_out(fault, words, minutes):
    """What comes of the schedules that these words say, or of as many as are run in this time."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder = Path(name)
        copy_with(fault, folder)
        with (folder / "said").open("w") as said:
            process = os.fork() or run_forked(folder, [*words, f"minutes={minutes}", "most=1"], said.fileno())
        status = status_of(process, began + 60 * minutes + MORE_S)
        text = (folder / "said").read_text()
    seconds = time.monotonic() - began
    return Outcome(None, "?", "hang", seconds) if status is None else outcome_of(status, text, seconds)


def run_forked(folder, words, output):
    """Run the schedules in this process, which was forked, with the package in ``folder``; never returns."""
    status = 2
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        sys.path[:0] = [str(folder), str(folder / "tests" / "support")]
        import schedules

        status = schedules.main(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def status_of(process, until):
    """The exit status of this process; ``None`` if it was not over by then, and was killed."""
    while time.monotonic() < until:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def find(fault, schedules, minutes, good, bad):
    """What comes of so many schedules; one that fails without the fault, too, is added to ``bad`` and left out."""
    kinds = [f"kind={kind}" for part, kind in KINDS.items() if fault.file.startswith(part)]
    first, began, tried = 1, time.monotonic(), 0
    these = [seed for seed, _ in good.most_common(schedules)]
    while (left := minutes - (time.monotonic() - began) / 60) > 0 and tried < schedules:
        words = [f"seeds={schedules - tried}", f"first={first}", *["directed=yes"] * (not tried), *kinds]
        outcome = try_out(fault, words + [f"these={','.join(map(str, these))}"] * bool(these), left)
        tried += int(outcome.after or 0) if outcome.seed is not None else schedules
        if outcome.seed is None or not try_out(None, [f"these={outcome.seed}", "seeds=1"], minutes).found:
            return replace(outcome, after=outcome.after and str(tried), seconds=time.monotonic() - began)
        bad.add(outcome.seed)  # none of those that are written by hand: they pass without a fault
        if outcome.seed in these and outcome.seed > 0:
            these = these[these.index(outcome.seed) + 1 :]
        else:
            these, first = [], outcome.seed + 1
    return Outcome(None, "", "the schedules that failed do without it, too", time.monotonic() - began)


def outcome_of(status, text, seconds):
    """By what the schedules have written, and the status."""
    if status == 1 and (failed := FAILED.search(text)):
        number = RUN.search(text)
        return Outcome(int(failed[1]), number[1] if number else "1", failed[2], seconds)
    said = (text.strip().splitlines() or ["nothing was said"])[-1]
    if status:
        return Outcome(None, "", f"status {status}: {said}", seconds)
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
    return [fault for name in names for fault in FAULTS if fault.name == name] if names else FAULTS


def main(words):
    given = dict(word.partition("=")[::2] for word in words)
    if unknown := given.keys() - USUAL.keys():
        sys.exit(f"{', '.join(sorted(unknown))}: there are {', '.join(USUAL)}")
    options = {**USUAL, **given}
    faults, good, bad = chosen(options["only"]), Counter(map(int, filter(None, options["good"].split(",")))), set()
    schedules, minutes = int(options["schedules"]), float(options["minutes"])
    without = try_out(None, [f"seeds={schedules}", "first=1"], minutes)
    if without.found or not without.what.endswith(" 0 failed"):
        sys.exit(f"without any fault: {without.what} (seed {without.seed})")
    print(f"without any fault: {without.what}\n", flush=True)
    print("| fault | file | found after schedules | seed | what failed | seconds |", flush=True)
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    number = 0
    for fault in faults:
        outcome = find(fault, schedules, minutes, good, bad)
        number += outcome.found
        good.update([outcome.seed] * (outcome.seed is not None))
        print(row(fault, outcome), flush=True)
    print(f"\n{number} of {len(faults)} found: {number / len(faults):.0%}")


if __name__ == "__main__":
    main(sys.argv[1:])
