"""How far each logical rank comes in each step: patterns that say which units of its work are finished.

A unit is a stage, or a single gradient; units are numbered in the order in which backward finishes them.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Generator, Tensor

from straggle.lab.simulate.communication import Constant
from straggle.lab.simulate.delays import Delays
from straggle.lab.simulate.ranks import Cluster
from straggle.lab.simulate.units import Work
from straggle.policies.deadline import Deadline, LateHandling, check_count


class LatePattern(ABC):
    """Which ranks are late in a step, and what they have finished. A rule may keep state from step to step."""

    @abstractmethod
    def reached(self, num_ranks: int, num_units: int, generator: Generator) -> Tensor:
        """The next step: the units that each rank finishes, bool of shape (ranks, units).

        All random numbers come from ``generator``, so that a seed gives the same lateness under every merge.
        """

    def steps(self, num_ranks: int, num_units: int, generator: Generator) -> Iterator[Tensor]:
        """The steps of a run, without end; each run has a state of its own."""
        run = copy.deepcopy(self)
        while True:
            yield run.reached(num_ranks, num_units, generator)


class ReachDistribution(ABC):
    """How many units a late rank finishes."""

    @abstractmethod
    def draw(self, count: int, num_units: int, generator: Generator) -> Tensor:
        """For ``count`` late ranks the number of units, int64 of shape (count,)."""


@final
@dataclass(frozen=True)
class SameReach(ReachDistribution):
    """Always this share of the units, rounded down; with 0 the complete gradient is dropped, as with backup workers."""

    share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"share={self.share}: a late rank has finished less than everything, from 0 to below 1")

    def draw(self, count: int, num_units: int, generator: Generator) -> Tensor:  # noqa: ARG002
        return torch.full((count,), int(self.share * num_units))


@final
@dataclass(frozen=True)
class UniformReach(ReachDistribution):
    """Any number of units from one to all, with equal probability.

    As the program of Lang et al. 2024 draws it, "Stragglers-aware low-latency synchronous federated learning via
    layer-wise model updates".
    """

    def draw(self, count: int, num_units: int, generator: Generator) -> Tensor:
        return torch.randint(1, num_units + 1, (count,), generator=generator)


@final
@dataclass(frozen=True)
class PoissonReach(ReachDistribution):
    """The first unit, and then a Poisson number of further ones, at most all.

    The probability of unit ``i`` (from 0) is ``P(Poisson(mean) >= i)``: with ``mean=3`` 1, 0.95, 0.80, 0.58, 0.35 and
    0.18. This is the case if each unit takes an exponentially distributed time, as Goren et al. 2025, "Adaptive
    deadline and batch layered synchronized federated learning", have it.
    """

    mean: float

    def __post_init__(self) -> None:
        if not self.mean >= 0:
            raise ValueError(f"mean={self.mean}: units that a late rank finishes on average, such as 3")

    def draw(self, count: int, num_units: int, generator: Generator) -> Tensor:
        further = torch.poisson(torch.full((count,), float(self.mean)), generator=generator)
        return (1 + further.long()).clamp(max=num_units)


@final
class Nobody(LatePattern):
    """All ranks finish all units."""

    def reached(self, num_ranks: int, num_units: int, generator: Generator) -> Tensor:  # noqa: ARG002
        return torch.ones(num_ranks, num_units, dtype=torch.bool)


class _SomeRanks(LatePattern):
    """``late`` ranks are late, and finish as much as ``reach`` says (default: nothing)."""

    def __init__(self, late: int, reach: ReachDistribution | None = None) -> None:
        check_count("late", late)
        if reach is not None and not isinstance(reach, ReachDistribution):
            raise TypeError(
                f"reach={reach!r}: give a distribution, such as straggle.lab.learning.lateness.SameReach(0.5)"
            )
        self.late = late
        self.reach = reach or SameReach()

    @abstractmethod
    def _ranks(self, num_ranks: int, generator: Generator) -> Tensor:
        """The late ranks of the next step, int64 of shape (late,)."""

    @final
    def reached(self, num_ranks: int, num_units: int, generator: Generator) -> Tensor:
        _check(self.late, num_ranks)
        finished = torch.full((num_ranks,), num_units)
        finished[self._ranks(num_ranks, generator)] = self.reach.draw(self.late, num_units, generator)
        return torch.arange(num_units) < finished.unsqueeze(1)


@final
class SameRanks(_SomeRanks):
    """The last ``late`` ranks are late in every step, and finish as much as ``reach`` says (default: nothing)."""

    def _ranks(self, num_ranks: int, generator: Generator) -> Tensor:  # noqa: ARG002
        return torch.arange(num_ranks - self.late, num_ranks)


@final
class OtherRanks(_SomeRanks):
    """In each step other ``late`` ranks are late, and finish as much as ``reach`` says (default: nothing)."""

    def _ranks(self, num_ranks: int, generator: Generator) -> Tensor:
        return torch.randperm(num_ranks, generator=generator)[: self.late]


@final
class OtherRanksPerUnit(LatePattern):
    """Of each unit the part of ``late`` ranks is missing, drawn for each unit: the first N - ``late`` packets."""

    def __init__(self, late: int) -> None:
        check_count("late", late)
        self.late = late

    def reached(self, num_ranks: int, num_units: int, generator: Generator) -> Tensor:
        _check(self.late, num_ranks)
        drawn = torch.rand(num_ranks, num_units, generator=generator)
        return drawn.argsort(dim=0).argsort(dim=0) >= self.late


@final
class ByDeadline(LatePattern):
    """The ranks that a deadline makes late under these delays; a unit that a late rank leaves unfinished does not
    count.

    The policy is one of the library's, and sees the times of the steps as in training (`straggle.lab.simulate`).
    ``step_s``: seconds of a step's work without delay.
    """

    def __init__(
        self, deadline: Deadline, delays: Delays, *, late_handling: LateHandling | None = None, step_s: float = 1.0
    ) -> None:
        self.deadline = deadline
        self.delays = delays
        self.late_handling = late_handling or LateHandling()
        self.step_s = step_s
        self._steps: Iterator[Tensor] | None = None
        if self.late_handling.granularity != "stage":
            raise ValueError(
                f"granularity={self.late_handling.granularity}: with one micro-batch in a step, only stage"
            )

    def reached(self, num_ranks: int, num_units: int, generator: Generator) -> Tensor:
        if self._steps is None:
            self._steps = self._begin(num_ranks, num_units, generator)
        return next(self._steps)

    def _begin(self, num_ranks: int, num_units: int, generator: Generator) -> Iterator[Tensor]:
        units = self.delays.units(Work(self.step_s, num_stages=num_units).units("stage"))
        if len(units.base_s) != num_units:
            raise ValueError(
                f"the recorded run has {len(units.base_s)} stages, and a rank here passes {num_units} units: set "
                f"stages={len(units.base_s)}"
            )
        cluster = Cluster(num_ranks, units, self.deadline, self.late_handling, Constant(), num_ranks)
        for unit_s in self.delays.steps(units.base_s, num_ranks, generator):
            yield cluster.step(unit_s.cumsum(1)) >= 1


@final
class DropWhole(LatePattern):
    """As ``inner``, but a late rank's complete gradient is dropped."""

    def __init__(self, inner: LatePattern) -> None:
        self.inner = inner

    def reached(self, num_ranks: int, num_units: int, generator: Generator) -> Tensor:
        reached = self.inner.reached(num_ranks, num_units, generator)
        return reached.all(dim=1, keepdim=True).expand_as(reached)


def _check(late: int, num_ranks: int) -> None:
    if late > num_ranks:
        raise ValueError(f"late={late}: of {num_ranks} ranks, 0 to {num_ranks} can be late")
