"""How near the merged gradient is to the one with no rank late, which is known in full.

The model is trained with the true mean over all ranks. At the same time, each method merges what would have been in
time, with its own estimators. So all methods are compared on the same gradients. What a method adds later (error
feedback, carry) is wrong for the step in which it is added, and right for the steps together. The error of the sum over
`WINDOW` steps shows what is lost for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from straggle.lab.estimators.task import Case, Task
from straggle.lab.learning.learning import units_of
from straggle.lab.learning.logical import Computed, LogicalRanks, per_parameter
from straggle.lab.learning.samples import batch_of

WINDOW = 10
PHASES = ("early", "middle", "late")


@dataclass(frozen=True)
class Judgement:
    """One method in a third of training and one stage (0: the first that backward finishes), as means over steps.

    ``dropped``: the share of ranks that did not reach the stage. ``cosine`` and ``error``, relative to the true
    gradient's length, of each step's gradient; ``sum_error`` of the sums over `WINDOW` steps.
    """

    task: str
    method: str
    late_share: float
    phase: str
    stage: int
    dropped: float
    cosine: float
    error: float
    sum_error: float


class _Judged:
    """One method under one case, on its way through the steps."""

    def __init__(self, task: Task, method: str, case: Case, setup: _Setup) -> None:
        treatment = task.treatment(method, case, setup.optimizer)
        self.name, self.case = method, case
        self.ranks = LogicalRanks(
            setup.workload, setup.model, task.ranks, estimator=lambda: treatment.make_estimator(setup.optimizer)
        )
        self.weighting = treatment.make_weighting()
        generator = torch.Generator().manual_seed(setup.seed)  # the same ranks are late under all methods
        self.lateness = treatment.lateness.steps(task.ranks, len(setup.units), generator)
        self.rows: list[list[tuple[float, float, float]]] = []  # for each step and stage: dropped, cosine, error
        self.sum_errors: list[list[float]] = []  # for each window and stage
        self._sums = [torch.zeros(1)] * len(setup.units)
        self._true_sums = [torch.zeros(1)] * len(setup.units)

    def step(self, computed: Sequence[Computed], truth: Sequence[Tensor], setup: _Setup) -> None:
        reached = next(self.lateness)
        self.ranks.merge_computed(computed, per_parameter(self.weighting.weights(reached), setup.units))
        merged = setup.gradients()
        dropped = (~reached).float().mean(0).tolist()
        self.rows.append([(d, *compare(m, t)) for d, m, t in zip(dropped, merged, truth, strict=True)])
        self._sums = [a + b for a, b in zip(self._sums, merged, strict=True)]
        self._true_sums = [a + b for a, b in zip(self._true_sums, truth, strict=True)]
        if len(self.rows) % WINDOW == 0:
            self.sum_errors.append([compare(m, t)[1] for m, t in zip(self._sums, self._true_sums, strict=True)])
            self._sums = [torch.zeros(1)] * len(setup.units)
            self._true_sums = list(self._sums)

    def judgements(self, task: str) -> list[Judgement]:
        """Means over each third of the steps."""
        found = []
        for number, phase in enumerate(PHASES):
            rows, sums = (_third(values, number) for values in (self.rows, self.sum_errors))
            for stage in range(len(self.rows[0])):
                dropped, cosine, error = (sum(row[stage][part] for row in rows) / len(rows) for part in range(3))
                sum_error = sum(row[stage] for row in sums) / len(sums)
                found.append(
                    Judgement(task, self.name, self.case.late_share, phase, stage, dropped, cosine, error, sum_error)
                )
        return found


class _Setup:
    """The model that is trained with the true gradients."""

    def __init__(self, task: Task, own_data: bool, seed: int) -> None:
        torch.manual_seed(seed)
        self.setting = task.setting(own_data, seed)
        self.seed = seed
        self.workload = self.setting.workload
        self.model: nn.Module = self.workload.model()
        self.optimizer = self.setting.make_optimizer(self.model.parameters())
        self.units = units_of(self.setting, self.model)
        self.truth = LogicalRanks(self.workload, self.model, task.ranks)

    def gradients(self) -> list[Tensor]:
        """Each stage's gradient as one vector; zeros if there is none. Nothing is applied."""
        parameters = self.truth.parameters
        return [
            torch.cat([(torch.zeros_like(p) if (p := parameters[i]).grad is None else p.grad).flatten() for i in unit])
            for unit in self.units
        ]


def judge(task: Task, late_shares: Sequence[float], seed: int) -> list[Judgement]:
    """All methods with other ranks late in each step, side by side on one run with at least `WINDOW` steps a third."""
    setup = _Setup(task, False, seed)
    judged = [
        _Judged(task, method, Case(share, own_data=False), setup) for share in late_shares for method in task.methods
    ]
    for step in range(max(task.steps, WINDOW * len(PHASES))):
        computed = list(setup.truth.compute(batch_of(setup.workload, setup.setting.samples, step)))
        setup.truth.merge_computed(computed, torch.ones(task.ranks, len(setup.truth.parameters)))
        true_gradients = [parameter.grad for parameter in setup.truth.parameters]
        truth = setup.gradients()
        for method in judged:
            method.step(computed, truth, setup)
        for parameter, gradient in zip(setup.truth.parameters, true_gradients, strict=True):
            parameter.grad = gradient
        setup.optimizer.step()
        setup.optimizer.zero_grad()
    return [judgement for method in judged for judgement in method.judgements(task.name)]


def compare(found: Tensor, truth: Tensor) -> tuple[float, float]:
    """Cosine, and relative error; the cosine of a missing gradient is 0."""
    length, true_length = float(found.norm()), float(truth.norm())
    if true_length == 0:
        return (1.0, 0.0) if length == 0 else (0.0, 1.0)
    cosine = float(found @ truth) / (length * true_length) if length > 0 else 0.0
    return cosine, float((found - truth).norm()) / true_length


def _third(values: list[list], number: int) -> list[list]:  # type: ignore[type-arg]
    count = len(values)
    return values[number * count // 3 : (number + 1) * count // 3]
