"""Why a member is put out because it is slow, in words with numbers: in what, and what its absence brings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import fmean, median
from typing import NamedTuple

from straggle.members.absence import Seen
from straggle.members.slow_members import Window
from straggle.members.view import Leaving
from straggle.merge.rows.table import Table
from straggle.policies.rank_links import RankLink, others_link
from straggle.policies.slow_links import compared, slow_in
from straggle.report import CAUSE_WORDS, PHASES, Phase


class Judged(NamedTuple):
    """A merged step's rows, and what was seen in them."""

    table: Table
    seen: Seen


def why_slow_work(steps: Collection[Judged], rank: int, out: frozenset[int]) -> Leaving:
    """Why ``rank`` is put out for its work, as of these steps; ``out``: all that are out then."""
    members = [one.seen.members(out) for one in steps]
    own_s = fmean(one.seen.work_s[rank] for one in steps)
    others_s = fmean(max(one.seen.work_s[own] for own in left) for one, left in zip(steps, members, strict=True))
    phases = [_of_phase(steps, rank, phase, out) for phase in PHASES]
    phase, phase_s, usual_s = max(phases, key=lambda own: own[1] - own[2])
    given = sum(one.seen.weights[rank] for one in steps) / max(1e-9, sum(one.seen.due[rank] for one in steps))
    return Leaving(
        "slow",
        f"it is slow: done or cut short after {_seconds(own_s)} of a step, the others after {_seconds(others_s)}; "
        f"{CAUSE_WORDS[phase]} {_seconds(phase_s)}, the others {_seconds(usual_s)}; it gave {given:.0%} of its "
        f"gradients, and without it the others merge {_gain(steps, rank, out):.2f} times as many gradients a second",
    )


def _of_phase(steps: Collection[Judged], rank: int, phase: Phase, out: frozenset[int]) -> tuple[Phase, float, float]:
    """A phase, the rank's own seconds of it, and those of the others, both as in the middle of these steps."""
    columns = [(one.table.column(f"{phase}_s"), one.seen.members(out | {rank})) for one in steps]
    usual_s = median(median(column[own] for own in others) for column, others in columns)
    return phase, median(column[rank] for column, _ in columns), usual_s


def _gain(steps: Collection[Judged], rank: int, out: frozenset[int]) -> float:
    """How many times as many gradients a second are merged with ``out`` out, than with this one of them."""
    window, inside = Window(frozenset({rank})), out - {rank}
    for one in steps:
        window = window.and_step(one.seen, inside)
    return window.gain


def why_slow_link(links: Sequence[RankLink], rank: int) -> Leaving:
    """Why ``rank`` is put out for its link."""
    link, others = links[rank], others_link(links, rank)
    return Leaving("link", f"its link is slow: {compared(link, others, slow_in(link, others) or ('up', 'down'))}")


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.0f} ms"
