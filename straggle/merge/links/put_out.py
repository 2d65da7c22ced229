"""Which members are put out because of their links, and until when: decided by all members alike.

All ask the policy after each merged step. Whom it puts out is left out of the next view, and is not let in while it
stays so. In the middle of a merge that takes many times as long as usual one member asks it, by what that one has
measured meanwhile, and the others follow the view that comes of it. Members ping who is out, so that all know from the
telemetry when its link is back; then it is let in as any rank that asks. A member that was let in has the policy's
memory with its state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from straggle.merge.links.seen import seen_links
from straggle.merge.members.membership import Membership
from straggle.merge.members.view import Leaving, View
from straggle.merge.table import Table
from straggle.policies.leaves import LinkPolicy, Places, SeenLinks
from straggle.policies.rank_links import RankLink, others_link
from straggle.policies.slow_links import compared

_NO_REASON = Leaving("link", "its link is slow")
_log = logging.getLogger(__name__)


class PutOut:
    """Of one wrapped model. ``out`` may be read by any thread; the rest is called with the coordinator's lock held.

    ``num_bytes`` of gradients are merged in a step.
    """

    def __init__(self, policy: LinkPolicy, membership: Membership, *, num_bytes: int) -> None:
        self._policy, self._membership, self._watch = policy, membership, membership.watch
        self._num_bytes = num_bytes
        self._places = Places()
        self._seen: SeenLinks | None = None  # after the last step
        self._by_link: frozenset[int] = frozenset()  # those of the view that was followed last
        self._following: tuple[int, frozenset[int]] = 0, frozenset()  # from which step on which ranks are out by it

    @property
    def out(self) -> frozenset[int]:
        """The ranks that are no members, or are about to be none, because of their links."""
        return self._places.out

    def begin_anew(self) -> None:
        """This rank is no member any more."""
        self._seen, self._by_link, self._following = None, frozenset(), (0, frozenset())
        self._use(Places(), {})

    def merged(self, step: int, table: Table, num_messages: int) -> None:
        """A step is merged: who is put out from the next one on, and who may come back."""
        if step < self._places.step:  # it is in what this rank was given
            return
        before = replace(self._followed(step), step=step)
        least = self._membership.least
        self._seen = seen = seen_links(table, self._num_bytes, num_messages, out=before.out, min_ranks=least)
        places = self._policy.next_places(before, seen)
        if places.out == self._places.out:
            self._places = places
            return
        if self._membership.rank == min(self._membership.view.ranks, default=-1):
            for rank in before.out - places.out:
                _log.info("step %d: rank %d may be let in again", step, rank)
        kept = {rank: why for rank, why in self._watch.kept_out.items() if rank in places.out}
        self._use(places, {rank: _why(seen.links, rank) for rank in places.out} | kept)

    def _followed(self, step: int) -> Places:
        """The places before ``step``, as all members have them that followed the same views."""
        first, gone = self._following
        if step < first or gone <= self._places.out:
            return self._places
        self._following = 0, frozenset()
        return self._places.with_outside(gone - self._places.out, members=True)

    def long_merge(self, links: Sequence[RankLink]) -> None:
        """A merge takes many times as long as usual, and this rank has measured these links meanwhile: who is put out.

        Only the member that is to propose the next view does so: the others may not have measured the same.
        """
        view = self._membership.view
        if self._seen is None or not self._membership.is_member:
            return
        gone = self._policy.leaving_now(self._places, replace(self._seen, links=links)) - {self._membership.rank}
        if gone and self._membership.rank == min(set(view.ranks) - gone, default=-1):
            self._watch.keep_out({**self._watch.kept_out, **{rank: _why(links, rank) for rank in gone}})

    def follow(self, view: View, step: int, *, new: bool) -> None:
        """The members are those of ``view`` from ``step`` on: all have the same ranks out because of their links.

        ``new``: this rank has just joined, and is given what the members know.
        """
        gone = frozenset() if new else view.by_link - self._by_link - self._places.out
        self._by_link, self._following = view.by_link, (step, gone)
        known = self._watch.kept_out
        kept = {rank: known.get(rank, _NO_REASON) for rank in self._places.out | gone}
        if kept != known:
            self._watch.keep_out(kept)

    def _use(self, places: Places, why: Mapping[int, Leaving]) -> None:
        self._places = places
        self._watch.keep_out(why)

    # -- for a member that is let in; by the training thread, while nothing else is called

    def state_dict(self) -> dict[str, Any]:
        """What the members know of who was put out."""
        return {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in asdict(self._places).items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        places = Places(**{**state, "leaves": frozenset(state["leaves"]), "out": frozenset(state["out"])})
        self._use(places, dict.fromkeys(places.out, _NO_REASON))


def _why(links: Sequence[RankLink], rank: int) -> Leaving:
    link, others = links[rank], others_link(links, rank)
    return Leaving("link", f"its link is slow: {compared(link, others)}")
