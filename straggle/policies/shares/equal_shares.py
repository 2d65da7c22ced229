"""Who has how much of a step, and how much more an equal share would be, if work is dealt out by speed, or drawn.

What a step costs a rank beside its samples (`Overhead`) is learned from the changes of the shares. A rank's times count
relative to those of the median rank, so that a machine which others use more, or less, after a change says nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import final

from straggle.report import RankReport, StepReport

_SETTLED = 5  # steps with the same shares, from which on their times are known
_KEPT = 40  # steps with the same shares that are looked at
_DEALS = 6  # shares that are looked back at


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


@dataclass(frozen=True)
class DealtWork:
    """What each rank had of a step, and how much ``more`` an equal share would be, in units.

    A unit is a sample or a micro-batch, and what a step costs beside them is counted in ``units``, too. If work is
    not dealt out, a unit is a step of the mean cost (`Step.cost`).
    """

    units: tuple[float, ...]
    more: tuple[float, ...]


class EqualShares:
    """Follows the shares of a run."""

    def __init__(self) -> None:
        self._deals: list[tuple[tuple[float, ...], deque[list[float]]]] = []  # shares, and the ranks' times with them
        self._overhead = 0.0

    def of(self, report: StepReport) -> DealtWork:
        """The next step."""
        ranks = report.ranks
        if not (report.dealt or report.pool_weight):
            return DealtWork(tuple(rank.cost for rank in ranks), (0.0,) * len(ranks))
        counts = tuple(0.0 if rank.idle or rank.absent else rank.weight for rank in ranks)
        if report.dealt and not report.pool_weight:
            self._learn(counts, ranks)
        members = [rank for rank in ranks if not rank.absent]
        mean = (report.pool_weight or math.fsum(counts)) / max(1, len(members))
        more = tuple(0.0 if rank.absent else mean - count for rank, count in zip(ranks, counts, strict=True))
        return DealtWork(tuple(count + self._overhead for count in counts), more)

    def _learn(self, counts: tuple[float, ...], ranks: Sequence[RankReport]) -> None:
        own_s = [math.nan if rank.late or rank.idle or not rank.compute_s > 0 else rank.compute_s for rank in ranks]
        known = [seconds for seconds in own_s if not math.isnan(seconds)]
        if len(known) < 2:
            return
        rows = self._rows(counts)
        rows.append([seconds / median(known) for seconds in own_s])
        if len(rows) in (_SETTLED, 2 * _SETTLED, 4 * _SETTLED):
            self._overhead = self._learned(math.fsum(counts) / len(counts))

    def _rows(self, counts: tuple[float, ...]) -> deque[list[float]]:
        """Where the times with these shares go; the last step of an epoch has others for one step."""
        if not self._deals or self._deals[-1][0] != counts:
            settled = [deal for deal in self._deals if len(deal[1]) >= _SETTLED]
            self._deals = settled[-_DEALS:]
            if not settled or settled[-1][0] != counts:
                self._deals.append((counts, deque(maxlen=_KEPT)))
        return self._deals[-1][1]

    def _learned(self, mean: float) -> float:
        overhead = Overhead(mean)
        usual = [(counts, _medians(rows)) for counts, rows in self._deals]
        *earlier, after = usual
        for before in reversed(earlier):  # the first, in which shares often were equal, counts most
            if len(before[0]) == len(after[0]) and min(*before[0], *after[0]) > 0:
                overhead.learn(*before, *after)
        return overhead.samples


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """Each rank's median; NaN: it was never on time."""
    known = ([value for value in column if not math.isnan(value)] for column in zip(*rows, strict=True))
    return [median(column) if column else math.nan for column in known]
