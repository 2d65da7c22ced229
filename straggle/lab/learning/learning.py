"""What partial gradients do to learning: up to a thousand logical ranks in one process, some of them late.

The losses are those of all ranks, late or not, so that runs are compared by the same number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from straggle.backward.stages import plan_stages
from straggle.lab.learning.lateness import LatePattern
from straggle.lab.learning.logical import LogicalRanks, finish_order, per_parameter
from straggle.lab.learning.samples import Samples, batch_of
from straggle.lab.learning.weighting import Count, Weighting
from straggle.lab.workloads.workload import Workload
from straggle.policies.estimators import Abstain, Estimator

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeEstimator = Callable[[Optimizer], Estimator]
Units = Sequence[Sequence[int]]


def abstain(_optimizer: Optimizer) -> Estimator:
    """No estimate stands in."""
    return Abstain()


@dataclass(frozen=True)
class Setting:
    """What is trained, the same for all treatments: ``samples`` has as many ranks as it deals to.

    ``num_units``: how many stages a rank passes in a step (`plan_stages`); ``None``: each gradient is a unit.
    """

    workload: Workload
    make_optimizer: MakeOptimizer
    samples: Samples
    steps: int
    seed: int = 0
    num_units: int | None = None


@dataclass(frozen=True)
class Treatment:
    """Which ranks are late, what a gradient counts, and what stands in for missing gradients."""

    lateness: LatePattern
    make_weighting: Callable[[], Weighting] = Count
    make_estimator: MakeEstimator = abstain


@dataclass(frozen=True)
class Learned:
    """How a run went: each step's ``losses`` (mean over ranks), the ``scores`` on held-out data after the last step.

    ``reached``, of shape (ranks, units): the share of the steps in which a rank finished a unit. ``seconds``: how long
    the run took.
    """

    losses: tuple[float, ...]
    scores: dict[str, float]
    reached: Tensor
    model: nn.Module
    seconds: float


def learn(setting: Setting, treatment: Treatment, *, chunk: int = 64) -> Learned:
    """Train under a treatment; the model, the samples and who is late follow from the setting's seed."""
    began = time.perf_counter()
    torch.manual_seed(setting.seed)
    model = setting.workload.model()
    optimizer = setting.make_optimizer(model.parameters())
    num_ranks = len(setting.samples.indices(0))
    ranks = LogicalRanks(
        setting.workload, model, num_ranks, estimator=lambda: treatment.make_estimator(optimizer), chunk=chunk
    )
    units = units_of(setting, model)
    weighting = treatment.make_weighting()
    generator = torch.Generator().manual_seed(setting.seed)
    losses, total = [], torch.zeros(num_ranks, len(units))
    lateness = treatment.lateness.steps(num_ranks, len(units), generator)
    for step, reached in enumerate(islice(lateness, setting.steps)):
        batch = batch_of(setting.workload, setting.samples, step)
        merged = ranks.merge(batch, per_parameter(weighting.weights(reached), units))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(merged.losses.mean()))
        total += reached
    scores = setting.workload.evaluate(model)
    return Learned(tuple(losses), scores, total / setting.steps, model, time.perf_counter() - began)


def units_of(setting: Setting, model: nn.Module) -> Units:
    """The parameters of each unit, in the order in which backward finishes them."""
    order = finish_order(setting.workload, model)
    if setting.num_units is None:
        return [[parameter] for parameter in order]
    return [stage.parameters for stage in plan_stages(model, setting.num_units, order).stages]
