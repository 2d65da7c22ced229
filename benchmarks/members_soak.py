"""Thousands of steps with hundreds of changes of members, with stalls, NaN and errors; see `benchmarks/members.py`.

The controller sends signals: SIGKILL, SIGSTOP, and SIGUSR1, on which a rank raises in its step what the file
``order.RANK`` says. Stalls and NaN are each rank's own, by chance. Rank 1 is never killed and its code never ends its
process, so that what one process holds can be compared between the first tenth of the run and its end. Now and then a
rank makes a pause of its own.
"""

import collections
import os
import random
import re
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from members_job import End, Job, Lines, Tail, digest

RANKS = 4
SURVIVOR = 1
KINDS = {"kill": 2, "stop": 3, "exit": 1, "error": 4}  # how often, in proportion
LASTING = ("stop", "error")  # what the survivor may be hit by
CHECK_EVERY = 100  # steps between two hashes
PROGRESS_S = 60.0  # without a step it hangs
END_AHEAD = 300  # steps between saying where the end is and the end
SUSPECT_S = 1.5
HELD = ("threads", "descriptors", "MB")
MORE = (4, 10, 0.03)  # wanted at most: a view more has 3 threads and 6 descriptors while its old groups end; memory 3 %


class OrderedError(Exception):
    """Raised because the controller wanted it; ``ends`` the process, or is caught by the loop."""


# -- a rank


class Orders:
    """What the controller wants raised, next time that the loop asks."""

    def __init__(self, folder, rank):
        self._path, self._open = folder / f"order.{rank}", False
        signal.signal(signal.SIGUSR1, lambda *_: self._came())

    def _came(self):
        self._open = True

    def next(self):
        if not self._open:
            return None
        self._open = False
        return self._path.read_text()

    def again(self):
        """The step was cut short before it came to what was ordered."""
        self._open = True


def rank_main(folder, variant):
    """Train until the file ``end`` says that it is over; a rank that is out at the end has nothing to compare."""
    import straggle

    try:
        _train(folder, variant)
    except straggle.JobDone as error:
        (folder / f"out.{os.environ['RANK']}").write_text(str(error))


def _train(folder, variant):
    import faulthandler
    import logging

    import torch
    import torch.distributed as dist
    from torch import nn

    import straggle

    faulthandler.register(signal.SIGUSR2, all_threads=True)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, start = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(64)] if variant == "norm" else []
    net = nn.Sequential(nn.Linear(32, 64), *norm, nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    granularity = {"microbatches": "microbatch", "whole": "step"}.get(variant, "stage")
    model = straggle.StagedDataParallel(
        net,
        deadline=straggle.QuantileDeadline(0.9, slack=1.5),
        late_handling=straggle.LateHandling(max_lag=32, granularity=granularity),
        members=straggle.Elastic(min_ranks=1, suspect_s=SUSPECT_S),
    )
    num_microbatches = 3 if variant == "microbatches" else 1
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = model.register_state(optimizer=optimizer)
    orders, lines, chance = Orders(folder, rank), Lines(folder, rank), random.Random(f"{rank} {start}")
    model.register_members_hook(
        lambda report: lines.write("members", report.generation, dict(report.left), dict(report.joined))
    )
    done = collections.Counter()
    lines.write("up", step)
    end = End(folder)
    while not end.reached(step):
        try:
            with model.step(num_microbatches):
                order = orders.next()
                if order == "data":
                    raise OrderedError("caught")
                time.sleep(_pause_s(chance, done))
                if order == "forward":
                    raise OrderedError("caught")
                inputs = torch.randn(48, 32, generator=torch.Generator().manual_seed(8 * step + rank))
                is_nan = chance.random() < 1 / 300
                done["NaN"] += is_nan
                for part in inputs.chunk(num_microbatches):
                    loss = (model(part) - part[:, :8]).square().mean() / num_microbatches
                    (loss * (float("nan") if is_nan else 1.0)).backward()
                if order == "end":
                    raise OrderedError("caught")
                if order == "exit":
                    raise OrderedError("ends")
        except OrderedError as error:
            if str(error) == "ends":
                raise
            done["error"] += 1
        else:
            if order is not None:
                orders.again()
        optimizer.step()
        optimizer.zero_grad()
        report = model.last_report
        assert report is not None
        step = report.step + 1
        if report.different_ranks:
            lines.write("different", report.step, list(report.different_ranks))
        own = report.ranks[rank]
        if step % CHECK_EVERY == 0 and not own.absent:
            lines.write("hash", step, digest(net), all(p.isfinite().all().item() for p in net.parameters()), dict(done))
        if step % 10 == 0:
            lines.write("step", step, own.absent)
        if chance.random() < 1 / 200:
            done["pause"] += 1
            with model.pause():
                time.sleep(0.01)
    (folder / f"hash.{rank}").write_text(f"{step} {digest(net)}")
    model.close()


def _pause_s(chance, done):
    """A few milliseconds, and now and then a stall."""
    number = chance.random()
    if number < 1 / 1500:
        done["long stall"] += 1
        return chance.uniform(0.5, 2.0)
    if number < 1 / 100:
        done["short stall"] += 1
        return chance.uniform(0.02, 0.2)
    return 0.003


# -- the controller


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
    left: list = field(default_factory=list)  # (time, rank, reason), as each member reported it
    joined: list = field(default_factory=list)
    problems: list = field(default_factory=list)


class Soak:
    """Injects faults, and looks at what becomes of them."""

    def __init__(self, steps, changes, seed, variant, preload):
        self.steps, self.changes = steps, changes
        self.job = Job(
            RANKS, str(Path(__file__).with_name("members.py")), "soak-rank", "--variant", variant, preload=preload
        )
        self.seen, self.chance = Seen(), random.Random(seed)
        self.faults = collections.Counter()
        self.ended_by_us = 0
        self.held = {}  # what each process holds: (share of the run, threads, descriptors, RSS in MB)
        self._tails = {}
        self._faulty = {}  # rank: (when it was hit, until when it is left alone, whether it is started again)
        self._wakes = []

    def run(self):
        """Until the end, or until it hangs; True: the job's status is 0."""
        due = [self.steps * (0.02 + 0.95 * number / self.changes) for number in range(int(1.25 * self.changes))]
        end_said = False
        while self.job.process.poll() is None:
            self._read()
            self._wake_stopped()
            self._hold()
            enough = self.seen.step >= self.steps and self.num_put_out() >= self.changes
            if enough and not end_said and len(self._free()) == RANKS:
                end_said = True
                self.job.end_at(self.seen.step + END_AHEAD)
            elif not (enough or end_said) and (not due or self.seen.step >= due[0]) and self._hit():
                due = due[1:]
            if time.time() - self.seen.at > PROGRESS_S:
                self._hangs()
                break
            time.sleep(0.05)
        self._read()
        return self.job.wait(30) == 0

    def num_put_out(self):
        """Faults after which the members went on without the rank: reports of one leaving lie close together."""
        times = collections.defaultdict(list)
        for at, rank, reason in self.seen.left:
            if reason != "ended":
                times[rank].append(at)
        number = 0
        for own in times.values():
            last = 0.0
            for at in sorted(own):
                number += at - last > 0.75
                last = at
        return number

    def _read(self):
        for rank in range(RANKS):
            for start in (self.job.starts(rank) - 1, self.job.starts(rank)):
                tail = self._tails.setdefault((rank, start), Tail(self.job.folder / f"steps.{rank}.{start}"))
                for line in tail.new():
                    self._take(rank, start, *line)

    def _take(self, rank, start, at, what, *values):
        seen = self.seen
        if what == "up":
            seen.up[rank] = at
        elif what == "members":
            generation, left, joined = values
            seen.generation = max(seen.generation, generation)
            seen.left += [(at, int(other), why) for other, why in left.items()]
            seen.joined += [(at, int(other), why) for other, why in joined.items()]
        elif what == "hash":
            step, digested, finite, done = values
            seen.hashes[step][rank] = digested
            seen.done[rank, start] = done
            if not finite:
                seen.problems.append(f"rank {rank} has parameters that are not finite at step {step}")
        elif what == "different":
            seen.problems.append(f"rank {rank}: the parameters of ranks {values[1]} differ in step {values[0]}")
        else:
            step, absent = values
            if step > seen.step:
                seen.step, seen.at = step, time.time()
            if not absent:
                seen.taking_part[rank] = at

    def _hit(self):
        """One fault on a rank that takes part; false while others are away."""
        now, free = time.time(), self._free()
        kind = self.chance.choices(list(KINDS), KINDS.values())[0]
        # a process needs seconds to be started again, so the others are hit meanwhile, and now and then killed
        away = 1 if kind in LASTING or self.chance.random() < 0.05 else 0
        if len(free) < RANKS - away:
            return False
        rank = self.chance.choice([rank for rank in free if rank != SURVIVOR or kind in LASTING])
        seconds = self.chance.uniform(0.3, 3.0) if kind == "stop" else 0.0
        if kind in ("exit", "error"):
            place = kind if kind == "exit" else self.chance.choice(["data", "forward", "end"])
            (self.job.folder / f"order.{rank}").write_text(place)
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(kind, signal.SIGUSR1)
        if not self.job.signal(rank, number):
            return False
        if kind == "stop":
            self._wakes.append((now + seconds, rank))
        self.ended_by_us += kind in ("kill", "exit")
        self.faults[kind if kind != "stop" or seconds < SUSPECT_S else "long stop"] += 1
        self._faulty[rank] = now, now + seconds + (2.5 if kind == "error" else 0.5), kind in ("kill", "exit")
        return True

    def _free(self):
        """Ranks that take part, and have done so since they were hit last."""
        now = time.time()
        for rank, (at, until, anew) in list(self._faulty.items()):
            up = self.seen.up.get(rank, 0)
            if now > until and self.seen.taking_part.get(rank, 0) > max(at, up) and (up > at or not anew):
                del self._faulty[rank]
        return [rank for rank in range(RANKS) if rank not in self._faulty and rank in self.seen.taking_part]

    def _wake_stopped(self):
        now = time.time()
        for at, rank in [own for own in self._wakes if own[0] <= now]:
            self._wakes.remove((at, rank))
            self.job.signal(rank, signal.SIGCONT)

    def _hold(self):
        if self.seen.step and (not self.held or time.time() - self._held_at > 2.0):
            self._held_at = time.time()
            for name, pid in (("rank 1", self.job.pid(SURVIVOR)), ("launcher", self.job.process.pid)):
                if pid is not None and (own := holds(pid)) is not None:
                    self.held.setdefault(name, []).append((self.seen.step, *own))

    def _hangs(self):
        self.seen.problems.append(f"it hangs: no step for {PROGRESS_S:g} s after step {self.seen.step}")
        for rank in range(RANKS):
            self.job.signal(rank, signal.SIGCONT)
            self.job.signal(rank, signal.SIGUSR2)
        time.sleep(2.0)
        for name, text in list(self.job.logs().items()):
            if "Thread 0x" in text or "most recent call first" in text:
                print(f"--- {name}\n{text[-6000:]}", file=sys.stderr)


def holds(pid):
    """Threads, descriptors, and memory in MB of a process; ``None`` of one that has ended and is not waited for yet."""
    words = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    if "VmRSS" not in words:
        return None
    return int(words["Threads"]), len(os.listdir(f"/proc/{pid}/fd")), int(words["VmRSS"].split()[0]) / 1024


def around(samples, share, steps):
    """The medians of what was held within a tenth of the run around ``share`` of it."""
    near = [own[1:] for own in samples if abs(own[0] / steps - share) <= 0.05]
    return [statistics.median(values) for values in zip(*near, strict=True)] if near else [float("nan")] * 3


def unexplained(job, ended_by_us):
    """Errors that nobody ordered, from what the launcher and the ranks said."""
    found = []
    ends = job.words().count(" ended by ") + job.words().count(" ended with ")
    if ends != ended_by_us:
        found.append(f"{ends} processes ended early, and the controller ended {ended_by_us}:\n{job.words()[-2000:]}")
    for name, text in job.logs().items():
        text = re.sub(r"^\[rank\d+\]: ", "", text, flags=re.MULTILINE)  # torch puts it before an error at the end
        for block in text.split("Traceback (most recent call last):")[1:]:
            if "During handling of the above exception" in block:
                continue  # what counts is the error that came of it
            ends_with = [line for line in block.splitlines() if line and not line.startswith((" ", "\t"))]
            if not ends_with or "OrderedError" not in ends_with[0]:
                found.append(f"{name}: {ends_with[0] if ends_with else block[-300:]}")
    return found


def soak(steps, changes, seed, variant, preload):
    """Run it and print what came out; the exit status."""
    began = time.time()
    run = Soak(steps, changes, seed, variant, preload)
    try:
        well = run.run()
        problems = list(run.seen.problems)
        if not well:
            problems.append(f"the job ended with status {run.job.process.returncode}")
        problems += unexplained(run.job, run.ended_by_us)
        ends, out = run.job.hashes(), sorted(path.suffix[1:] for path in run.job.folder.glob("out.*"))
        if out:
            print(f"out when the others came to their end: ranks {', '.join(out)}")
        if len(ends) + len(out) != RANKS or len(set(ends.values())) != 1:
            problems.append(f"not all ranks have the same parameters at the end: {ends}")
        if run.num_put_out() < changes:
            problems.append(f"only {run.num_put_out()} of {changes} times a rank was put out")
        problems += _show(run, time.time() - began)
        for problem in problems:
            print(f"NOT AS WANTED: {problem}")
        if problems and (kept := os.environ.get("STRAGGLE_SOAK_KEEP")):
            import shutil

            shutil.copytree(run.job.folder, kept, dirs_exist_ok=True)
        return int(bool(problems))
    finally:
        run.job.close()


def _show(run, seconds):
    """Print the tables; what they have that should not be."""
    seen, problems = run.seen, []
    compared = {step: own for step, own in seen.hashes.items() if len(own) > 1}
    different = sorted(step for step, own in compared.items() if len(set(own.values())) > 1)
    if different:
        problems.append(f"parameters differ at steps {different[:10]}")
    if len(compared) < 0.8 * run.steps / CHECK_EVERY:
        problems.append(f"parameters were compared at {len(compared)} steps only")
    done = collections.Counter()
    for own in seen.done.values():
        done.update(own)
    print(
        f"{seen.step} steps in {seconds:.0f} s; {run.num_put_out()} times a rank was put out, {seen.generation} views"
    )
    print("faults: " + ", ".join(f"{number} {kind}" for kind, number in sorted(run.faults.items())))
    print("by the ranks themselves: " + ", ".join(f"{number} {kind}" for kind, number in sorted(done.items())))
    print(f"parameters compared at {len(compared)} steps: different at {len(different)}")
    shares = (0.10, 0.30, 0.50, 0.70, 0.95)
    print("\nmedians around 10, 30, 50, 70 and 95 % of the steps\n\n| | threads | descriptors | memory, MB |")
    print("| --- | --- | --- | --- |")
    for name, samples in run.held.items():
        medians = [around(samples, share, seen.step) for share in shares]
        cells = [", ".join(f"{value:.0f}" for value in values) for values in zip(*medians, strict=True)]
        print(f"| {name} | " + " | ".join(cells) + " |")
        for what, first, last, more in zip(HELD, medians[0], medians[-1], MORE, strict=True):
            if not last <= first + more * (first if more < 1 else 1):
                problems.append(f"{name}: {first:.0f} {what} around 10 % and {last:.0f} at the end")
    return problems
