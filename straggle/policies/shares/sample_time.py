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

_SPREAD = 0.5  # of ``u`` around what is usual, as a standard deviation
_TURNS = 3  # of finding the ranks' ``u``, and what is usual
_BEYOND = 0.5  # a change of the time that is so much more than its samples can cause says nothing
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
    not at all. A change counts half as much as the one after it; of a rank whose number of samples has hardly changed,
    the others tell.
    """
    told, ranks = [_Told.by(change, mean, drift) for change in changes], range(len(counts))
    usual = 1.0
    for _ in range(_TURNS):
        parts = [_Part.of(told, rank, usual) for rank in ranks]
        usual = (1 + math.fsum(own.told * own.part for own in parts)) / (1 + math.fsum(own.told for own in parts))
    return [
        _rank_time(own.part, count, now_s, mean, is_known=any(change.tells(rank) for change in told))
        for rank, (own, count, now_s) in enumerate(zip(parts, counts, seconds, strict=True))
    ]


@dataclass(frozen=True)
class _Told:
    """By rank the ``x`` and ``y`` above, and the variance of ``y``; NaN: not known."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    variance: tuple[float, ...]

    @staticmethod
    def by(change: Change, mean: float, drift: float) -> _Told:
        before, after = change.before, change.after
        y = [new / old - 1 for old, new in zip(before.seconds, after.seconds, strict=True)]
        counts = zip(before.counts, after.counts, y, strict=True)
        x = [(new - old - own * (old - mean)) / mean for old, new, own in counts]
        errors = zip(y, before.errors, after.errors, strict=True)
        variance = [(1 + own) ** 2 * (old**2 + new**2 + drift**2) for own, old, new in errors]
        return _Told(tuple(x), tuple(y), tuple(variance))

    def says(self, rank: int) -> bool:
        """Whether the rank's time did what its samples can cause."""
        x, y = self.x[rank], self.y[rank]
        return min(0.0, x) - _BEYOND <= y <= max(0.0, x) + _BEYOND  # not for NaN

    def tells(self, rank: int) -> bool:
        """Whether its samples were clearly more, or fewer."""
        return abs(self.x[rank]) >= _CLEAR and self.says(rank)


@dataclass(frozen=True)
class _Part:
    """The ``u`` of a rank, and how much of it was ``told`` by changes: 0 to 1."""

    part: float
    told: float

    @staticmethod
    def of(told: Sequence[_Told], rank: int, usual: float) -> _Part:
        """The mean of what is ``usual`` and of what changes say, weighted by their precision."""
        prior = 1 / _SPREAD**2
        total = precision = 0.0
        for age, change in enumerate(reversed(told)):
            if change.says(rank):
                x, weight = change.x[rank], 0.5**age / max(1e-12, change.variance[rank])
                precision += weight * x**2
                total += weight * x * change.y[rank]
        part = (prior * usual + total) / (prior + precision)
        return _Part(min(1.0, max(0.0, part)), precision / (prior + precision))


def _rank_time(part: float, count: float, seconds: float, mean: float, *, is_known: bool) -> RankTime:
    by_samples_s = seconds * part * count / (part * count + (1 - part) * mean) if part * count else 0.0
    return RankTime(seconds - by_samples_s, by_samples_s / count if count else 0.0, is_known)
