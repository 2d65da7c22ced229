"""Which members are put out because of their links, and until when: all members decide the same.

After merged steps all members judge the links (`slow_members.py`). A rank that is put out is not in the next view, and
is not let in until its link is back. During a merge that takes many times as long as usual, one member judges the links
that it has measured meanwhile, and the others follow its view. Members ping the ranks that are out, so that all know
from the telemetry when a link is back; the rank is then let in like any rank that asks. A newcomer gets what the
members remember with its state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from straggle.members.membership import Membership
from straggle.members.slow_members import SeenLinks, SlowMembers, leaving_ranks
from straggle.members.view import Leaving, View
from straggle.merge.table import Table
from straggle.policies.rank_links import RankLink, others_link
from straggle.policies.slow_links import compared, slow_in

_NO_REASON = Leaving("link", "its link is slow")
_log = logging.getLogger(__name__)


class PutOut:
    """Decides for one wrapped model. Any thread may read ``out``; the rest is called with the coordinator's lock held.

    ``num_bytes`` of gradients are merged in a step.
    """

    def __init__(self, membership: Membership, *, num_bytes: int) -> None:
        self._membership, self._detector, self._min_gain = membership, membership.detector, membership.elastic.link_gain
        self._num_bytes = num_bytes
        self._known = SlowMembers()
        self._seen: SeenLinks | None = None  # at the last look
        self._by_link: frozenset[int] = frozenset()  # the ranks out by their links in the view that was followed last
        self._following: tuple[int, frozenset[int]] = 0, frozenset()  # since which step who is out by it

    @property
    def out(self) -> frozenset[int]:
        """The ranks that are no members, or are about to be none, because of their links."""
        return self._known.out

    def begin_anew(self) -> None:
        """Forget everything: this rank is no longer a member."""
        self._seen, self._by_link, self._following = None, frozenset(), (0, frozenset())
        self._use(SlowMembers(), {})

    def merged(self, step: int, table: Table, num_messages: int) -> None:
        """Decide after a merged step which ranks are out from the next step on, and which may come back."""
        if step < self._known.step:  # the state that this rank was given has this step
            return
        before, seconds = self._followed(step), table.last_submitted_s + max(table.column("merge_s"))
        known = before.after_step(step, seconds, lambda: self._look(table, num_messages, before.out), self._min_gain)
        if known.out == self._known.out:
            self._known = known
            return
        if self._membership.rank == min(self._membership.view.ranks, default=-1):
            for rank in before.out - known.out:
                _log.info("step %d: rank %d may be let in again", step, rank)
        kept = {rank: why for rank, why in self._detector.kept_out.items() if rank in known.out}
        links = self._seen.links if self._seen else ()
        self._use(known, {rank: _why(links, rank) if links else _NO_REASON for rank in known.out} | kept)

    def _look(self, table: Table, num_messages: int, out: frozenset[int]) -> SeenLinks:
        """What all members know of the links after the step of this table."""
        times = [own_s for own_s in table.compute_s() if own_s > 0]
        compute_s = median(times) if times else 0.0
        absent, least = table.absent_ranks() - out, self._membership.least
        self._seen = SeenLinks(table.links(), self._num_bytes, num_messages, compute_s, absent, least)
        return self._seen

    def _followed(self, step: int) -> SlowMembers:
        """What was known before ``step``, the same on all members that followed the same views."""
        first, gone = self._following
        if step < first or gone <= self._known.out:
            return self._known
        self._following = 0, frozenset()
        return self._known.without(gone - self._known.out)

    def long_merge(self, links: Sequence[RankLink]) -> None:
        """Put out members during a merge that takes many times as long as usual, by the links measured meanwhile.

        Only the member that proposes the next view does so: the others may have measured other values.
        """
        view = self._membership.view
        if self._seen is None or not self._membership.is_member:
            return
        absent = frozenset(range(len(links))).difference(view.ranks, self._known.out)
        seen = replace(self._seen, links=links, absent=absent)
        gone = leaving_ranks(self._known.out, seen, self._min_gain) - {self._membership.rank}
        if gone and self._membership.rank == min(set(view.ranks) - gone, default=-1):
            self._detector.keep_out({**self._detector.kept_out, **{rank: _why(links, rank) for rank in gone}})

    def follow(self, view: View, step: int, *, new: bool) -> None:
        """The members are those of ``view`` from ``step`` on: all have the same ranks out because of their links.

        ``new``: this rank has just joined, and is given what the members know.
        """
        gone = frozenset() if new else view.by_link - self._by_link - self._known.out
        self._by_link, self._following = view.by_link, (step, gone)
        known = self._detector.kept_out
        kept = {rank: known.get(rank, _NO_REASON) for rank in self._known.out | gone}
        if kept != known:
            self._detector.keep_out(kept)

    def _use(self, known: SlowMembers, why: Mapping[int, Leaving]) -> None:
        self._known = known
        self._detector.keep_out(why)

    # -- for a newcomer; called by the training thread while nothing else is called

    def state_dict(self) -> dict[str, Any]:
        """What the members remember of the ranks that were put out."""
        return {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in asdict(self._known).items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict` of another member."""
        known = SlowMembers(**{**state, "out": frozenset(state["out"])})
        self._use(known, dict.fromkeys(known.out, _NO_REASON))


def _why(links: Sequence[RankLink], rank: int) -> Leaving:
    link, others = links[rank], others_link(links, rank)
    return Leaving("link", f"its link is slow: {compared(link, others, slow_in(link, others) or ('up', 'down'))}")
