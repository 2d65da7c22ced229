"""Finds the rank that is slow whatever it is given, and says what to do instead of giving it less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from straggle.policies.sample_time import RankTime
from straggle.report import CAUSE_WORDS, Phase

_CLEARLY = 1.3  # times the other ranks' median
_STILL = 1.15  # so slow it stays one that was clearly slow
_MOST = 0.5  # of what it takes longer


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
    """Whether a rank stays slow with the ``shares`` that are best; ``None`` also if too little is known.

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
