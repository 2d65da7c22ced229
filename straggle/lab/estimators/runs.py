"""How training ends under each method: complete runs, beside the same run with no rank late."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from straggle.lab.estimators.task import Case, Task
from straggle.lab.learning.lateness import Nobody
from straggle.lab.learning.learning import Treatment, learn

WAIT = "wait for all"


@dataclass(frozen=True)
class RunScore:
    """One run: ``training_loss`` is the mean over all ranks and the last tenth of the steps.

    ``dropped``: the share of all ranks' stages that were not in time.
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
    """Train under a method, or with no rank late for the method `WAIT`."""
    setting = task.setting(case.own_data, seed)
    treatment = Treatment(Nobody()) if method == WAIT else task.treatment(method, case)
    learned = learn(setting, treatment)
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
