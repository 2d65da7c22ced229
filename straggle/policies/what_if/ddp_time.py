"""What would a step have taken under DDP? Answered from the telemetry of the step itself.

DDP gives all ranks an equal share of the samples, and waits for all of them. A rank with ``n`` samples of a mean of
``m`` takes ``t + (m - n) u`` for an equal share: ``t`` is what it took for its own in this step, and ``u`` what it
usually takes for one more. So a stall counts once, however many samples the rank has. If work is not dealt out by
speed, ``n = m`` for all ranks.

What a late rank would have taken is `untruncated_time`'s answer. Usual is relative: so many times as slow as the median
rank of the same step as it was in the last steps (their median).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from straggle.policies.shares.equal_shares import EqualShares
from straggle.policies.what_if.untruncated import Mark, untruncated_time
from straggle.report import RankReport, StepReport

_WINDOW = 20  # steps that show how slow a rank usually is


@dataclass(frozen=True)
class DdpStep:
    """A step as DDP would have made it.

    ``seconds`` of the step; ``waits_for``: the rank that would have been the last (``None``: not known). ``own_s``:
    each rank's seconds for all of its own work, as it was dealt to it, with what a late rank left (NaN: not known).
    """

    seconds: float
    waits_for: int | None
    own_s: tuple[float, ...]


class DdpPrediction:
    """Predicts, step after step, what DDP would have taken."""

    def __init__(self) -> None:
        self._shares = EqualShares()
        self._slowness: dict[int, deque[float]] = {}  # 2.0: a rank takes twice as long for as much as the median rank
        self._behind: frozenset[int] = frozenset()  # the ranks that were stood in for in the step before
        self._unit_s = math.nan

    def add(self, report: StepReport) -> DdpStep:
        """The next step of the run."""
        work = self._shares.of(report)
        step = _Step(report, work.units, self._unit_s)
        self._unit_s = step.unit_s
        self._observe(step)
        own_s, ends_at = list[float](), dict[int, float]()
        for rank, units, more in zip(report.ranks, work.units, work.more, strict=True):
            unit_s = self._slowness_of(rank.rank) * step.unit_s
            own_s.append(step.own_s(rank, units, unit_s))
            end_s = self._entry_s(step, rank) + (own_s[-1] + more * unit_s if more else own_s[-1])
            if not (math.isnan(end_s) or rank.absent):
                ends_at[rank.rank] = end_s
        self._behind = frozenset(rank.rank for rank in report.ranks if rank.stood_in)
        last = max(ends_at, key=lambda rank: ends_at[rank], default=None)
        later_s = 0.0 if last is None else ends_at[last] - step.last_s
        overrun_s = max(rank.overrun_s for rank in report.ranks)
        return DdpStep(report.seconds + later_s + overrun_s, last, tuple(own_s))

    def _observe(self, step: _Step) -> None:
        for rank, units in step.ranks:
            if not math.isnan(slowness := step.slowness(rank, units)):
                self._slowness.setdefault(rank.rank, deque(maxlen=_WINDOW)).append(slowness)

    def _slowness_of(self, rank: int) -> float:
        return median(self._slowness[rank]) if rank in self._slowness else 1.0

    def _entry_s(self, step: _Step, rank: RankReport) -> float:
        """When the rank entered the step, from its begin.

        If it was still in an earlier step, or came from one, that time is in its overrun. A rank that was stuck
        before it entered was stood in for until then.
        """
        if rank.idle or rank.overrun_s or (math.isnan(rank.compute_s) and rank.rank in self._behind):
            return step.entry_s
        return step.busy_s(rank) - (0.0 if math.isnan(rank.compute_s) else rank.compute_s)


class _Step:
    """One step: ``unit_s`` is what the median rank took for a unit of work, of those that finished.

    ``entry_s``: when it entered. ``last_s``: when the last rank had submitted.
    """

    def __init__(self, report: StepReport, units: Sequence[float], unit_s: float) -> None:
        self.ranks = list(zip(report.ranks, units, strict=True))
        network_s = 0.0 if math.isnan(report.network_s) else report.network_s
        self.last_s = report.seconds - network_s
        finished = [
            (rank, own)
            for rank, own in self.ranks
            if own > 0 and not (rank.late or rank.idle or rank.absent or math.isnan(rank.compute_s))
        ]
        self.unit_s = median(rank.compute_s / own for rank, own in finished) if finished else unit_s
        self.entry_s = median(self.busy_s(rank) - rank.compute_s for rank, _ in finished) if finished else 0.0
        columns = zip(*([at / own for at in rank.stage_s] for rank, own in finished), strict=False)
        self._stage_s = [median(column) for column in columns] if any(rank.late for rank in report.ranks) else []

    def busy_s(self, rank: RankReport) -> float:
        """When the rank had submitted, from the begin of the step."""
        return self.last_s - rank.wait_s

    def slowness(self, rank: RankReport, units: float) -> float:
        """How many times as long as the median rank it took for a unit; NaN: not known."""
        if not (units > 0 and self.unit_s > 0) or rank.absent or rank.idle or math.isnan(rank.compute_s):
            return math.nan
        if not rank.late:
            return rank.compute_s / units / self.unit_s
        marks = self._marks(rank)
        return untruncated_time(0.0, marks).seconds / units / self.unit_s if marks else math.nan

    def own_s(self, rank: RankReport, units: float, unit_s: float) -> float:
        """The rank's seconds for all of its work, if a unit usually takes it ``unit_s``; NaN: not known."""
        if rank.idle or not rank.late or math.isnan(unit_s):
            return 0.0 if rank.idle and units > 0 else rank.compute_s
        usual_s = units * unit_s
        if math.isnan(rank.compute_s):
            return usual_s
        return untruncated_time(rank.compute_s, self._marks(rank), usual_s, is_stuck=rank.stood_in).seconds

    def _marks(self, rank: RankReport) -> list[Mark]:
        """Where the rank came past a stage: which share of its work that is, by the ranks that finished."""
        pairs = zip(rank.stage_s, self._stage_s, strict=False) if self.unit_s > 0 else ()
        return [Mark(peers_s / self.unit_s, at_s) for at_s, peers_s in pairs if at_s > 0 and peers_s > 0]
