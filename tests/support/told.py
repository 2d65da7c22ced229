"""What the processes of a job tell of themselves: a line of JSON for each thing that they do, in files of their own.

``["has", samples]``, then ``["step", step, epoch, ranks]`` once that batch's step is merged, with the ranks that gave.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any


def told_by(folder: Path) -> dict[tuple[int, int], list[list[Any]]]:
    """By rank and start, what each process of the job has done."""
    files = {tuple(map(int, path.name.split(".")[1:])): path for path in folder.glob("told.*")}
    return {(place[0], place[1]): [*map(json.loads, path.read_text().splitlines())] for place, path in files.items()}


def merged(told: dict[tuple[int, int], list[list[Any]]]) -> dict[int, tuple[int, Counter[int]]]:
    """By step, its epoch and the samples that were merged in it."""
    steps = dict[int, tuple[int, Counter[int]]]()
    for (rank, _), lines in told.items():
        for had, made in pairwise(lines):
            if had[0] == "has" and made[0] == "step" and rank in made[3]:
                steps.setdefault(made[1], (made[2], Counter()))[1].update(had[1])
    return steps


def samples_of(steps: dict[int, tuple[int, Counter[int]]], epoch: int) -> Counter[int]:
    counted = Counter[int]()
    for number, samples in steps.values():
        counted += samples if number == epoch else Counter()
    return counted
