"""What training comes to under each method: whole runs, beside the same run with nobody late."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from straggle.evaluate.task import Case, Task
from straggle.simulate.lateness import Nobody
from straggle.simulate.learning import Rule, learn

WAIT = "wait for all"
# two-sided 95 % quantile of Student's t, by degrees of freedom from 1 on
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True)
class RunScore:
    """One run: ``training_loss`` is the mean over all ranks and the last tenth of the steps.

    ``dropped``: the share of all stages of all ranks that were not in time.
    """

    task: str
    method: str
    late_share: float
    own_data: bool
    seed: int
    training_loss: float
    validation_loss: float
    accuracy: float
    dropped: float


def train_once(task: Task, method: str, case: Case, seed: int) -> RunScore:
    """Train under a method, or with nobody late for the method `WAIT`."""
    setting = task.setting(case.own_data, seed)
    rule = Rule(Nobody()) if method == WAIT else task.rule(method, case)
    learned = learn(setting, rule)
    last = learned.losses[-max(1, len(learned.losses) // 10) :]
    return RunScore(
        task.name,
        method,
        case.late_share,
        case.own_data,
        seed,
        fmean(last),
        learned.scores["loss"],
        learned.scores["accuracy"],
        1.0 - float(learned.reached.mean()),
    )


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its 95 % interval over seeds (infinite for one seed)."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ±{self.half:.3f}"


def interval(values: Sequence[float]) -> Interval:
    """By Student's t."""
    if len(values) < 2:
        return Interval(fmean(values), math.inf)
    quantile = _T95[len(values) - 2] if len(values) - 2 < len(_T95) else 1.96
    return Interval(fmean(values), quantile * stdev(values) / math.sqrt(len(values)))
