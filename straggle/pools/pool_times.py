"""How long what is drawn from a pool usually takes: what takes longer is seen to by the stand-in, at no loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_MIN_STEPS = 3  # that say what is usual
_LONGER = 1.2  # than the usual step: its rank is not waited for where it has not come
_STUCK = 2.5  # usual micro-batches: what its rank has not begun is put back
_SHORTEST_S = 0.01


@dataclass(frozen=True)
class PoolTimes:
    """``step_s``: seconds after the last merge, from which on no rank waits for one that has not entered the step.

    It has claimed nothing, so that all of the pool is done without it. ``put_back_after_s``: seconds in one micro-batch
    after which a rank puts back what it has not begun. Infinite: never.
    """

    step_s: float = math.inf
    put_back_after_s: float = math.inf

    @classmethod
    def usual(cls, step_s: Sequence[float], part_s: Sequence[float]) -> PoolTimes:
        """From the last steps, and from what a micro-batch took this rank in each in which it computed one."""
        return cls(
            _LONGER * median(step_s) if len(step_s) >= _MIN_STEPS else math.inf,
            max(_SHORTEST_S, _STUCK * median(part_s)) if len(part_s) >= _MIN_STEPS else math.inf,
        )


NEVER = PoolTimes()
