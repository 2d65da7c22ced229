"""What the processes of a job tell of themselves: a line of JSON for each thing that they do, in files of their own.

``["has", samples]``, then ``["step", step, epoch, ranks]`` once that batch's step is merged, with the ranks that gave.
``[how, pid]``: this process is lost now, ``killed`` or ``frozen``.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from launch_jobs import wait_until
from loaded import Launch

Told = dict[tuple[int, int], list[list[Any]]]
# in a script: this process is lost; `is_back()` tells those that wait for it
LOSS = """\
victim, how, resume = int(sys.argv[1]), sys.argv[2], (sys.argv[3:] or [None])[0]
is_back = lambda: os.path.exists("goes_on" if how == "frozen" else f"told.{victim}.1")
def lose():
    tell(how, os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP if how == "frozen" else signal.SIGKILL)
"""


def lose_a_rank(launch: Launch, folder: Path, script: str, victim: int, how: str) -> Told:
    """Three ranks of this script, one of which is lost; a frozen one goes on when the others have made a step."""
    (folder / "worker.py").write_text(script)
    with launch("--nproc-per-node=3", "--spares=1", "worker.py", victim, how, folder=folder) as job:
        if how == "frozen":
            wait_until(job, lambda: _has_made_a_step_without(folder, victim))
            os.kill(next(line[1] for line in told_by(folder)[victim, 0] if line[0] == how), signal.SIGCONT)
            (folder / "goes_on").touch()
        assert job.status() == 0, job.log.read_text()
    told = told_by(folder)
    assert set(told) == {(rank, 0) for rank in range(3)} | ({(victim, 1)} if how == "killed" else set())
    return told


def ends_of(told: Told) -> list[list[Any]]:
    """How each process ended that was not killed."""
    return [lines[-1] for lines in told.values() if lines[-1][0] != "killed"]


def go_on(launch: Launch, folder: Path, script: str, checkpoint: Path) -> Told:
    """Two ranks of this script, from a checkpoint."""
    folder.mkdir()
    (folder / "worker.py").write_text(script)
    with launch("--nproc-per-node=2", "worker.py", -1, "none", checkpoint, folder=folder) as job:
        assert job.status() == 0, job.log.read_text()
    return told_by(folder)


def _has_made_a_step_without(folder: Path, victim: int) -> bool:
    lines = [line for (rank, _), own in told_by(folder).items() if rank != victim for line in own]
    return any(line[0] == "step" and victim not in line[3] for line in lines)


def told_by(folder: Path) -> Told:
    """By rank and start, what each process of the job has done."""
    told = Told()
    for path in folder.glob("told.*"):
        rank, start = map(int, path.name.split(".")[1:])
        complete = path.read_text().rpartition("\n")[0]  # the last line may be half written
        told[rank, start] = [*map(json.loads, complete.splitlines())]
    return told


def merged(told: Told) -> dict[int, tuple[int, Counter[int]]]:
    """By step, its epoch and the samples that were merged in it.

    A rank that is put out may take a step for merged that the others have given up: so most of them say who gave.
    """
    claims = dict[int, Counter[tuple[int, ...]]]()
    for lines in told.values():
        for line in lines:
            if line[0] == "step":
                claims.setdefault(line[1], Counter())[tuple(line[3])] += 1
    gave = {step: own.most_common(1)[0][0] for step, own in claims.items()}
    steps = dict[int, tuple[int, Counter[int]]]()
    for (rank, _), lines in told.items():
        for had, made in pairwise(lines):
            if had[0] == "has" and made[0] == "step" and rank in gave[made[1]]:
                steps.setdefault(made[1], (made[2], Counter()))[1].update(had[1])
    return steps


def samples_of(steps: dict[int, tuple[int, Counter[int]]], epoch: int) -> Counter[int]:
    counted = Counter[int]()
    for number, samples in steps.values():
        counted += samples if number == epoch else Counter()
    return counted
