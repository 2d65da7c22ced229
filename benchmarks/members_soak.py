"""Training with a fault every few seconds, for as long as one likes; see `members.py`.

The controller sends signals: SIGKILL, SIGSTOP, and SIGUSR1, on which a rank raises in its step what the file
``order.RANK`` says. Stalls, NaN and pauses are each rank's own, by chance (`members_soak_rank.py`). Rank 1 is never
killed and its code never ends its process, so that what one process holds can be compared over the run. It is looked at
in breaks: for as long as a rank is frozen, its peers hold their old groups with it. Logs are rotated as logrotate's
copytruncate does it. If a Prometheus is installed, it scrapes all ranks, with our rules and alerts.
"""

import collections
import itertools
import os
import random
import re
import shutil
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from members_job import Job, Tail
from members_soak_rank import CHECK_EVERY, SUSPECT_S
from scraped import Scraped

SURVIVOR = 1
KINDS = ["kill"] * 2 + ["stop"] * 3 + ["exit"] + ["error"] * 4  # of each ten faults
LASTING = ("stop", "error")  # what the survivor may be hit by
PROGRESS_S = 60.0  # without a step it hangs; the first may take longer
START_S = 240.0
END_AHEAD = 150  # steps between saying where the end is and the end
BOUND_S = 2 * SUSPECT_S + 2.0  # of a step of a rank that nothing is wrong with: two silent peers, one after another
AFTER_S = 10.0  # a rank that was hit heals, and its steps are no peer's
ROTATE_S, ROTATE_BYTES = 5.0, 20_000
LONG = 5.0  # minutes
BREAKS = (0.1, 0.3, 0.5, 0.7)  # shares of a long run; a shorter one has the first, and each run has one at its end
QUIET_S, QUIET_LOOKS = 2.0, 10  # all ranks take part, and the members have not changed for so long
HELD = ("threads", "descriptors", "MB")
MORE = (2, 5, 0.03)  # at most; memory in proportion
MORE_AT_FIRST = 0.10  # of memory in a run that is not long: an allocator still grows
FILES = 25  # of a rank, at most: the logs of its last 20 starts, and what says where it is


@dataclass
class Seen:
    """What the ranks have written."""

    step: int = 0
    at: float = field(default_factory=time.time)  # of the last step of any rank
    up: dict = field(default_factory=dict)  # when each rank's last process was ready
    taking_part: dict = field(default_factory=dict)  # when each rank last said that it is a member
    hashes: dict = field(default_factory=lambda: collections.defaultdict(dict))
    done: dict = field(default_factory=dict)
    generation: int = 0
    changed_at: float = 0.0  # when the members changed last
    left: dict = field(default_factory=lambda: collections.defaultdict(list))  # by rank: when, as each member saw it
    problems: list = field(default_factory=list)
    longest: list = field(default_factory=list)  # (seconds, when, rank) of each ten steps, if they have one

    def take(self, rank, start, at, what, *values):
        """One line."""
        if what == "up":
            self.up[rank] = at
        elif what == "members":
            self.generation, self.changed_at = max(self.generation, values[0]), max(self.changed_at, at)
            for other, why in values[1].items():
                if why != "ended":
                    self.left[other].append(at)
        elif what == "hash":
            step, digested, finite, self.done[rank, start] = values
            self.hashes[step][rank] = digested
            if not finite:
                self.problems.append(f"rank {rank} has parameters that are not finite at step {step}")
        elif what == "different":
            self.problems.append(f"rank {rank}: the parameters of ranks {values[1]} differ in step {values[0]}")
        else:
            step, absent, longest = values
            self.longest.append((longest, at, rank))
            if step > self.step:
                self.step, self.at = step, time.time()
            if not absent:
                self.taking_part[rank] = at

    def num_put_out(self):
        """Faults after which the members went on without the rank: reports of one leaving lie close together."""
        by_rank = [[0.0, *sorted(own)] for own in self.left.values()]
        return sum(after - before > 0.75 for own in by_rank for before, after in itertools.pairwise(own))


class Soak:
    """Injects faults, and looks at what becomes of them."""

    def __init__(self, given):
        self.minutes, self.ranks, self.changes = given.minutes, given.ranks, round(given.changes * given.minutes)
        script = str(Path(__file__).with_name("members.py"))
        words = ["soak-rank", "--variant", given.variant, "--pace-s", str(given.pace_s)]
        self.job = Job(self.ranks, script, *words, preload=given.preload)
        self.scraped = Scraped(self.job.folder)
        self.seen, self.chance = Seen(), random.Random(given.seed)
        self.faults = collections.Counter()
        self.ended_by_us = self.num_rotated = 0
        self.unexplained = []
        self.held = {"rank 1": [], "launcher": []}  # in each break: threads, descriptors, RSS in MB
        self.hits = []  # (when, until when its steps are nobody's measure, rank)
        self._deck = []
        self._looks = []
        self._tails = {}
        self._faulty = {}  # rank: (when it was hit, until when it is left alone, whether it is started again)
        self._wakes = []
        self._began = self._rotated_at = time.time()

    def run(self):
        """Until the end, or until it hangs; True: the job's status is 0."""
        due = [0.02 + 0.95 * number / self.changes for number in range(int(1.25 * self.changes))]
        breaks = list(BREAKS if self.minutes >= LONG else BREAKS[:1])
        end_said = False
        while self.job.process.poll() is None:
            self._read()
            self._wake_stopped()
            self._rotate()
            if breaks and self.share() >= breaks[0]:
                breaks = breaks[self._look() :]
            elif self.share() >= 1.0 and self.seen.num_put_out() >= self.changes:
                if not end_said and self._look():
                    end_said = True
                    self.job.end_at(self.seen.step + END_AHEAD)
            elif self.seen.step and (not due or self.share() >= due[0]) and self._hit():
                due = due[1:]
            if time.time() - self.seen.at > (PROGRESS_S if self.seen.step else START_S):
                self._hangs()
                break
            time.sleep(0.05)
        self._read()
        return self.job.wait(30) == 0

    def share(self):
        """Of the time that it is to take, which begins with the first steps."""
        if not self.seen.step:
            self._began = time.time()
        return (time.time() - self._began) / (60 * self.minutes)

    def _read(self):
        for rank in range(self.ranks):
            for start in (self.job.starts(rank) - 1, self.job.starts(rank)):
                tail = self._tails.setdefault((rank, start), Tail(self.job.folder / f"steps.{rank}.{start}"))
                for line in tail.new():
                    self.seen.take(rank, start, *line)

    def _hit(self):
        """One fault on a rank that takes part; false while others are away."""
        # a process needs seconds to be started again, so the others are hit meanwhile, and now and then killed
        now, free = time.time(), self._free()
        may_end = len(free) >= self.ranks - int(self.chance.random() < 0.05)
        self._deck = self._deck or self.chance.sample(KINDS, len(KINDS))
        kind = next((kind for kind in self._deck if may_end or kind in LASTING), None)
        if kind is None or len(free) < self.ranks - 1:
            return False
        rank = self.chance.choice([rank for rank in free if rank != SURVIVOR or kind in LASTING])
        seconds = self.chance.uniform(0.3, 3.0) if kind == "stop" else 0.0
        if kind in ("exit", "error"):
            place = kind if kind == "exit" else self.chance.choice(["data", "forward", "end"])
            (self.job.folder / f"order.{rank}").write_text(place)
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(kind, signal.SIGUSR1)
        if not self.job.signal(rank, number):
            return False
        self._deck.remove(kind)
        if kind == "stop":
            self._wakes.append((now + seconds, rank))
        self.ended_by_us += kind in ("kill", "exit")
        self.faults[kind if kind != "stop" or seconds < SUSPECT_S else "long stop"] += 1
        self.hits.append((now, now + seconds + AFTER_S, rank))
        self._faulty[rank] = now, now + seconds + (2.5 if kind == "error" else 0.5), kind in ("kill", "exit")
        return True

    def _free(self):
        """Ranks that take part, and have done so since they were hit last."""
        now = time.time()
        for rank, (at, until, anew) in list(self._faulty.items()):
            up = self.seen.up.get(rank, 0)
            if now > until and self.seen.taking_part.get(rank, 0) > max(at, up) and (up > at or not anew):
                del self._faulty[rank]
        return [rank for rank in range(self.ranks) if rank not in self._faulty and rank in self.seen.taking_part]

    def _wake_stopped(self):
        now = time.time()
        for at, rank in [own for own in self._wakes if own[0] <= now]:
            self._wakes.remove((at, rank))
            self.job.signal(rank, signal.SIGCONT)

    def _rotate(self):
        """What logrotate's copytruncate does: the file stays the process's own, and is empty again."""
        if time.time() - self._rotated_at < ROTATE_S:
            return
        self._rotated_at = time.time()
        for path in (self.job.folder / "logs").rglob("*.log"):
            if path.stat().st_size > ROTATE_BYTES:
                self.unexplained += unexplained(path.name, path.read_text())
                os.truncate(path, 0)
                self.num_rotated += 1

    def _look(self):
        """In a break: note the least that each process holds while all is quiet; whether that is done."""
        if len(self._free()) < self.ranks or time.time() - self.seen.changed_at < QUIET_S:
            self._looks = []
            return False
        self._looks.append([holds(self.job.pid(SURVIVOR)), holds(self.job.process.pid)])
        if len({threads for (threads, *_), _ in self._looks}) > 1:  # a change that no rank has reported yet
            self._looks = []
        if len(self._looks) < QUIET_LOOKS:
            return False
        for samples, looks in zip(self.held.values(), zip(*self._looks, strict=True), strict=True):
            samples.append([min(values) for values in zip(*looks, strict=True)])
        self._looks = []
        return True

    def _hangs(self):
        self.seen.problems.append(f"it hangs: no step for {PROGRESS_S:g} s after step {self.seen.step}")
        for rank in range(self.ranks):
            self.job.signal(rank, signal.SIGCONT)
            self.job.signal(rank, signal.SIGUSR2)
        time.sleep(2.0)
        for name, text in list(self.job.logs().items()):
            if "Thread 0x" in text or "most recent call first" in text:
                print(f"--- {name}\n{text[-6000:]}", file=sys.stderr)

    def close(self):
        """End what still runs."""
        self.job.stop()
        self.scraped.close()
        self.job.close()


def holds(pid):
    """Threads, descriptors, and memory in MB of a process."""
    words = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(words["Threads"]), len(os.listdir(f"/proc/{pid}/fd")), int(words["VmRSS"].split()[0]) / 1024


def unexplained(name, text):
    """Errors in a log that nobody ordered."""
    found = []
    text = re.sub(r"^\[rank\d+\]: ", "", text, flags=re.MULTILINE)  # torch puts it before an error at the end
    for block in text.split("Traceback (most recent call last):")[1:]:
        if "During handling of the above exception" in block:
            continue  # what counts is the error that came of it
        ends_with = [line for line in block.splitlines() if line and not line.startswith((" ", "\t"))]
        if not ends_with or "OrderedError" not in ends_with[0]:
            found.append(f"{name}: {ends_with[0] if ends_with else block[-300:]}")
    return found


def soak(given):
    """Run it and print what came out; the exit status."""
    run = Soak(given)
    try:
        problems = _problems(run, well=run.run())
        for problem in problems:
            print(f"NOT AS WANTED: {problem}")
        if problems and (kept := os.environ.get("STRAGGLE_SOAK_KEEP")):
            shutil.copytree(run.job.folder, kept, dirs_exist_ok=True)
        return int(bool(problems))
    finally:
        run.close()


def _problems(run, *, well):
    problems = list(run.seen.problems)
    if not well:
        problems.append(f"the job ended with status {run.job.process.returncode}")
    words = run.job.words()
    if (ends := words.count(" ended by ") + words.count(" ended with ")) != run.ended_by_us:
        problems.append(f"{ends} processes ended early, and the controller ended {run.ended_by_us}:\n{words[-2000:]}")
    for name, text in run.job.logs().items():
        problems += unexplained(name, text)
    problems += run.unexplained
    ends, out = run.job.hashes(), sorted(path.suffix[1:] for path in run.job.folder.glob("out.*"))
    if out:
        print(f"out when the others came to their end: ranks {', '.join(out)}")
    if len(ends) + len(out) != run.ranks or len(set(ends.values())) != 1:
        problems.append(f"not all ranks have the same parameters at the end: {ends}")
    if (num := run.seen.num_put_out()) < run.changes:
        problems.append(f"only {num} of {run.changes} times a rank was put out")
    files = sum(1 for name in ("logs", "run", "pids") for _ in (run.job.folder / name).rglob("*"))
    if files > FILES * run.ranks:
        problems.append(f"{files} files: more than {FILES} for each rank")
    return problems + _show(run) + _long_steps(run) + _growth(run) + run.scraped.problems(run.minutes, run.ranks)


def _show(run):
    """Print what happened; what should not have."""
    seen, problems = run.seen, []
    compared = {step: own for step, own in seen.hashes.items() if len(own) > 1}
    different = sorted(step for step, own in compared.items() if len(set(own.values())) > 1)
    if different:
        problems.append(f"parameters differ at steps {different[:10]}")
    if len(compared) < 0.8 * (seen.step // CHECK_EVERY):
        problems.append(f"parameters were compared at {len(compared)} steps only")
    done = collections.Counter()
    for own in seen.done.values():
        done.update(own)
    print(
        f"{run.ranks} ranks, {seen.step} steps in {60 * run.minutes * run.share():.0f} s; "
        f"{seen.num_put_out()} times a rank was put out, {seen.generation} views; logs rotated {run.num_rotated} times"
    )
    print("faults: " + ", ".join(f"{number} {kind}" for kind, number in sorted(run.faults.items())))
    print("by the ranks themselves: " + ", ".join(f"{number} {kind}" for kind, number in sorted(done.items())))
    print(f"parameters compared at {len(compared)} steps: different at {len(different)}")
    return problems


def _long_steps(run):
    """Steps of ranks that nothing was wrong with, of which no one may be longer than its bound."""
    of_peers = sorted(
        seconds
        for seconds, at, rank in run.seen.longest
        if seconds and not any(rank == other and since - 1.0 < at < until for since, until, other in run.hits)
    )
    if not of_peers:
        return ["no step of a peer was measured"]
    print(
        f"the longest step of each ten, of ranks that nothing was wrong with: median {statistics.median(of_peers):.3f} "
        f"s, longest {of_peers[-1]:.2f} s, at most {BOUND_S:g} s is wanted"
    )
    above = [seconds for seconds in of_peers if seconds > BOUND_S]
    return [f"{len(above)} steps took longer than {BOUND_S:g} s: up to {above[-1]:.1f} s"] if above else []


def _growth(run):
    """Print what the processes held in the breaks; what has grown."""
    problems = []
    most = MORE if run.minutes >= LONG else (*MORE[:-1], MORE_AT_FIRST)
    print(f"\nwhat is held when the members have not changed for {QUIET_S:g} s, over the run\n")
    print("| | threads | descriptors | memory, MB |\n| --- | --- | --- | --- |")
    for name, samples in run.held.items():
        if len(samples) < 2:
            problems.append(f"what {name} holds was seen {len(samples)} times only")
            continue
        print(
            f"| {name} | " + " | ".join(", ".join(f"{n:.0f}" for n in own) for own in zip(*samples, strict=True)) + " |"
        )
        for what, first, last, more in zip(HELD, samples[0], samples[-1], most, strict=True):
            if last > first + more * (first if more < 1 else 1):
                problems.append(f"{name}: {first:.0f} {what} in the first break and {last:.0f} in the last")
    return problems
