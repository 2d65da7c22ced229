"""What each rank took from batch to batch, and which is slow whatever it is given.

From batch to batch is from the end of a merge to the end of a rank's own work in the next step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from straggle.merge.rows.table import Table
from straggle.policies.shares.sample_time import RankTime
from straggle.policies.what_if.untruncated import UntruncatedTime
from straggle.report import CAUSE_WORDS, Phase

_CLEARLY = 1.3  # times the other ranks' median
_STILL = 1.15  # so slow it stays one that was clearly slow
_MOST = 0.5  # of what it takes longer


class BatchTimes:
    """Follows the merged steps. Loading counts, and so does what a loop does between two steps.

    A rank that misses steps, as it is not there when these are merged, has loaded meanwhile: one batch or, as its loop
    is, one for each step. What it does between two steps it has done for each.
    """

    def __init__(self, world_size: int) -> None:
        # since the last step in which the rank took part
        self._data_s = [0.0] * world_size
        self._rest_s = [0.0] * world_size
        self._missed = [0] * world_size  # steps

    def of(self, table: Table, *, loads_missed: bool) -> list[UntruncatedTime]:
        """Of the next step, NaN for a rank that did not enter it; ``loads_missed``: a batch for each missed step."""
        away = table.missed_ranks()
        own_s = zip(table.column("busy_s"), table.column("data_s"), table.compute_s(), strict=True)
        times = []
        for rank, (whole, (busy_s, data_s, in_step_s)) in enumerate(zip(table.untruncated_times(), own_s, strict=True)):
            before_s = busy_s if rank in away else max(0.0, busy_s - in_step_s)
            self._data_s[rank] += min(data_s, before_s)
            self._rest_s[rank] += before_s - min(data_s, before_s)
            if rank in away:
                self._missed[rank] += 1
                times.append(UntruncatedTime(math.nan))
            else:
                times.append(UntruncatedTime(self._take(rank, loads_missed) + whole.seconds, whole.at_least))
        return times

    def _take(self, rank: int, loads_missed: bool) -> float:
        """Seconds before the step in which the rank takes part again."""
        each = 1 + self._missed[rank]
        seconds = self._data_s[rank] / (each if loads_missed else 1) + self._rest_s[rank] / each
        self._data_s[rank], self._rest_s[rank], self._missed[rank] = 0.0, 0.0, 0
        return seconds

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"data_s": list(self._data_s), "rest_s": list(self._rest_s), "missed": list(self._missed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._data_s, self._rest_s, self._missed = (list(state[name]) for name in ("data_s", "rest_s", "missed"))


@dataclass(frozen=True)
class HeldUp:
    """``rank`` takes ``excess_s`` longer than the others, most of it in ``phase``.

    ``by_samples``: because of its samples, of which it has the least that a rank can have.
    """

    rank: int
    excess_s: float
    phase: Phase
    by_samples: bool

    def words(self, *, waits: bool, loads_missed: bool) -> str:
        """``waits``: there is no deadline; ``loads_missed``: its loop loads a batch for each missed step."""
        why = "and has no more samples to give to them" if self.by_samples else "however few samples it has"
        which = f"rank {self.rank} takes {1e3 * self.excess_s:.0f} ms longer than the others in each step, {why}, "
        return f"{which}most of it {CAUSE_WORDS[self.phase]}: {_remedy(waits, loads_missed and self.phase == 'data')}"


def _remedy(waits: bool, loads_missed: bool) -> str:
    late = "set deadline=straggle.AutoDeadline()"
    if loads_missed:
        load = "write for batch in straggle.LateLoader(model, loader)"
        return f"{late}, and {load}; or leave it out" if waits else f"{load}, or leave it out"
    return (
        f"{late}, or leave it out" if waits else "its deadline stops it there; look what it waits for, or leave it out"
    )


def held_up(
    times: Mapping[int, RankTime],
    shares: Sequence[int],
    phases: Mapping[Phase, Sequence[float]],
    *,
    least: int,
    before: HeldUp | None = None,
) -> HeldUp | None:
    """The rank that stays slow with the ``shares`` that are best; ``None`` also if too little is known.

    ``times``: of the ranks that have something, of which none has fewer than ``least`` samples. ``phases``: seconds of
    each rank. ``before``: what was found in the step before.
    """
    own_s = {rank: of.seconds(shares[rank]) for rank, of in times.items()}
    slowest = max(own_s, key=lambda rank: own_s[rank])
    others = [rank for rank in times if rank != slowest]
    if not others:
        return None
    others_s = median(own_s[rank] for rank in others)
    clearly = _STILL if before is not None and before.rank == slowest else _CLEARLY
    excess_s = own_s[slowest] - others_s
    if not own_s[slowest] > clearly * others_s:
        return None
    fixed_s = times[slowest].fixed_s - median(times[rank].fixed_s for rank in others)
    by_samples = not (times[slowest].is_known and fixed_s > _MOST * excess_s)
    if by_samples and shares[slowest] > least:
        return None
    return HeldUp(slowest, excess_s if by_samples else fixed_s, _where(phases, slowest, others), by_samples)


def _where(phases: Mapping[Phase, Sequence[float]], slowest: int, others: Sequence[int]) -> Phase:
    """Where this rank takes longer than the others."""
    return max(phases, key=lambda name: phases[name][slowest] - median(phases[name][rank] for rank in others))
