"""What to do about what a run shows: one choice among all that was predicted, from which every sentence follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from straggle.advise.gain import WORTH_IT, Gain
from straggle.advise.other_shares import BY_SAMPLES
from straggle.advise.slow import Slowness, SlowRank

Kind = Literal["deal", "pull", "deadline", "without", "keep", "nothing"]
_IN_ORDER: tuple[Kind, ...] = ("pull", "deal", "deadline", "without")  # if they are worth about the same
_SAME = 0.97  # of the surest gain in gradients per second
_BETTER = 1.05  # times what a run's own policy brought, from which on it is to be changed
_HALF = 0.5  # of a rank's excess


@dataclass(frozen=True)
class Choice:
    """Something to do, and its ``gain``. ``ranks``: those that are left out."""

    kind: Kind
    gain: Gain
    ranks: tuple[int, ...] = ()

    @property
    def is_sure(self) -> bool:
        """Whether it is sure to gain, and would show in a comparison."""
        return self.gain.saves and self.gain.surely >= WORTH_IT


@dataclass(frozen=True)
class Verdict:
    """``chosen`` is to be done; ``None``: nothing, or to go on as in this run (``kind`` is ``keep``).

    ``choices``: all that was predicted, the chosen one first. ``always``: ranks that are slow in most steps, and still
    are; ``fixed``: those of them whose excess does not go by the samples.
    """

    kind: Kind
    chosen: Choice | None
    choices: tuple[Choice, ...]
    always: tuple[SlowRank, ...]
    fixed: tuple[SlowRank, ...]


def verdict(slowness: Slowness, choices: Sequence[Choice], as_run: float = 0.0) -> Verdict:
    """The surest gain; of several that are about as large, the one that drops no gradients and leaves out no rank.

    ``as_run``: gradients per second of the run itself, over those when all ranks are waited for; 0: it dropped none.
    """
    always = tuple(rank for rank in slowness.ranks if rank.is_always)
    fixed = tuple(rank for rank in always if not goes_by_samples(rank))
    ordered = sorted(choices, key=lambda one: -one.gain.speedup.value)
    sure = [one for one in ordered if one.is_sure] if slowness.somebody_is_waited_for else []
    surest = max((one.gain.surely for one in sure), default=0.0)
    about = [one for one in sure if one.gain.surely >= _SAME * surest]
    chosen = min(about, key=lambda one: (_IN_ORDER.index(one.kind), -one.gain.surely), default=None)
    if as_run > 1 and (chosen is None or chosen.gain.speedup.value < _BETTER * as_run):
        return Verdict("keep", None, tuple(ordered), always, fixed)
    if chosen is None:
        return Verdict("nothing", None, tuple(ordered), always, fixed)
    first = [chosen, *(one for one in ordered if one is not chosen)]
    return Verdict(chosen.kind, chosen, tuple(first), always, fixed)


def goes_by_samples(rank: SlowRank) -> bool:
    """Whether fewer samples would take a rank less time, for most of what it takes more than the others."""
    return sum(rank.phases.get(phase, 0.0) for phase in BY_SAMPLES) >= _HALF
