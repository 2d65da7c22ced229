"""Useful steps while ranks are killed at random, over those without kills; see `benchmarks/members.py`.

Each system has one job: a quiet time, a time with kills, a quiet time. Its rate with kills is compared with that of its
own quiet times. All systems get the same kills. A process is up ``start_s`` after its start, of which most is sleep, as
on machines of their own. Each rank is killed after times of ``20 start_s`` in the mean, so it is away for 5 % of the
time. Useful is what is in the parameters at the end: a rank's gradients of one step are one rank-step.
"""

import itertools
import os
import random
import statistics
import subprocess
import sys
import time

from goodput_jobs import OfForkingAgent, OfStraggle, OfTorchft, OfTorchrun, Steps
from goodput_ranks import RANKS

METHODS = ("straggle", "torchrun", "forking", "torchft")
NAMES = {
    "straggle": "straggle, `Elastic()`",
    "torchrun": "DDP under torchrun, a checkpoint every 20 steps",
    "forking": "the same, workers forked (they start at no cost)",
    "torchft": "torchft",
}


def kills(seconds, between_s, seed):
    """When which rank is killed, in seconds from the beginning."""
    chance, times = random.Random(seed), []
    for rank in range(RANKS):
        at = chance.expovariate(1 / between_s)
        while at < seconds:
            times.append((at, rank))
            at += chance.expovariate(1 / between_s)
    return sorted(times)


def goodput(methods, seconds, quiet_s, start_s, seed, torchft_python):
    """Print the table; the exit status."""
    os.environ.update(START_S=str(start_s), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    # or gloo finds the addresses of the processes before in torchrun's store, and no restart succeeds (torch 2.13)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    planned = kills(seconds, 20 * start_s, seed)
    print(
        f"{len(planned)} kills in {seconds:g} s, {RANKS} ranks; a process is up {start_s:g} s after its start",
        flush=True,
    )
    rows, failed = [], False
    for method in methods:
        if method == "torchft" and (why := _no_torchft(torchft_python)):
            rows.append(f"| {NAMES[method]} | not measured: no torchft ({why}) |")
            continue
        make = {"straggle": OfStraggle, "torchrun": OfTorchrun, "forking": OfForkingAgent}
        job = OfTorchft(torchft_python) if method == "torchft" else make[method]()
        try:
            rows.append(_row(method, *_run(job, planned, seconds, quiet_s)))
        except Failed as error:
            failed = True
            rows.append(f"| {NAMES[method]} | FAILED: {error} |")
            print(job.words()[-6000:])
        finally:
            job.close()
        print(rows[-1], flush=True)
    print(f"\n{HEAD}\n" + "\n".join(rows))
    return int(failed)


HEAD = (
    "| | rank-steps a second, quiet: before, after | with kills | ratio | ranks in a step, mean | "
    "seconds of the job lost a kill | "
    "longest time without a step after a kill: median, most | rank-steps lost a kill | at the end |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


class Failed(Exception):
    """A job did not do what it was to do."""


def _no_torchft(python):
    if python is None:
        return "--torchft-python is not given"
    tried = subprocess.run([python, "-c", "import torchft"], capture_output=True, text=True)
    return tried.stderr.strip().rpartition("\n")[2] if tried.returncode else ""


def _run(job, planned, seconds, quiet_s):
    """Lead a job through its three times; its steps, the times' ends, when it was killed, and what it ended with."""
    steps = Steps(job.folder)
    _until(job, steps, lambda: steps.num_at_work() == RANKS and steps.read() > 10, 400, "all ranks train")
    print(f"all ranks of {type(job).__name__[2:]} train, at step {steps.read()}", file=sys.stderr)
    time.sleep(2.0)
    before = time.time(), time.time() + quiet_s
    _until(job, steps, lambda: time.time() >= before[1], quiet_s + 5, "the quiet time")
    begun, left, killed = time.time(), list(planned), []
    while time.time() < begun + seconds:
        for at, rank in [own for own in left if begun + own[0] <= time.time()]:
            if job.kill(rank):
                left.remove((at, rank))
                killed.append(time.time())
        steps.read()
        if not job.running():
            raise Failed(f"it ended {time.time() - begun:.0f} s after the first kill could come")
        time.sleep(0.05)
    during = begun, time.time()
    print(f"{len(killed)} kills; step {steps.read()}, {steps.num_at_work()} ranks at work", file=sys.stderr)
    _until(job, steps, lambda: steps.num_at_work() == RANKS, 400, "all ranks train again")
    time.sleep(2.0)
    after = time.time(), time.time() + quiet_s
    _until(job, steps, lambda: time.time() >= after[1], quiet_s + 5, "the quiet time")
    job.end_at(steps.read() + 40)
    until = time.time() + 60
    while job.running() and time.time() < until:
        time.sleep(0.1)
    ends = [path.read_text() for path in job.folder.glob("hash.*")]
    steps.read()
    return sorted(steps.lines), before, during, after, killed, ends


def _until(job, steps, condition, limit_s, what):
    until = time.time() + limit_s
    while not condition():
        if time.time() > until or not job.running():
            raise Failed(f"{what}: not within {limit_s:g} s; {steps.num_at_work()} ranks do, at step {steps.read()}")
        steps.read()
        time.sleep(0.1)


def _row(method, lines, before, during, after, killed, ends):
    first = {}  # a step that is repeated, or that several ranks report, counts once, when it was first there
    for at, step, useful, _, _ in lines:
        if useful and step not in first:
            first[step] = at, useful
    ended = sorted(first.values())
    rates = [_rate(ended, *span) for span in (before, after, during)]
    quiet = statistics.fmean(rates[:2])
    ratio, number = rates[2] / quiet, len(killed)
    stood = [_longest(ended, at, during[1] + 60, killed) for at in killed]
    lost_s = (1 - ratio) * (during[1] - during[0]) / number
    equal = len(ends) == RANKS and len(set(ends)) == 1
    said = (
        "equal parameters" if equal else f"NOT EQUAL: {len(ends)} ranks came to the end, with {len(set(ends))} hashes"
    )
    cells = (
        NAMES[method],
        f"{rates[0]:.1f}, {rates[1]:.1f}",
        f"{rates[2]:.1f}",
        f"{ratio:.3f}",
        f"{_present(ended, *during):.2f}",
        f"{lost_s:.2f}",
        f"{statistics.median(stood):.2f}, {max(stood):.2f} s",
        f"{_lost(method, lines, during) / number:.1f}",
        said,
    )
    return "| " + " | ".join(cells) + " |"


def _rate(ended, begin, end):
    return sum(useful for at, useful in ended if begin <= at < end) / (end - begin)


def _present(ended, begin, end):
    """Ranks whose gradients are in a step, in the mean over time."""
    pairs = [(early[0], *late) for early, late in itertools.pairwise(ended) if begin <= late[0] < end]
    return sum(useful * (at - since) for since, at, useful in pairs) / sum(at - since for since, at, _ in pairs)


def _longest(ended, at, end, killed):
    """The longest time without a step that is new, from before a kill to the next one."""
    following = min((other for other in killed if other > at + 0.5), default=end)
    times = [other for other, _ in ended]
    near = [index for index, other in enumerate(times) if at - 1.0 <= other]
    pairs = [(times[index - 1], times[index]) for index in near if index and times[index - 1] < following]
    return max((late - early for early, late in pairs if late > at), default=float("nan"))


def _lost(method, lines, during):
    """Rank-steps that were computed and are in no parameters."""
    inside = [line for line in lines if during[0] <= line[0] < during[1]]
    if method == "torchft":  # each replica says when it throws its own away
        return sum(1 for line in inside if not line[2])
    if method == "straggle":
        by_step = {step: computed - useful for _, step, useful, computed, _ in inside}
        return sum(max(0.0, lost) for lost in by_step.values())
    of_one = [step for _, step, _, _, rank in inside if rank == 0]
    return RANKS * (len(of_one) - len(set(of_one)))
