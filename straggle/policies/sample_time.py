"""What of each rank's time goes with the number of its samples, and what does not: from what changes of it did.

A rank takes ``f + p n`` seconds for ``n`` samples. At the mean count ``N`` the samples' share of that is
``u = p N / (f + p N)``. If ``n'`` samples instead of ``n`` change its time by the factor ``1 + y``, then

    y = u x,   x = (n' - n - y (n - N)) / N

whatever the rank's speed. Where nothing has changed yet, all of the time is taken to go with the samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

_SPREAD = 0.5  # of ``u`` around what is usual, as a standard deviation
_TURNS = 3  # of finding the ranks' ``u``, and what the machine did
_BEYOND = 0.5  # a change of the time that is so much more than its samples can cause says nothing
_ALONE = 2  # so many ranks do not show what the machine did to all
_CLEAR = 0.1  # a change of the count by this share of the mean shows what goes with it


@dataclass(frozen=True)
class Level:
    """Each rank's typical ``seconds`` for so many samples (``counts``), with their relative standard errors.

    NaN: not known.
    """

    counts: tuple[float, ...]
    seconds: tuple[float, ...]
    errors: tuple[float, ...]


@dataclass(frozen=True)
class Change:
    """What the ranks took just before their numbers of samples changed, and just after that."""

    before: Level
    after: Level

    def without(self, ranks: Sequence[int]) -> Change:
        """Of these ranks it says nothing."""
        seconds = [math.nan if rank in ranks else own for rank, own in enumerate(self.after.seconds)]
        return replace(self, after=replace(self.after, seconds=tuple(seconds)))


@dataclass(frozen=True)
class RankTime:
    """A rank takes ``fixed_s`` and ``per_sample_s`` for each sample; ``is_known``: by what it took for other counts."""

    fixed_s: float
    per_sample_s: float
    is_known: bool = False

    def seconds(self, count: float) -> float:
        """For so many samples."""
        return self.fixed_s + self.per_sample_s * count


def split(
    changes: Sequence[Change], mean: float, counts: Sequence[float], seconds: Sequence[float], *, drift: float = 0.05
) -> list[RankTime]:
    """Each rank's time, if it takes ``seconds`` for ``counts`` samples now; ``mean`` of them are an equal share.

    ``drift``: by how much a machine becomes slower, or quicker, between two measurements, as a standard deviation; 0:
    not at all. What it did to all of three or more ranks is left out. A change counts half as much as the one after it;
    of a rank whose number of samples has hardly changed, the others tell.
    """
    told, ranks = [_Told.by(change, mean, drift) for change in changes], range(len(counts))
    machine, usual = [1.0] * len(told), 1.0
    for _ in range(_TURNS):
        parts = [_Part.of(told, machine, rank, usual) for rank in ranks]
        usual = (1 + math.fsum(own.told * own.part for own in parts)) / (1 + math.fsum(own.told for own in parts))
        machine = [change.machine(parts) for change in told]
    return [
        _rank_time(own.part, count, now_s, mean, is_known=any(change.tells(rank) for change in told))
        for rank, (own, count, now_s) in enumerate(zip(parts, counts, seconds, strict=True))
    ]


@dataclass(frozen=True)
class _Told:
    """By rank: its ``counts`` before and after a change, the factor of its time, and that factor's relative variance.

    NaN: not known.
    """

    mean: float
    counts: tuple[tuple[float, float], ...]
    factors: tuple[float, ...]
    variances: tuple[float, ...]

    @staticmethod
    def by(change: Change, mean: float, drift: float) -> _Told:
        before, after = change.before, change.after
        factors = [new / old for old, new in zip(before.seconds, after.seconds, strict=True)]
        variances = [old**2 + new**2 + drift**2 for old, new in zip(before.errors, after.errors, strict=True)]
        counts = zip(before.counts, after.counts, strict=True)
        return _Told(mean, tuple(counts), tuple(factors), tuple(variances))

    def point(self, rank: int, machine: float) -> tuple[float, float]:
        """The ``x`` and ``y`` above, if the machine alone changed all times by this factor."""
        y, (old, new) = self.factors[rank] / machine - 1, self.counts[rank]
        return (new - old - y * (old - self.mean)) / self.mean, y

    def machine(self, parts: Sequence[_Part]) -> float:
        """By which factor the machine changed all times, if these parts of them go with the samples."""
        left = []
        for rank, own in enumerate(parts):
            old, new = ((1 - own.part) * self.mean + own.part * count for count in self.counts[rank])
            if not math.isnan(factor := self.factors[rank]) and min(old, new) > 0:
                left.append(factor * old / new)
        return median(left) if len(left) > _ALONE else 1.0

    def says(self, rank: int, machine: float = 1.0) -> bool:
        """Whether the rank's time did what its samples can cause."""
        x, y = self.point(rank, machine)
        return min(0.0, x) - _BEYOND <= y <= max(0.0, x) + _BEYOND  # not for NaN

    def tells(self, rank: int) -> bool:
        """Whether its samples were clearly more, or fewer."""
        return self.says(rank) and abs(self.point(rank, 1.0)[0]) >= _CLEAR


@dataclass(frozen=True)
class _Part:
    """The ``u`` of a rank, and how much of it was ``told`` by changes: 0 to 1."""

    part: float
    told: float

    @staticmethod
    def of(told: Sequence[_Told], machine: Sequence[float], rank: int, usual: float) -> _Part:
        """The mean of what is ``usual`` and of what changes say, weighted by their precision."""
        prior = 1 / _SPREAD**2
        total = precision = 0.0
        for age, (change, factor) in enumerate(zip(reversed(told), reversed(machine), strict=True)):
            if change.says(rank, factor):
                x, y = change.point(rank, factor)
                weight = 0.5**age / max(1e-12, (1 + y) ** 2 * change.variances[rank])
                precision += weight * x**2
                total += weight * x * y
        part = (prior * usual + total) / (prior + precision)
        return _Part(min(1.0, max(0.0, part)), precision / (prior + precision))


def _rank_time(part: float, count: float, seconds: float, mean: float, *, is_known: bool) -> RankTime:
    by_samples_s = seconds * part * count / (part * count + (1 - part) * mean) if part * count else 0.0
    return RankTime(seconds - by_samples_s, by_samples_s / count if count else 0.0, is_known)
