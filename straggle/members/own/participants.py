"""Which ranks make the collectives of the loop, and which collective of one rank is the same as that of another.

All members pass each step, so what they say of it is the same on all of them. After a step those take part whose rows
are in it, without those that wait for their state. Collectives are counted from step to step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from straggle.members.views.view import View
from straggle.merge.wire.channel import ToRepeat

Ranks = tuple[tuple[int, int], ...]  # each with the generation with which it came in, as this rank saw it


class Number(NamedTuple):
    """Which collective: the loop's last step before it, and how many came between."""

    step: int
    place: int


NOWHERE = Number(-2, 0)  # of a rank whose collectives are its own


class MembersChanged(ToRepeat):
    """The members have changed, and a collective of the loop's own has to be repeated with as many tensors as ranks.

    All members raise it in the same collective, whose tensors are as they were. ``rank`` is this rank, ``step`` the
    step that its loop has left last; ``before`` are the ranks that the collective was called for, ``ranks`` those that
    are left of them. In a step's block, uncaught, it ends the block early.
    """

    def __init__(self, message: str, rank: int, step: int, before: tuple[int, ...], ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.rank, self.step, self.before, self.ranks = rank, step, before, ranks


class Participants:
    """Those of one rank, from view to view and from step to step; the caller has a lock around all of it.

    ``here``: those of the collectives that the loop calls next; ``None``: this rank is in none.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._noted: dict[int, Ranks] = {}  # after steps that the training thread has not left
        self._catching_up: frozenset[int] = frozenset()
        self._members: Mapping[int, str] = {}  # with their incarnations
        self._since: dict[int, int] = {}  # a rank that was out and is back is another one, in the same process or not
        self.here: Ranks | None = None
        self._changed_after = -1  # the last step after which `here` was another one than before it

    def begin(self, view: View) -> None:
        """All members of the first view take part."""
        self._members, self._since = view.members, dict.fromkeys(view.ranks, view.generation)
        self.here = tuple(sorted(self._since.items()))

    def numbers(self, world_size: int) -> list[int]:
        """For each rank, whether it waits for its state."""
        return [int(rank in self._catching_up) for rank in range(world_size)]

    def follow(self, view: View, told: Sequence[Sequence[int]]) -> None:
        """``told``: the `numbers` of the members, in order; those that came in with this view know nothing."""
        new = {rank for rank, own in view.members.items() if self._members.get(rank) != own} | view.joined
        catching_up = self._catching_up | new
        if self._rank in new:  # it has not seen who came in before it
            known = [own for rank, own in zip(view.ranks, told, strict=True) if rank not in view.joined]
            catching_up = view.joined | {rank for own in known for rank, waits in enumerate(own) if waits}
        self._members = view.members
        self._since = {rank: view.generation if rank in new else self._since[rank] for rank in view.ranks}
        self._catching_up = catching_up & set(view.members)

    def put_out(self) -> None:
        """This rank is no member."""
        self._noted.clear()
        self.here, self._members, self._since, self._catching_up = None, {}, {}, frozenset()

    def merged(self, step: int, present: frozenset[int], stood_in: frozenset[int]) -> None:
        """A step is merged: after it, those that are ``present`` take part, unless they wait for their state."""
        self._catching_up -= present - stood_in
        self._noted[step] = tuple((rank, self._since.get(rank, -1)) for rank in sorted(present - self._catching_up))

    def left(self, step: int) -> None:
        """The training thread has left a step."""
        ranks, before = self._noted.get(step, ()), self.here
        self.here = ranks if self._rank in dict(ranks) else None
        if self.here != before:
            self._changed_after = step
        self._noted = {number: own for number, own in self._noted.items() if number > step}

    def forget(self, lost: Ranks, step: int) -> None:
        """These are gone, as the loop knows from a collective after this step."""
        if self.here is not None and lost:
            self.here, self._changed_after = tuple(own for own in self.here if own not in lost), step

    def may_be_old(self, step: int) -> bool:
        """Whether the loop may have asked how many there are before that changed, for a collective after this step."""
        return step <= self._changed_after + 1

    def gone(self, ranks: Ranks, view: View) -> list[str]:
        """The incarnations of those that are members no more in this view, which is not followed yet."""
        known = {rank: own for rank, own in self._members.items() if view.members.get(rank) != own}
        return [known[rank] for rank, since in ranks if self._since.get(rank) == since and rank in known]

    def alive(self, ranks: Ranks) -> tuple[int, ...]:
        """Those of them that have been members since."""
        return tuple(rank for rank, since in ranks if self._since.get(rank) == since)
