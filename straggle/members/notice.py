"""A notice that this rank's process is to end: the rank leaves after a step, without being missed.

Its row announces it with the number of others that the job needs (`Row.leaves`), so all members know after the same
step who leaves, and whether the others may go on. If they may not, that step is the last one of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from straggle.members import agents
from straggle.members.membership import Membership
from straggle.merge.departure import Departure
from straggle.merge.table import Table


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
        self._ends_after: int | None = None

    def ask(self) -> None:
        """Note that this rank is to end soon."""
        self.asked = True

    @property
    def has_left(self) -> bool:
        """Whether this rank has left with the members' agreement."""
        return self._left_after is not None

    @property
    def peers_go_on(self) -> bool:
        """Whether this rank has left, or was out when it was told to end."""
        return self.has_left or (self.asked and self._is_out())

    def ends_after(self, step: int) -> bool:
        """Whether this rank's loop ends after this step."""
        if not self.has_left and self.peers_go_on:
            return True
        last = self._ends_after if self._left_after is None else self._left_after
        return last is not None and step >= last

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
        if place in table.leaving_ranks():
            self._left_after = step
            self._membership.left_for_good = True
        elif table.ends():
            self._ends_after = step
