"""How long work drawn from a pool usually takes: if it takes longer, the stand-in steps in, at no loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_MIN_STEPS = 3  # needed to know what is usual
_LONGER = 1.2  # times the usual step: after that a rank that has not entered is not waited for
_STUCK = 2.5  # usual micro-batches: after so long in one, a rank puts back what it has not begun
_SHORTEST_S = 0.01


@dataclass(frozen=True)
class PoolTimes:
    """``step_s``: seconds after the last merge, from which on no rank waits for one that has not entered the step.

    Such a rank has claimed nothing, so the others compute all of the pool. ``put_back_after_s``: seconds in one
    micro-batch after which a rank puts back what it has not begun. Infinite: never.
    """

    step_s: float = math.inf
    put_back_after_s: float = math.inf

    @classmethod
    def usual(cls, step_s: Sequence[float], part_s: Sequence[float]) -> PoolTimes:
        """The times that follow from the last steps' seconds and from this rank's seconds for a micro-batch in them."""
        return cls(
            _LONGER * median(step_s) if len(step_s) >= _MIN_STEPS else math.inf,
            max(_SHORTEST_S, _STUCK * median(part_s)) if len(part_s) >= _MIN_STEPS else math.inf,
        )


NEVER = PoolTimes()
