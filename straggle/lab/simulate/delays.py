"""The delays of a simulated cluster's ranks: the seconds of each rank's work, step after step, from a model or
from a recorded run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Generator, Tensor

from straggle.advise.timings import read_timings
from straggle.lab.faults import dropcompute_factors
from straggle.lab.simulate.communication import at_least_0
from straggle.lab.simulate.units import Units
from straggle.policies.deadline import check_count


class Delays(ABC):
    """Draws the seconds of a step's work for each rank, step after step without end."""

    def units(self, units: Units) -> Units:
        """The work that is delayed: the given work, or its own if it was recorded."""
        return units

    @abstractmethod
    def steps(self, base_s: Tensor, ranks: int, generator: Generator) -> Iterator[Tensor]:
        """For each step the seconds of each unit, of shape (ranks, units); ``base_s`` (units,) are those without delay.

        All random numbers come from ``generator``, so that a seed gives the same delays under every policy.
        """


class _Factor(Delays):
    """Each unit of each rank takes its time multiplied by an independent factor."""

    @abstractmethod
    def factors(self, shape: Sequence[int], generator: Generator) -> Tensor:
        """Independent factors."""

    def steps(self, base_s: Tensor, ranks: int, generator: Generator) -> Iterator[Tensor]:
        while True:
            yield self.factors((ranks, len(base_s)), generator).mul_(base_s)


@final
class NoDelay(_Factor):
    """All ranks take the same time in all steps."""

    def factors(self, shape: Sequence[int], generator: Generator) -> Tensor:  # noqa: ARG002
        return torch.ones(tuple(shape))


@final
class Normal(_Factor):
    """Normal times: a unit's time has this ``std``, relative to its mean; no time is below 0."""

    def __init__(self, std: float = 0.1) -> None:
        self.std = at_least_0("std", std)

    def factors(self, shape: Sequence[int], generator: Generator) -> Tensor:
        return torch.randn(tuple(shape), generator=generator).mul_(self.std).add_(1.0).clamp_(min=0.0)


@final
class LogNormal(_Factor):
    """Log-normal times: their logarithm has the standard deviation ``sigma``, and their median is the base time."""

    def __init__(self, sigma: float = 0.3) -> None:
        self.sigma = at_least_0("sigma", sigma)

    def factors(self, shape: Sequence[int], generator: Generator) -> Tensor:
        return torch.randn(tuple(shape), generator=generator).mul_(self.sigma).exp_()


@final
class Exponential(_Factor):
    """Each unit takes longer by an exponentially distributed part of its time, with this ``mean``."""

    def __init__(self, mean: float = 0.5) -> None:
        self.mean = at_least_0("mean", mean)

    def factors(self, shape: Sequence[int], generator: Generator) -> Tensor:
        uniform = torch.rand(tuple(shape), generator=generator)  # below 1, so that the logarithm is finite
        return uniform.neg_().log1p_().mul_(-self.mean).add_(1.0)


@final
class DropCompute(_Factor):
    """The delay model of DropCompute: a unit takes ``1 + 0.5 * factor * X`` times its time (`dropcompute_factors`)."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = at_least_0("factor", factor)

    def factors(self, shape: Sequence[int], generator: Generator) -> Tensor:
        return dropcompute_factors(shape, generator, self.factor, torch.float32)


class _DelaysWrapper(Delays):
    """Delays on top of others."""

    def __init__(self, inner: Delays) -> None:
        if not isinstance(inner, Delays):
            raise TypeError(f"inner={inner!r}: give delays, such as straggle.lab.simulate.delays.NoDelay()")
        self.inner = inner

    def units(self, units: Units) -> Units:
        return self.inner.units(units)


@final
class Stalls(_DelaysWrapper):
    """``inner``; and with this ``probability`` a rank stalls in a step, for ``seconds``, in one of its units."""

    def __init__(self, inner: Delays, probability: float, seconds: float) -> None:
        super().__init__(inner)
        self.probability = _share("probability", probability)
        self.seconds = at_least_0("seconds", seconds)

    def steps(self, base_s: Tensor, ranks: int, generator: Generator) -> Iterator[Tensor]:
        for unit_s in self.inner.steps(base_s, ranks, generator):
            stalled = (torch.rand(ranks, generator=generator) < self.probability).nonzero().squeeze(1)
            where = torch.randint(unit_s.shape[1], (len(stalled),), generator=generator)
            unit_s[stalled, where] += self.seconds
            yield unit_s


@final
class SlowRanks(_DelaysWrapper):
    """``inner``; and a ``share`` of the ranks takes ``factor`` times as long: always, or for a time.

    ``lasts_steps``: how many steps a rank stays slow on average, geometrically distributed. Then other ranks become
    slow, so that the mean share stays the same. Infinite: the same ranks are slow in all steps, at least one of them
    unless the share is 0.
    """

    def __init__(self, inner: Delays, share: float, factor: float, *, lasts_steps: float = math.inf) -> None:
        super().__init__(inner)
        self.share = _share("share", share)
        self.factor = at_least_0("factor", factor)
        if not lasts_steps >= 1:
            raise ValueError(f"lasts_steps={lasts_steps}: must be a number of steps from 1 on")
        if lasts_steps < math.inf and share >= lasts_steps / (1 + lasts_steps):
            raise ValueError(f"share={share}: with lasts_steps={lasts_steps} it must be below lasts / (1 + lasts)")
        self.lasts_steps = lasts_steps

    def steps(self, base_s: Tensor, ranks: int, generator: Generator) -> Iterator[Tensor]:
        ends = 1 / self.lasts_steps
        begins = ends * self.share / (1 - self.share) if ends else 0.0  # as many begin as end
        if ends:
            slow = torch.rand(ranks, generator=generator) < self.share
        else:
            slow = torch.zeros(ranks, dtype=torch.bool)
            slow[torch.randperm(ranks, generator=generator)[: math.ceil(self.share * ranks)]] = True
        for unit_s in self.inner.steps(base_s, ranks, generator):
            unit_s[slow] *= self.factor
            yield unit_s
            if ends:
                draw = torch.rand(ranks, generator=generator)
                slow = torch.where(slow, draw >= ends, draw < begins)


@final
class RecordedDelays(Delays):
    """The steps of a recorded run, in blocks of ``block`` steps that begin at random.

    ``trace``: what `advise` reads, such as a ``trace.jsonl`` or its folder. What a late rank did not finish takes as
    much longer than its peers' as what it did (`read_timings`).

    Adjacent steps stay together, and so do the ranks of a step. With more ranks than were recorded, each further group
    of ranks has its own blocks. ``block=0``: all steps in their order, again and again.
    """

    def __init__(self, trace: str, *, block: int = 20) -> None:
        check_count("block", block)
        self.block = block
        timings = read_timings(Path(trace))
        # earlier micro-batches of a step are in its first stage
        ends_s = torch.from_numpy(timings.unit_s[..., -len(timings.stage_share) :]).float()
        self._unit_s = ends_s.diff(dim=-1, prepend=torch.zeros_like(ends_s[..., :1])).clamp(min=0)
        self._stage_share = torch.from_numpy(timings.stage_share).float()
        self._overhead_s = float(np.median(timings.network_s + np.median(timings.entered_s, axis=1)))

    def units(self, units: Units) -> Units:  # noqa: ARG002
        share, base_s = self._stage_share, self._unit_s.flatten(0, 1).median(0).values
        return Units(base_s, share, share, None, self._overhead_s, overlaps=False, merged=True)

    def steps(self, base_s: Tensor, ranks: int, generator: Generator) -> Iterator[Tensor]:  # noqa: ARG002
        groups = -(-ranks // self._unit_s.shape[1])
        orders = [self._order(len(self._unit_s), generator) for _ in range(groups)]
        while True:
            yield torch.cat([self._unit_s[next(order)] for order in orders])[:ranks]

    def _order(self, steps: int, generator: Generator) -> Iterator[int]:
        """Numbers of recorded steps: blocks, from the end around to the beginning, so that all are equally likely."""
        while True:
            first = int(torch.randint(steps, (), generator=generator)) if self.block else 0
            yield from (number % steps for number in range(first, first + (self.block or steps)))


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value}: must lie between 0 and 1")
    return float(value)
