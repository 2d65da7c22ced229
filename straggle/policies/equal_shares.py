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

from straggle.policies.overhead import Overhead
from straggle.report import RankReport, StepReport

_SETTLED = 5  # steps with the same shares, from which on their times are known
_KEPT = 40  # steps with the same shares that are looked at
_DEALS = 6  # shares that are looked back at


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
