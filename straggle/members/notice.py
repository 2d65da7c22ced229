"""A notice that this rank's process is to end: the rank leaves after a step, without being missed.

Its row announces it with the number of others that the job needs (`Row.leaves`), so all members know after the same
step who leaves, and whether the others may go on. If they may not, that step is the last one of all.
The ranks of a replica agree on that step before: all of them announce it, and end after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from straggle.members import agents
from straggle.members.rows import is_last, leaving_ranks
from straggle.members.views.membership import Membership
from straggle.members.views.view import ENDED_EARLY, NOTICE, Leaving
from straggle.merge.rows.table import Table
from straggle.merge.wing import Departure


@final
class Notice(Departure):
    """What this rank was told, and what became of it. ``is_out()``: whether it is no member.

    `look` is called by the thread of `Regrouping`, and `merged` with the coordinator's lock held.
    """

    def __init__(self, membership: Membership, *, is_out: Callable[[], bool]) -> None:
        self.asked = False
        self._membership, self._is_out = membership, is_out
        self._looked = self._all_told = False
        self._left_after: int | None = None
        self._ends_after: int | None = None  # all ranks
        self._agreed_after: int | None = None  # this rank's replica

    def ask(self) -> None:
        """Note that this rank is to end soon."""
        self.asked = True

    @property
    def has_left(self) -> bool:
        """Whether this rank has left with the members' agreement."""
        return self._left_after is not None

    @property
    def peers_go_on(self) -> bool:
        """Whether this rank has left, or was out when it was told to end.

        If a rank of a replica was stood in for in the step that they had agreed on, it has not announced it.
        """
        of_replica = self._agreed_after is not None and self._ends_after is None
        return self.has_left or of_replica or (self.asked and self._is_out())

    @property
    def why_it_ends(self) -> Leaving | None:
        """Why this rank's loop ends, if that is because of a notice."""
        if self.peers_go_on:
            return NOTICE
        return None if self._ends_after is None else ENDED_EARLY

    def ends_after(self, step: int) -> bool:
        """Whether this rank's loop ends after this step."""
        if self._membership.inside.size == 1 and not self.has_left and self.peers_go_on:
            return True
        last = self._ends_after if self._left_after is None else self._left_after
        last = self._agreed_after if last is None else last
        return last is not None and step >= last

    def leave_after(self, step: int) -> None:
        """All ranks of this one's replica leave after this step."""
        if self._agreed_after is None:
            self._agreed_after = step

    def may_leave_after(self, step: int) -> bool:
        """Whether this rank may announce that it leaves after this step."""
        return self._membership.inside.size == 1 or step == self._agreed_after

    @property
    def needs(self) -> int:
        """How many others must be left for this rank to leave; 0 if it stays, or does not know yet."""
        if not (self.asked and self._looked):
            return 0
        if self._all_told:
            return self._membership.world_size
        return max(1, self._membership.least - len(self._membership.view.ended))

    def look(self, connect: Callable[[], Any]) -> None:
        """Look whether all ranks were told to end; once, when this rank was."""
        if self.asked and not self._looked:
            self._all_told = agents.all_told(connect())
            self._looked = True

    def merged(self, step: int, table: Table, place: int) -> None:
        """A step is merged: note what follows from all rows."""
        if place in leaving_ranks(table):
            self._left_after = step
            self._membership.leave_for_good()
        elif is_last(table):
            self._ends_after = step
