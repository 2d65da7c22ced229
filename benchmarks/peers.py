"""The same work under DDP, torchft, local SGD, hivemind and straggle, while something is wrong with one of four ranks.

pip install -e '.[peers]'                                # torchft and hivemind, in an environment of its own
python benchmarks/peers.py                               # three turns, about 20 minutes; a quiet machine
python benchmarks/peers.py --systems DDP straggle --faults nothing slow --turns 1

Layers sleep for their work, 0.2 s a step and rank, so two cores carry four ranks. In each turn every system has one
job, in an order that is drawn; the faults follow each other, each when all ranks are at work. Rank 3 has them: its
layers take twice as long; it sends at most 2 MB/s; it gets SIGSTOP for 8 s; SIGKILL. "ms a step" is the mean of rank 0
in the fault's time (a step that is repeated counts once), "dropped" the share of computed gradients that came into no
parameters, "thrown away" the steps of which nothing was merged or that were repeated, "back" the seconds from the kill,
or from SIGCONT, until all four give gradients again. Medians of the turns, with the least and the most.

Chosen here: torchft's lighthouse has straggle's suspicion time, 2 s, for silence and for joining (torchft's README has
10 s for the latter); its other times are those of its example, gloo's limit 5 s. Local SGD is
torchft's, with a mean every 4 steps, so it survives what its manager does. hivemind's guide asks for large batches: a
mean every 25 steps; its "ms a step" is rank 0's own batches. DDP runs under torchrun, with a checkpoint every 20 steps.
straggle has `AutoDeadline()`, `Elastic()` and one spare.
"""

import argparse
import itertools
import random
import signal
import statistics
import sys
import time

from members_job import Tail
from peers_jobs import SYSTEMS, Failed, missing, send
from peers_ranks import RANKS
from slow_uplink import pace

ONE = RANKS - 1  # the rank that has the fault
SECONDS = {"nothing": 6.0, "slow": 12.0, "slow link": 8.0, "frozen": 11.0, "killed": 10.0}
FROZEN_S, SLOW_BYTES_PER_S = 8.0, 2e6
BACK_S = 60.0  # the longest time that a rank is waited for
COLUMNS = ("ms a step", "longest step, s", "thrown away", "dropped", "back, s")


class Steps:
    """The lines of a job's ranks, as they come."""

    def __init__(self, job):
        self._job, self._tails, self.lines = job, {}, {rank: [] for rank in range(RANKS)}

    def read(self):
        """Take in what is new; those of rank 0, in order of time."""
        for path in self._job.folder.glob("steps.*"):
            rank = int(path.name.split(".")[1])
            self.lines[rank] += self._tails.setdefault(path, Tail(path)).new()
        self.lines[0].sort()
        return self.lines[0]

    def all_at_work(self, since):
        """When rank 0 had its first step since then to which all ranks gave; ``None`` if it has none yet."""
        return next((at for at, *_, giving in self.read() if at > since and giving == RANKS), None)

    def first(self, rank, since):
        """When a rank had its first step since then, in a process that is new; ``None`` if it has none yet."""
        self.read()
        return min((at for at, *_ in self.lines[rank] if at > since), default=None)

    def wait(self, since, limit_s, is_new=False):
        """When all are at work again; ``is_new``: `ONE` in a new process. Raises `Failed`."""
        until = time.time() + limit_s
        while True:
            begun = self.first(ONE, since) if is_new else since
            if begun is not None and (at := self.all_at_work(begun - 0.1 * is_new)) is not None:
                return at
            if time.time() > until or not self._job.running():
                raise Failed(f"not all ranks are at work within {limit_s:g} s")
            time.sleep(0.1)


def numbers_of(lines, begun, ended, back):
    """The columns, from rank 0's lines of a job; ``back`` in seconds, or ``None``."""
    before = [line for line in lines if line[0] <= begun]
    during = [line for line in lines if begun < line[0] <= ended]
    made, repeated, wasted = {line[1] for line in before}, 0, 0
    times, computed, lost = [before[-1][0]], 0.0, 0.0
    for at, step, own, own_lost, _ in during:
        computed += own
        lost += own_lost
        if step in made:
            repeated += 1
            lost += own
        else:
            made.add(step)
            wasted += bool(own) and own_lost == own
            times.append(at)
    useful = len(times) - 1 - wasted
    steps = [late - early for early, late in itertools.pairwise(times)]
    if ended - times[-1] > max(steps, default=0.0):  # a step that still lasts has taken so much already
        times.append(ended)
        steps.append(times[-1] - times[-2])
    return {
        "ms a step": 1000 * (times[-1] - times[0]) / max(useful, 1),
        "longest step, s": max(steps),
        "thrown away": repeated + wasted,
        "dropped": 100 * lost / computed if computed else 0.0,
        **({} if back is None else {"back, s": back}),
    }


def fault_of(job, steps, fault, shorter):
    """Let a job have a fault, and give its numbers."""
    steps.wait(time.time(), BACK_S)
    time.sleep(1.0 * shorter)
    seconds, begun, back_from = SECONDS[fault] * shorter, time.time(), None
    until, marker = begun + seconds, job.folder / f"slow.{ONE}"
    if fault == "slow":
        marker.touch()
    elif fault == "frozen":
        send(job, ONE, signal.SIGSTOP)
    elif fault == "killed":
        send(job, ONE, signal.SIGKILL)
        back_from = begun
    while time.time() < until:
        if fault == "slow link":
            pace(job.pid(ONE), SLOW_BYTES_PER_S)  # again and again: sockets that are new, too
        if fault == "frozen" and back_from is None and time.time() > begun + FROZEN_S * shorter:
            send(job, ONE, signal.SIGCONT)
            back_from = time.time()
        time.sleep(0.1)
    ended = time.time()
    marker.unlink(missing_ok=True)
    if fault == "slow link":
        pace(job.pid(ONE))
    back = None if back_from is None else steps.wait(back_from, BACK_S, fault == "killed") - back_from
    return numbers_of(steps.read(), begun, ended, back)


def turn(system, faults, shorter):
    """What a system's job came to, for each fault: numbers, or why there are none. A new job follows a failure."""
    found, job = {}, None
    try:
        for fault in faults:
            try:
                if job is None:
                    job = SYSTEMS[system]()
                    steps = Steps(job)
                    steps.wait(time.time(), 120.0)
                    time.sleep(2.0 * shorter)
                found[fault] = fault_of(job, steps, fault, shorter)
            except (Failed, OSError) as why:
                found[fault] = str(why)
                if job is not None:
                    print(job.words()[-3000:], file=sys.stderr)
                    job.close()
                if fault == faults[0]:
                    return found | {other: str(why) for other in faults}  # it does not come up
                job = None
            print(f"{system}, {fault}: {found[fault]}", flush=True)
    finally:
        if job is not None:
            job.close()
    return found


def cell(values, column):
    """The median, and the least and the most, as text."""
    digits = {"ms a step": 0, "thrown away": 0, "dropped": 1}.get(column, 2)
    if not values:
        return ""
    middle, least, most = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    unit = " %" if column == "dropped" else ""
    return f"{middle}{unit}" if least == most else f"{middle}{unit} ({least} to {most})"


def table(found, faults, systems):
    """Rows of Markdown; a system that failed in some turns says in how many."""
    yield "| " + " | ".join(("one rank", "system", *COLUMNS)) + " |"
    yield "| --- " * (len(COLUMNS) + 2) + "|"
    for fault in faults:
        for system in systems:
            own = [turns[fault] for turns in found.get(system, []) if fault in turns]
            good = [numbers for numbers in own if isinstance(numbers, dict)]
            cells = [cell([numbers[column] for numbers in good if column in numbers], column) for column in COLUMNS]
            if len(good) < len(own):
                cells[-1] += f" failed in {len(own) - len(good)} of {len(own)}"
            yield "| " + " | ".join((fault, system, *cells)) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--faults", nargs="+", default=list(SECONDS), choices=list(SECONDS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a quarter of each time: for a look at whether it runs")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that jobs are ended, too
    absent = {system: why for system in options.systems if (why := missing(system))}
    for system, why in absent.items():
        print(f"{system}: not measured, {why}")
    systems = [system for system in options.systems if system not in absent]
    found, draw = {system: [] for system in systems}, random.Random(0)
    for _ in range(options.turns):
        for system in draw.sample(systems, len(systems)):
            found[system].append(turn(system, options.faults, 0.25 if options.quick else 1.0))
    print("\n".join(table(found, options.faults, systems)))
    failed = any(isinstance(own, str) for turns in found.values() for numbers in turns for own in numbers.values())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
