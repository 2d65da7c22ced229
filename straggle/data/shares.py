"""How many samples of a step each rank has, if it is known what it takes for them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from straggle.policies.shares.sample_time import RankTime

_LEAST = 1e-6  # of a rank's time, that goes with a sample


def exact_shares(
    total: float, speeds: Sequence[float], overheads: Sequence[float], *, least: float = 0.0
) -> list[float]:
    """Shares of sum ``total``, at least ``least`` each, with which all ranks that have more finish together.

    ``share + overhead`` of a rank takes it that many times ``1 / speed`` seconds.
    """
    small: set[int] = set()  # ranks that would have less than the least
    while True:
        others = [rank for rank in range(len(speeds)) if rank not in small]
        left = total - least * len(small) + math.fsum(overheads[rank] for rank in others)
        seconds = left / math.fsum(speeds[rank] for rank in others) if others else 0.0
        shares = [seconds * speed - overhead for speed, overhead in zip(speeds, overheads, strict=True)]
        if not (more := {rank for rank in others if shares[rank] < least}):
            return [least if rank in small else share for rank, share in enumerate(shares)]
        small |= more


def soonest(total: int, times: Sequence[RankTime], *, least: int = 0) -> list[int]:
    """Integers of sum ``total``, at least ``least`` each, with which the slowest rank is done as soon as it can be.

    The exact shares rounded down, and what is left one by one to whoever is done with it first. In Python's own floats,
    whose results are the same on every machine.
    """
    per_unit_s = [max(of.per_sample_s, _LEAST * of.fixed_s, 1e-12) for of in times]
    overheads = [of.fixed_s / own for of, own in zip(times, per_unit_s, strict=True)]
    exact = exact_shares(total, [1 / own for own in per_unit_s], overheads, least=least)
    units = [max(least, int(share)) for share in exact]
    queue = [(of.seconds(count + 1), rank) for rank, (count, of) in enumerate(zip(units, times, strict=True))]
    heapq.heapify(queue)
    for _ in range(total - sum(units)):
        _, rank = queue[0]
        units[rank] += 1
        heapq.heapreplace(queue, (times[rank].seconds(units[rank] + 1), rank))
    return units


def deal(total: int, times: Sequence[RankTime], *, least: int = 0, spare: float = 0.0) -> list[int]:
    """Of all ways in which the slowest rank takes at most ``1 + spare`` times the shortest time, the most equal one.

    What a rank takes whatever its share is no reason to give it less: only as many as it has no time for go to others.
    """
    units = soonest(total, times, least=least)
    limit_s = (1 + spare) * max(of.seconds(count) for of, count in zip(times, units, strict=True))
    most = [max(count, _number_in(of, limit_s, total)) for of, count in zip(times, units, strict=True)]
    low, high = least, total  # each rank has this level, or its most
    while low < high:
        level = (low + high + 1) // 2
        low, high = (level, high) if sum(min(level, own) for own in most) <= total else (low, level - 1)
    shares = [min(low, own) for own in most]
    more = sorted((of.seconds(low + 1), rank) for rank, of in enumerate(times) if most[rank] > low)
    for _, rank in more[: total - sum(shares)]:
        shares[rank] += 1
    return shares


def _number_in(of: RankTime, limit_s: float, most: int) -> int:
    """How many samples the rank has time for, up to ``most``."""
    if of.seconds(most) <= limit_s:
        return most
    return max(0, int((limit_s - of.fixed_s) / max(1e-12, of.per_sample_s) + 1e-9))
