"""Schedules that are written by hand, each dense with what one part of the library must bear; none of them fails.

`schedules.py` knows them by negative numbers: ``these=-1`` is the first. `benchmarks/planted.py` runs them before
others are drawn.
"""

from __future__ import annotations

import math
from typing import Any

from straggle.lab.world.faults import Cut, Freeze, Kill, Notice, Stall, StoreAway

_LATE: list[dict[str, Any]] = [
    # a rank is late in each step, in other layers and micro-batches, and weights differ
    {"steps": 15, "deadline": "0.05", "weighs": True, "slow": (1.0, 4.0, 1.5), "estimator": "LastMerged"},
    {"steps": 12, "deadline": "0.12", "num_microbatches": 3, "weighs": True, "slow": (1.0, 1.5, 4.0)},
    {"steps": 12, "deadline": "0.08", "estimator": "MovingAverage", "weighs": True, "slow": (1.5, 4.0, 1.0)},
    {"steps": 12, "deadline": "0.08", "estimator": "Zero", "granularity": "step", "slow": (1.0, 1.5, 4.0)},
    # gradients that are not finite, in some layers of some steps
    {"steps": 20, "nan": 0.1, "weighs": True, "check_every": 1, "buffers": "mean", "slow": (1.0, 1.5, 1.0)},
    # stalls in and between steps, with few merged steps that may wait
    {
        "steps": 25,
        "max_lag": 1,
        "faults": (Stall(1, 0.33, 1.0), Stall(0, 1.71, 0.7), Stall(1, 3.02, 0.2, turns=40), Stall(2, 4.4, 2.0)),
    },
    {
        "steps": 30,
        "max_lag": 2,
        "deadline": "0.05",
        "check_every": 1,
        "away": ((1, 3, 0.5), (0, 9, 0.5), (2, 14, 0.3), (1, 20, 3.0)),
        "faults": (Freeze(0, 0.41, 0.3), Freeze(2, 1.2, 0.2), Freeze(1, 2.0, 0.15)),
    },
    {"steps": 25, "max_lag": 0, "deadline": "0.05", "faults": (Stall(0, 0.5, 0.6), Stall(2, 1.9, 0.3, turns=10))},
    {"steps": 20, "deadline": "None", "grace_s": None, "away": ((0, 4, 0.5), (1, 9, 1.0), (2, 15, 0.4))},
    {"steps": 25, "zero_every": 3, "deadline": "0.05", "slow": (1.0, 4.0, 1.0), "faults": (Stall(1, 0.6, 1.0),)},
    # a loop that leaves its block, and one whose code raises
    {"steps": 12, "deadline": "0.08", "leaves": ((0, 3), (1, 3), (2, 5), (1, 8)), "estimator": "LastMerged"},
    {"steps": 12, "raises": (0, 5), "slow": (1.0, 4.0, 1.0)},
    {"steps": 12, "faults": (Kill(1, 0.47),), "slow": (1.0, 4.0, 1.0)},
    {"steps": 40, "deadline": "Auto", "slow": (1.0, 1.5, 4.0), "faults": (Stall(2, 2.0, 1.0),)},
    {"steps": 20, "deadline": "FirstK", "buffers": "rank0", "slow": (4.0, 1.0, 1.0), "wire_dtype": "bfloat16"},
    {"steps": 15, "joins": True, "deadline": "0.05", "slow": (1.0, 4.0, 1.0), "weighs": True},
    {"steps": 12, "faults": (StoreAway(0.5, 1.0), StoreAway(2.0, 4.0)), "deadline": "0.05", "slow": (1.0, 4.0, 1.0)},
    {"steps": 12, "num_parts": 8, "joins": True, "slow": (1.0, 4.0, 1.0), "deadline": "0.15"},
    {"steps": 12, "num_parts": 5, "weighs": True, "slow": (1.0, 2.0, 1.0), "faults": (Stall(0, 0.7, 1.0),)},
]

_MEMBERS: list[dict[str, Any]] = [
    # one after the other is killed and comes back: the lowest, one between, several times
    {"steps": 50, "suspect_s": 0.5, "faults": (Kill(1, 0.46, 0.3), Kill(0, 2.0, 0.7), Kill(1, 3.6, 0.2))},
    {"steps": 40, "ranks": 4, "suspect_s": 0.5, "faults": (Kill(0, 0.47, 0.9), Kill(1, 0.52, 0.6), Kill(2, 2.3, 0.5))},
    # killed while buckets travel, with weights and estimates: who remains has what some had already
    *(
        {"steps": 12, "ranks": 4, "weighs": True, "suspect_s": 0.5, "slow": (1.0, 1.0, 1.5, 1.0), "faults": (kill,)}
        for kill in (Kill(0, 0.452), Kill(1, 0.455), Kill(0, 0.552, turns=7), Kill(1, 0.548, turns=23))
    ),
    {
        "steps": 20,
        "ranks": 4,
        "estimator": "MovingAverage",
        "suspect_s": 0.5,
        "faults": (Kill(0, 0.5, turns=11), Kill(2, 0.9, 0.2, turns=31)),
    },
    # frozen, and put out meanwhile; frozen for less than that
    {"steps": 60, "suspect_s": 0.5, "faults": (Freeze(0, 0.42, 0.9), Freeze(1, 2.2, 0.6), Freeze(0, 3.8, 0.45))},
    {
        "steps": 60,
        "ranks": 4,
        "suspect_s": 0.5,
        "faults": (Freeze(0, 0.42, 0.9), Freeze(1, 0.6, 0.9), Freeze(2, 2.6, 0.7), Kill(1, 3.4, 0.2)),
    },
    # cut off, alone and with others, and from the store
    {"steps": 60, "suspect_s": 0.5, "faults": (Cut(0, 0.42, 1.5), Cut(1, 3.2, 0.3), Cut(1, 4.4, 2.0))},
    {"steps": 50, "faults": (StoreAway(0.5, 1.5), Kill(1, 1.0, 0.5), StoreAway(4.0, 1.0, empties=True))},
    # falls behind, and takes a state in place, again and again
    {"steps": 60, "max_lag": 1, "faults": (Stall(1, 0.4, 0.6), Stall(0, 1.8, 0.6), Stall(1, 3.3, 0.8))},
    {"steps": 40, "max_lag": 2, "deadline": "0.05", "zero_every": 2, "away": ((1, 3, 1.0), (0, 12, 1.0), (1, 25, 0.7))},
    # put out as it is slow, and kept out
    {"steps": 60, "deadline": "0.05", "slow": (1.0, 4.0, 1.0), "absence_gain": 1.0},
    {"steps": 40, "slow": (4.0, 1.0, 1.0), "deadline": "None", "absence_gain": 1.1, "faults": (Kill(1, 3.0, 0.5),)},
    # told to end; a loop whose code raises
    {"steps": 30, "faults": (Notice(0, 0.55), Kill(1, 1.2, 0.4)), "suspect_s": 0.5},
    {"steps": 30, "raises": (0, 6), "num_microbatches": 2, "faults": (Kill(1, 0.8, 0.6),), "suspect_s": 0.5},
    # policies with a memory; a pool; ranks without data
    {"steps": 50, "deadline": "Quantile", "slow": (1.0, 1.5, 1.0), "suspect_s": 0.5, "faults": (Kill(0, 1.3, 0.4),)},
    {"steps": 50, "deadline": "Auto", "slow": (1.0, 1.5, 1.0), "suspect_s": 0.5, "faults": (Freeze(0, 1.3, 0.9),)},
    {"steps": 25, "num_parts": 8, "suspect_s": 0.5, "faults": (Kill(1, 0.7, 0.5), Kill(0, 2.4, turns=9))},
    {"steps": 25, "joins": True, "suspect_s": 0.5, "buffers": "mean", "faults": (Kill(1, 0.5, 0.4), Kill(0, 1.7, 0.4))},
]

_MEMBERS += [  # one is killed, or stops for longer than the others bear, at some turn of a merge
    {"steps": 14, "ranks": 4, "suspect_s": 0.5, "weighs": True, "estimator": "LastMerged", "faults": faults}
    for turns in range(5, 95, 15)
    for faults in [
        (Kill(0, 0.43, 0.3, turns=turns), Kill(2, 0.44, turns=2 * turns)),
        (Freeze(0, 0.43, 0.52, turns=turns), Kill(1, 0.45, 0.3, turns=turns)),
    ]
]

_USUAL = {"steps": 12, "absence_gain": math.inf}
DIRECTED: list[dict[str, Any]] = [
    *({**_USUAL, **own} for own in _LATE),
    *({**_USUAL, **own, "members": True} for own in _MEMBERS),
    # slower than the deadline in each step, and stuck in some beyond the merge: the next deadline counts from that
    {**_USUAL, "deadline": "1.0", "slow": (1.0, 1.0, 16.0), "faults": (Stall(2, 2.5, 1.6), Stall(2, 7.3, 1.7))},
]
