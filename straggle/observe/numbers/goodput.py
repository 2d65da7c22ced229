"""Goodput: the useful part of a run's time, and what the rest was lost to.

All time is that from the first step's beginning to the last one's end, of each rank that the job was started with. Of a
step that is merged and applied, it is useful as far as a rank loads, computes and merges what the step has of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from straggle.observe.numbers.reader import files_of
from straggle.report import RankReport, StepReport

USEFUL = "useful"
LOST: Mapping[str, str] = {
    "waiting": "ranks waited for others, or had no data",
    "dropped": "ranks worked on gradients that were not merged, or were stuck",
    "again": "attempts at a step that were discarded and made again (`step.pull(seed=...)`)",
    "members": "ranks were no members, and others waited or merged in the step in which members changed",
    "outside": "evaluation, checkpoints and whatever else a loop does between two steps",
    "no_step": "no step went on: restarts, the steps that they lost and their start-up, and `model.pause()`",
}
USES = (USEFUL, *LOST)
_LISTED = 3


@dataclass(frozen=True)
class Goodput:
    """``seconds`` of each of `USES`, of the mean rank; all time is their sum."""

    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The useful part, from 0 to 1; NaN without a step."""
        total = math.fsum(self.seconds.values())
        return self.seconds[USEFUL] / total if total else math.nan

    def lost(self) -> str:
        """What most was lost to, in words."""
        total = math.fsum(self.seconds.values())
        shares = {name: self.seconds[name] / total for name in LOST} if total else {}
        most = sorted(shares, key=lambda name: -shares[name])[:_LISTED]
        return ", ".join(f"{name.replace('_', ' ')} {shares[name]:.1%}" for name in most if shares[name] >= 0.0005)


def goodput_of(run_dir: Path) -> Goodput | None:
    """That of a run's trace; ``None`` without one."""
    if (files := files_of(run_dir)) is None:
        return None
    uses = Uses()
    for report, ended_at in files.timed():
        uses.add(report, ended_at)
    return uses.goodput()


class Uses:
    """Follows a run step by step."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(USES, 0.0)  # of the mean rank
        self._absent_ranks: tuple[int, ...] | None = None  # in the step before
        self._began_at = self._ended_at = math.nan

    def add(self, report: StepReport, ended_at: float = math.nan) -> list[dict[str, float]]:
        """One more step, which ended ``ended_at``, in seconds since 1970; its uses by rank."""
        changed = self._absent_ranks is not None and self._absent_ranks != report.absent_ranks
        self._absent_ranks = report.absent_ranks
        if not math.isnan(ended_at):
            self._began_at = ended_at - report.whole_s if math.isnan(self._began_at) else self._began_at
            self._ended_at = ended_at
        if not math.isfinite(report.seconds):
            return []
        of_ranks = [uses_of(report, rank, changed=changed) for rank in report.ranks]
        for own in of_ranks:
            for use, own_s in own.items():
                self._seconds[use] += own_s / len(of_ranks)  # a run may go on with another number of ranks
        return of_ranks

    def goodput(self) -> Goodput:
        """That of the steps until now."""
        between_s = self._ended_at - self._began_at - math.fsum(self._seconds.values())
        return Goodput({**self._seconds, "no_step": max(0.0, between_s)})  # max: of NaN and a number, the first


def uses_of(report: StepReport, rank: RankReport, *, changed: bool) -> dict[str, float]:
    """What a rank's seconds of a step were used for: they add up to the step, with its discarded attempts.

    ``changed``: other ranks were absent in the step before.
    """
    if rank.absent:
        return {"members": report.whole_s}
    left_s, uses = report.seconds, {"again": report.again_s}

    def take(use: str, seconds: float) -> None:
        nonlocal left_s
        own_s = min(left_s, max(0.0, seconds)) if math.isfinite(seconds) else 0.0
        uses[use] = uses.get(use, 0.0) + own_s
        left_s -= own_s

    take("members" if changed else "waiting", rank.wait_s)
    take("waiting", rank.collective_s)
    merge_s = min(left_s, max(0.0, report.network_s)) if math.isfinite(report.network_s) else 0.0
    if changed:
        take("members", merge_s)
        merge_s = 0.0
    take("outside", rank.outside_s)
    take("outside", rank.loop_end_s)
    if rank.idle:
        take("waiting", left_s)
    reach = 0.0 if report.skipped else 1.0 if math.isnan(rank.reach) else min(1.0, max(0.0, rank.reach))
    take("dropped", (left_s if reach == 0.0 else max(0.0, left_s - merge_s)) * (1.0 - reach))
    take(USEFUL, left_s)
    return uses
