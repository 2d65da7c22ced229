"""Which members are put out because they are slow, and until when: all members decide the same.

After merged steps all members judge each one's work and link (`slow_members.py`). A rank that is put out is not in the
next view, and is not let in until it would bring more gradients than it costs. During a merge that takes many times as
long as usual, one member judges the links that it has measured meanwhile, and the others follow its view. Members ping
the ranks that are out, and a rank that is out for its work times steps of its own (`probe.py`): both are in the
telemetry, so that all know when it may return. It is then let in like any rank that asks. A newcomer gets what the
members remember with its state.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean, median
from typing import Any, NamedTuple

from straggle.members.rows import PROBE_NUMBER, PROBE_S, PROBED
from straggle.members.slow.absence import HALF, Seen, merge_s, slow_in_link
from straggle.members.slow.slow_members import AFTER_STEPS, Probe, SlowMembers, Window
from straggle.members.views.membership import Membership
from straggle.members.views.view import Leaving, View
from straggle.merge.rows.table import Table
from straggle.policies.network.rank_links import RankLink, others_link
from straggle.policies.network.slow_links import compared, slow_in
from straggle.pools.rows import PARTS
from straggle.report import CAUSE_WORDS, PHASES, Phase

_SLOW_LINK, _SLOW_WORK = Leaving("link", "its link is slow"), Leaving("slow", "its work takes too long")
_log = logging.getLogger(__name__)


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


class PutOut:
    """Decides for one wrapped model. Any thread may read ``out``; the rest is called with the coordinator's lock held.

    ``num_bytes`` of gradients are merged in a step.
    """

    def __init__(self, membership: Membership, *, num_bytes: int) -> None:
        self._membership, self._detector = membership, membership.detector
        self._min_gain, self._num_bytes = membership.elastic.absence_gain, num_bytes
        self._known = SlowMembers()
        self._seen: Seen | None = None  # at the last look
        self._judged: deque[Judged] = deque(maxlen=AFTER_STEPS)  # the last steps in which a member's work was slow
        self._put_out: frozenset[int] = frozenset()  # the ranks that are out in the view that was followed last
        self._following: tuple[int, frozenset[int], frozenset[int]] = 0, frozenset(), frozenset()  # see `follow`

    @property
    def out(self) -> frozenset[int]:
        """The ranks that are no members, or are about to be none, because they are slow."""
        return self._known.out

    def begin_anew(self) -> None:
        """Forget everything: this rank is no longer a member."""
        self._seen, self._put_out, self._following = None, frozenset(), (0, frozenset(), frozenset())
        self._judged.clear()
        self._use(SlowMembers(), {})

    def merged(self, step: int, table: Table, num_messages: int, shares: Sequence[float] = ()) -> None:
        """Decide after a merged step which ranks are out from the next step on, and which may come back.

        ``shares``: of the model, in each stage.
        """
        if step < self._known.step:  # the state that this rank was given has this step
            return
        before, seconds = self._followed(step), table.last_submitted_s + max(table.column("merge_s"))
        known = before.after_step(
            step,
            seconds,
            lambda: self._look(table, num_messages, shares, before.out),
            self._min_gain,
            work_s=_work_s(table),
            brings_less=not table.is_usual and _brings_less(table, shares),
            probes=_probes(table) if before.for_work else {},
        )
        if known.slow_steps and self._seen is not None:
            self._judged.append(Judged(table, self._seen))
        elif known.out == self._known.out:
            self._judged.clear()
        if known.out == self._known.out:
            self._known = known
            return
        self._changed(before, known, step)

    def _changed(self, before: SlowMembers, known: SlowMembers, step: int) -> None:
        if self._membership.rank == min(self._membership.view.ranks, default=-1):
            for rank in before.out - known.out:
                _log.info("step %d: rank %d may be let in again", step, rank)
        kept = {rank: why for rank, why in self._detector.kept_out.items() if rank in known.out}
        self._use(known, {rank: self._why(rank, known) for rank in known.out} | kept)

    def _why(self, rank: int, known: SlowMembers) -> Leaving:
        if rank in known.for_work:
            return why_slow_work(self._judged, rank, known.out) if self._judged else _SLOW_WORK
        return why_slow_link(self._seen.links, rank) if self._seen else _SLOW_LINK

    def _look(self, table: Table, num_messages: int, shares: Sequence[float], out: frozenset[int]) -> Seen:
        """What all members know of the ranks after the step of this table."""
        seen = Seen(
            table.links(),
            table.column("busy_s"),
            table.given(shares),
            table.weight(),
            self._num_bytes,
            num_messages,
            absent=table.absent_ranks() - out,
            min_ranks=self._membership.least,
        )
        times = [seconds for rank, seconds in enumerate(table.column("merge_s")) if rank in seen.members(out)]
        measured_s = min(times, default=0.0)  # the last one to submit waited for nothing else
        self._seen = replace(seen, overhead_s=max(0.0, measured_s - merge_s(out, seen)))
        return self._seen

    def _followed(self, step: int) -> SlowMembers:
        """What was known before ``step``, the same on all members that followed the same views."""
        first, gone, for_work = self._following
        if step < first or gone <= self._known.out:
            return self._known
        self._following = 0, frozenset(), frozenset()
        known = self._known.without((gone & for_work) - self._known.out, for_work=True)
        return known.without(gone - known.out)

    def long_merge(self, links: Sequence[RankLink]) -> None:
        """Put out members during a merge that takes many times as long as usual, by the links measured meanwhile.

        Only the member that proposes the next view does so: the others may have measured other values. One look is
        enough, as such a merge proves as much as many steps.
        """
        view = self._membership.view
        if self._seen is None or not self._membership.is_member:
            return
        absent = frozenset(range(len(links))).difference(view.ranks, self._known.out)
        seen = replace(self._seen, links=links, absent=absent)
        gone = slow_in_link(self._known.out, seen, self._min_gain) - {self._membership.rank}
        if gone and self._membership.rank == min(set(view.ranks) - gone, default=-1):
            self._detector.keep_out({**self._detector.kept_out, **{rank: why_slow_link(links, rank) for rank in gone}})

    def follow(self, view: View, step: int, *, new: bool) -> None:
        """The members are those of ``view`` from ``step`` on: all have the same ranks out because they are slow.

        ``new``: this rank has just joined, and is given what the members know.
        """
        gone = frozenset() if new else view.put_out - self._put_out - self._known.out
        self._put_out, self._following = view.put_out, (step, gone, view.for_work)
        known, for_work = self._detector.kept_out, self._known.for_work | view.for_work
        kept = {
            rank: known.get(rank, _SLOW_WORK if rank in for_work else _SLOW_LINK) for rank in self._known.out | gone
        }
        if kept != known:
            self._detector.keep_out(kept)

    def _use(self, known: SlowMembers, why: Mapping[int, Leaving]) -> None:
        self._known = known
        self._detector.keep_out(why)

    # -- for a newcomer; called by the training thread while nothing else is called

    def state_dict(self) -> dict[str, Any]:
        """What the members remember of the ranks that were put out."""
        known = asdict(self._known)
        return {**_plain(known), "window": _plain(known["window"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict` of another member."""
        window = {**state["window"], "ranks": frozenset(state["window"]["ranks"])}
        sets = {name: frozenset(state[name]) for name in ("out", "for_work")}
        known = SlowMembers(**{**state, **sets, "window": Window(**window)})
        self._use(known, {rank: self._why(rank, known) for rank in known.out})


def _work_s(table: Table) -> dict[int, float]:
    """Each member's seconds of work in the step; none where it tells nothing of what a rank's absence would bring.

    That is so if nobody gave anything, in a loop with collectives of its own in its steps, which need all ranks, and in
    a step with a pool, from which a slow rank draws less.
    """
    if any(table.column("gathers")) or any(table.told(PARTS)) or not any(table.weight()):
        return {}
    absent = table.column("absent")
    return {rank: seconds for rank, seconds in enumerate(table.column("busy_s")) if not absent[rank]}


def _brings_less(table: Table, shares: Sequence[float]) -> bool:
    """Whether a member gave less than half of its gradients."""
    return any(given < HALF * due for given, due in zip(table.given(shares), table.weight(), strict=True))


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in fields.items()}


def _probes(table: Table) -> dict[int, Probe]:
    """The newest probes of ranks that are out, of which members have heard."""
    rows = zip(*map(table.told, (PROBED, PROBE_NUMBER, PROBE_S)), strict=True)
    heard = sorted((number, int(place) - 1, seconds) for place, number, seconds in rows if place)
    return {rank: Probe(number, seconds) for number, rank, seconds in heard}
