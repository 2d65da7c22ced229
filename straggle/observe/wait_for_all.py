"""What would a step have cost if all ranks had been waited for? Answered from the telemetry of the step itself.

A late rank was stopped, so its untruncated time is unknown. It is predicted as ``slowness * t``: ``t`` is the median
time of the ranks that finished. ``slowness`` says how many times as long as they the late rank took for its last
complete stage.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

from straggle.policies.untruncated import Mark, untruncated_time
from straggle.report import RankReport, StepReport


class WaitForAllPrediction:
    """Predicts, step after step, the seconds that waiting for all ranks would have taken."""

    def __init__(self) -> None:
        self._slowness: dict[int, float] = {}  # 2.0: this rank takes twice as long as the median rank

    def seconds(self, report: StepReport) -> float:
        """The step's seconds with no rank stopped, plus what ranks still spent on steps merged without them."""
        entered = [rank.compute_s for rank in report.ranks if not math.isnan(rank.compute_s)]
        overrun_s = max(rank.overrun_s for rank in report.ranks)
        known_s = [seconds for seconds in self.compute_s(report) if not math.isnan(seconds)]
        return report.seconds + (max(0.0, max(known_s) - max(entered)) if entered else 0.0) + overrun_s

    def compute_s(self, report: StepReport) -> list[float]:
        """For each rank, seconds of all its own work in the step, with what a late one left; NaN: not known.

        A rank that has not finished a stage is as slow as it was when it last finished one.
        """
        ranks = [_of_mean_cost(rank) for rank in report.ranks]
        finished = [rank for rank in ranks if not (rank.late or rank.idle or rank.absent)]
        if not finished or not any(rank.late for rank in ranks):
            return [rank.compute_s for rank in report.ranks]
        typical_s = median(rank.compute_s for rank in finished)
        stage_s = [median(column) for column in zip(*(rank.stage_s for rank in finished), strict=True)]
        return [rank.cost * self._whole_s(rank, typical_s, stage_s) for rank in ranks]

    def _whole_s(self, rank: RankReport, typical_s: float, stage_s: list[float]) -> float:
        """Seconds that the rank takes, or would have taken, for all of its own work."""
        if not rank.late:
            return rank.compute_s
        pairs = zip(rank.stage_s, stage_s, strict=True) if typical_s > 0 else ()
        marks = [Mark(peers_s / typical_s, own_s) for own_s, peers_s in pairs if own_s > 0 and peers_s > 0]
        if marks:
            self._slowness[rank.rank] = untruncated_time(0.0, marks).seconds / typical_s
        predicted_s = self._slowness.get(rank.rank, 1.0) * typical_s
        return predicted_s if math.isnan(rank.compute_s) else max(predicted_s, rank.compute_s)


def _of_mean_cost(rank: RankReport) -> RankReport:
    """The rank's own times, as they would be in a step of the mean cost."""
    if rank.cost == 1.0:
        return rank
    return replace(rank, compute_s=rank.compute_s / rank.cost, stage_s=tuple(at / rank.cost for at in rank.stage_s))
