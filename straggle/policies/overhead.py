"""What a step costs a rank beside its samples, learned from what changes of the ranks' shares did to their times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import final


@final
class Overhead:
    """What a step costs beside its samples, in samples, alike for all ranks: learned from changes of their shares.

    The candidates are ``c = mean * (1 / u - 1)`` for shares ``u`` of the time that samples take at an equal share. Each
    has its sum of squared residuals of ``log(t'/t) = log((n' + c) / (n + c)) + m``. ``m`` is what the machine did to
    all ranks between the two measurements, the median of what is left without it. Residuals are capped, so that a rank
    which becomes slow between the two says nothing. A change counts half as much as the one after it.
    """

    _SHARES = tuple(share / 20 for share in range(1, 21))
    _CAP = 0.04  # a residual of a fifth
    _PRIOR = 0.01  # a few ranks whose times are a twentieth off do not outweigh it

    def __init__(self, mean: float) -> None:
        self._candidates = [mean * (1 / share - 1) for share in self._SHARES]
        self.misfit = [0.0] * len(self._SHARES)

    @property
    def samples(self) -> float:
        """The candidate that fits best; 0 before any change."""
        prior = [self._PRIOR * (1 - share) ** 2 for share in self._SHARES]
        total = [own + misfit for own, misfit in zip(prior, self.misfit, strict=True)]
        return self._candidates[total.index(min(total))]

    def learn(
        self,
        counts: Sequence[float],
        times_s: Sequence[float],
        new_counts: Sequence[float],
        new_times_s: Sequence[float],
    ) -> None:
        """The ranks took ``times_s`` for ``counts`` samples, now ``new_times_s`` for ``new_counts``; NaN: not known."""
        both = zip(counts, times_s, new_counts, new_times_s, strict=True)
        changes = [change for change in both if not math.isnan(change[1] + change[3])]
        for number, c in enumerate(self._candidates):
            logs = [math.log(t2 / t1 * (n1 + c) / (n2 + c)) for n1, t1, n2, t2 in changes]
            common = median(logs) if len(logs) > 1 else 0.0
            self.misfit[number] = self.misfit[number] / 2 + math.fsum(min((r - common) ** 2, self._CAP) for r in logs)
