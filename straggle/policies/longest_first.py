"""Longest processing time first: work of unequal lengths for ranks of unequal speeds, so that all end together.

Graham, "Bounds on multiprocessing timing anomalies" (1969, section 4), and for unequal speeds Gonzalez, Ibarra and
Sahni, "Bounds for LPT schedules on uniform processors" (1977): what is dealt last is small.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def longest_first(costs: Sequence[float], speeds: Sequence[float]) -> list[list[int]]:
    """The places in ``costs``, in descending order, that each rank gets; a rank of speed 0 gets none.

    None of the others is left without any as long as there are enough. The same on every machine: it takes sums,
    quotients and comparisons only.
    """
    # of ranks that are equally fast, the one with the least is done first: one heap for each speed
    heaps: dict[float, list[tuple[float, int]]] = {}
    for rank, speed in enumerate(speeds):
        if speed > 0:
            heaps.setdefault(speed, []).append((0.0, rank))
    own: list[list[int]] = [[] for _ in speeds]
    num_empty = sum(map(len, heaps.values()))
    for place, cost in enumerate(costs):
        only_empty = len(costs) - place <= num_empty
        among = [speed for speed in heaps if not (only_empty and heaps[speed][0][0])]
        speed = min(among or heaps, key=lambda speed: ((heaps[speed][0][0] + cost) / speed, heaps[speed][0][1]))
        load, rank = heaps[speed][0]
        heapq.heapreplace(heaps[speed], (load + cost, rank))
        num_empty -= not own[rank]
        own[rank].append(place)
    return own
