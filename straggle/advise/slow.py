"""Which ranks are slow, since when, how steadily, and in which phase.

A rank's excess in a step is its own work minus the median of the other ranks' in the same step. In each step the job
loses the excess of the slowest rank. This loss is split among the ranks that were slowest, and each rank's part among
its phases, by the same difference for each phase.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from straggle.advise.timings import Timings
from straggle.observe.numbers.intervals import Interval, steps_interval
from straggle.observe.numbers.run import Array

Positions: TypeAlias = NDArray[np.signedinteger[Any]]
ATTRIBUTED = 0.8  # of the excess, that the named phases account for
SLOW = 1.1  # times the other ranks' own work, from which on a rank is slow
MATTERS = 0.03  # of the mean step, that a rank must cost to be named
UNUSUAL = 2.0  # times its peers' mean excess: if all ranks are noisy, now one is the slowest and now another
HELD_UP = 1.5  # times the other ranks' own work, from which on a step is held up, whoever does it
ALWAYS = 0.5  # of its steps, from which on a rank is always slow
_LEAST_SEGMENT = 8  # steps
_SURE = 1e-5  # chance that a change point is none


@dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for.

    ``since`` is the step from which on it is slow, ``None`` from the first; ``until`` the step at which it recovered,
    ``None`` if it has not. ``steady`` is the share of these steps in which it was slow: 0.95 is a persistently slow
    rank, 0.02 one that sometimes stalls. ``excess_s`` is its mean excess in these steps, ``times`` its own work divided
    by the others'. ``phases`` are the shares of the excess, largest first. ``named`` are the phases that make up most
    of it, and ``attributed`` is the share that these explain. ``slowdown``: how many times as long the job takes
    because of this rank, over all steps of the trace. ``lost_share`` is the rank's share of what the job loses to slow
    ranks.
    """

    rank: int
    since: int | None
    until: int | None
    steady: float
    excess_s: float
    times: float
    phases: dict[str, float]
    named: tuple[str, ...]
    attributed: float
    slowdown: Interval
    lost_share: float

    @property
    def is_always(self) -> bool:
        """Whether it is slow in most steps, and still is, and does not only stall now and then."""
        return self.steady >= ALWAYS and self.until is None


@dataclass(frozen=True)
class Slowness:
    """All slow ranks, the costliest first; ``lost_s`` is the mean excess of a step's slowest rank.

    ``attributed`` is the share of it that the named ranks and phases explain. ``network_s`` is the mean time of a step
    after the slowest rank's own work. ``held_up_s`` is what the steps cost in which any rank takes much longer than the
    others, as a mean over all steps.
    """

    ranks: tuple[SlowRank, ...]
    step_s: float
    lost_s: float
    attributed: float
    network_s: float
    held_up_s: float

    @property
    def last_change(self) -> int | None:
        """The step at which a rank last became slow, or recovered; ``None`` if no rank changed."""
        steps = [rank.since if rank.until is None else rank.until for rank in self.ranks]
        return max((step for step in steps if step is not None), default=None)

    @property
    def somebody_is_waited_for(self) -> bool:
        """Whether more is lost than the ordinary difference between ranks."""
        return bool(self.ranks) or self.held_up_s >= MATTERS * self.step_s


def find_slow_ranks(timings: Timings) -> Slowness:
    """Which ranks are slow, since when and in which phase."""
    own = timings.own_s
    if timings.num_ranks == 1:
        return Slowness((), float(timings.seconds.mean()), 0.0, 0.0, float(timings.network_s.mean()), 0.0)
    excess = own - _others(own)
    slowest = own.argmax(axis=1)
    lost = np.maximum(0.0, excess[np.arange(len(own)), slowest])
    behind_s = np.maximum(0.0, excess).mean(axis=0)
    step_s = float(timings.seconds.mean())
    found = list[SlowRank]()
    for rank in range(timings.num_ranks):
        cost = float(lost[slowest == rank].sum() / len(own))
        usual_s = float(np.median(np.delete(behind_s, rank)))
        if behind_s[rank] < UNUSUAL * usual_s:
            continue
        if cost >= MATTERS * step_s and (one := _slow_rank(timings, rank, excess[:, rank], cost / float(lost.mean()))):
            found.append(one)
    slow = {one.rank for one in found}
    found = [replace(one, slowdown=slowdown(timings, one.rank, slow=slow)) for one in found]
    explained = sum(rank.lost_share * rank.attributed for rank in found)
    found.sort(key=lambda rank: -rank.lost_share)
    held_up = own.max(axis=1) >= HELD_UP * (own.max(axis=1) - lost)
    held_up_s = float((lost * held_up).mean())
    return Slowness(tuple(found), step_s, float(lost.mean()), explained, float(timings.network_s.mean()), held_up_s)


def _slow_rank(timings: Timings, rank: int, excess: Array, lost_share: float) -> SlowRank | None:
    others = _others(timings.own_s)[:, rank]
    ratio = 1 + excess / np.maximum(others, 1e-9)
    if (late := timings.late[:, rank]).mean() >= ALWAYS and (ratio >= SLOW).any():
        # it was late in most steps, and what it takes for several of them may be all in the first
        ratio = np.where(late, np.maximum(ratio, np.median(ratio[ratio >= SLOW])), ratio)
    first, end = slow_period(ratio)
    flags = ratio[first:end] >= SLOW
    if not flags.any():
        return None
    slow_steps = np.flatnonzero(flags) + first
    shares = _phase_shares(timings, rank, slow_steps)
    named, attributed = _most(shares)
    return SlowRank(
        rank=rank,
        since=None if first == 0 else int(timings.step[first]),
        until=None if end == len(ratio) else int(timings.step[end]),
        steady=float(flags.mean()),
        excess_s=float(excess[slow_steps].mean()),
        times=float(np.median(ratio[slow_steps])),
        phases=shares,
        named=named,
        attributed=attributed,
        slowdown=Interval(math.nan, math.nan, math.nan),  # until all slow ranks are known
        lost_share=lost_share,
    )


def _others(values: Array) -> Array:
    """For each rank the median of the other ranks' values in the same step."""
    return np.stack([np.median(np.delete(values, rank, axis=1), axis=1) for rank in range(values.shape[1])], axis=1)


def _phase_shares(timings: Timings, rank: int, steps: Positions) -> dict[str, float]:
    """The share of the rank's excess in these steps for each phase, largest first; together at most 1."""
    total = float((timings.own_s - _others(timings.own_s))[steps, rank].sum())
    of = {p: float((values - _others(values))[steps, rank].sum()) for p, values in timings.phases.items()}
    return {phase: of[phase] / total for phase in sorted(of, key=lambda phase: -of[phase])}


def _most(shares: dict[str, float]) -> tuple[tuple[str, ...], float]:
    """The phases that explain most of the excess, and the share that they explain."""
    named, explained = list[str](), 0.0
    for phase, share in shares.items():
        if explained >= ATTRIBUTED or share <= 0:
            break
        named.append(phase)
        explained += share
    return tuple(named), min(1.0, explained)


def slowdown(timings: Timings, rank: int, seed: int = 0, *, slow: Collection[int] = ()) -> Interval:
    """The job's time divided by what it would be if ``rank`` were like its peers.

    The rank is replaced by one that differs from its peers' median in the step by as much as a random peer that is not
    ``slow`` does in a random step. So the number of ranks stays the same, and what slows all ranks at once stays, too.
    """
    random = np.random.default_rng(seed)
    own = timings.own_s.copy()
    peers = np.delete(own, rank, axis=1)
    middle = np.median(peers, axis=1)
    like = [other for other in range(timings.num_ranks) if other != rank and other not in slow]
    apart = ((own[:, like] if like else peers) - middle[:, None]).ravel()
    own[:, rank] = middle + apart[random.integers(len(apart), size=len(own))]
    before_s = timings.own_s.max(axis=1) + timings.network_s
    return steps_interval(np.divide, before_s, own.max(axis=1) + timings.network_s, seed=seed)


def slow_period(ratio: Array) -> tuple[int, int]:
    """The positions between which a rank's times, relative to its peers', are at their highest level.

    The series is cut at its change points. Adjacent pieces whose median is slow belong together. If no piece is slow by
    its median, a rank that sometimes stalls has the entire series.
    """
    cuts = [0, *change_points(ratio), len(ratio)]
    slow = [float(np.median(ratio[a:b])) >= SLOW for a, b in pairwise(cuts)]
    if not any(slow):
        return 0, len(ratio)
    last = max(piece for piece, flag in enumerate(slow) if flag)
    first = last
    while first > 0 and slow[first - 1]:
        first -= 1
    return cuts[first], cuts[last + 1]


def change_points(series: Array, begin: int = 0) -> list[int]:
    """Positions at which the level of a series changes for good.

    Pettitt's test (Applied Statistics 28, 1979) uses the order of the values, which single stalls hardly change. It is
    applied to the entire series and to shorter and shorter parts of it (seeded intervals, Kovács et al., Biometrika
    110, 2023), so that a rank that was slow for a while is found too. Then it is applied again on both sides of the
    surest change.
    """
    tested = [_change_point(series[a:b], a) for a, b in _intervals(len(series))]
    if not tested or (surest := min(tested))[0] > _SURE:
        return []
    at = surest[1]
    return [*change_points(series[:at], begin), begin + at, *change_points(series[at:], begin + at)]


def _intervals(size: int) -> list[tuple[int, int]]:
    """The entire series, and overlapping parts, each length 0.7 times the one before."""
    parts, length = list[tuple[int, int]](), float(size)
    while length >= 2 * _LEAST_SEGMENT:
        number = 2 * math.ceil(size / length) - 1
        begins = [round(k * (size - length) / max(1, number - 1)) for k in range(number)]
        parts += [(begin, min(size, begin + round(length))) for begin in begins]
        length *= 0.5**0.5
    return parts


def _change_point(series: Array, begin: int) -> tuple[float, int]:
    """The probability that the likeliest change is none, and its position."""
    size = len(series)
    order = np.argsort(np.argsort(series, kind="stable"), kind="stable") + 1
    statistic = 2 * np.cumsum(order)[:-1] - np.arange(1, size) * (size + 1)
    inside = np.abs(statistic[_LEAST_SEGMENT - 1 : size - _LEAST_SEGMENT])
    at = int(inside.argmax()) + _LEAST_SEGMENT
    before, after = float(np.median(series[:at])), float(np.median(series[at:]))
    if abs(after - before) < (SLOW - 1) / 2 * before:  # sure or not, it is too little
        return math.inf, begin + at
    return 2 * math.exp(-6 * float(inside.max()) ** 2 / (size**3 + size**2)), begin + at
