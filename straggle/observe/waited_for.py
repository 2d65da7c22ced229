"""Whom a run waits for, and what is done about it: the last steps in words for somebody who looks for ten seconds."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from statistics import fmean, median

from straggle.observe.numbers.replicas import Replicas
from straggle.policies.ddp_time import DdpStep
from straggle.report import StepReport

_LESS = 0.9  # of the mean rank's work, at most: then a rank has less to do
_WAITING = 0.1  # of the step, from which on the rank that the others wait for is named


class LastSteps:
    """The last ``num_steps`` of a run."""

    def __init__(self, num_steps: int) -> None:
        self._steps: deque[tuple[StepReport, DdpStep]] = deque(maxlen=num_steps)

    def add(self, report: StepReport, ddp: DdpStep) -> None:
        """The next step."""
        self._steps.append((report, ddp))

    @property
    def median_s(self) -> float:
        """The median step."""
        return median(report.seconds for report, _ in self._steps)

    @property
    def ddp_s(self) -> float:
        """The median step as DDP would have made it."""
        return median(ddp.seconds for _, ddp in self._steps)

    def words(self) -> str:
        """Whom the others wait for, and what is done about it."""
        of = Replicas.of(report for report, _ in self._steps)
        return "; ".join([*self._has_less(of), *self._late(of)] or [self._waiting(of)])

    def _has_less(self, of: Replicas) -> Iterator[str]:
        report, ddp = self._steps[-1]
        weights = [0.0 if rank.idle or rank.absent else rank.weight for rank in report.ranks]
        number = ddp.waits_for
        if not report.dealt or report.pool_weight or number is None or not (total := math.fsum(weights)):
            return
        if weights[number] <= _LESS * total / len(weights):
            yield f"{of.who(number)} is slow: it has {weights[number] / total:.0%} of the samples"

    def _late(self, of: Replicas) -> Iterator[str]:
        late = Counter(rank.rank for report, _ in self._steps for rank in report.ranks if rank.late)
        for number, often in late.most_common(1):
            now = self._steps[-1][0].ranks[number]
            if now.stood_in:
                where = f" in {now.cause}" if now.cause else ""
                yield f"{of.who(number)} is stuck{where}: the others go on without it"
            else:
                others = f", others too: {len(late) - 1}" if len(late) > 1 else ""
                yield f"{of.who(number)} was stopped in {often} of {len(self._steps)} steps{others}"

    def _waiting(self, of: Replicas) -> str:
        report, _ = self._steps[-1]
        there = [rank for rank in report.ranks if not rank.absent and not math.isnan(rank.wait_s)]
        if len(there) > 1:
            last = min(there, key=lambda rank: rank.wait_s)
            wait_s = fmean(rank.wait_s for rank in there if rank is not last)
            if wait_s >= _WAITING * report.seconds:
                return f"no {of.row} is late, and the others waited {1e3 * wait_s:.0f} ms for {of.who(last.rank)}"
        return f"no {of.row} is late"
