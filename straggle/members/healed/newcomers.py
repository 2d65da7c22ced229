"""Newcomers from both sides: when this rank lets others in, and what it lacks itself while it is one."""

from __future__ import annotations

import sys

from straggle.merge.rows.table import Table

_SHRINKS = 0.9  # a backlog that is at least this part of the last one hardly shrinks: the rank need not catch up


class LetsIn:
    """After which step this rank lets others in, and at which it gives them its state; with the merge's lock held."""

    def __init__(self) -> None:
        self.gives_at = -1  # at the beginning of this step a newcomer gets this rank's state
        self._admits_after = -1  # the step after which this rank's replica lets others in: its ranks have agreed on it
        self._let_in_at = -1  # the step from which on the newcomers of the view that is followed take part

    def follow(self, step: int) -> None:
        """A view is followed whose newcomers take part from this step on."""
        self._let_in_at = max(self._let_in_at, step)
        if self._admits_after < self._let_in_at:  # another shard was that far earlier: no other view comes
            self._admits_after = -1

    def stop(self) -> None:
        """This rank is no member: it lets nobody in."""
        self.gives_at, self._admits_after = -1, -1

    def gives_after(self, step: int) -> None:
        """A newcomer gets its state at the beginning of the step after this one."""
        self.gives_at = step + 1

    def agreed(self, step: int) -> bool:
        """The replica's ranks let others in after ``step``; false if their view is followed already."""
        self.gives_after(step)
        if not self.is_open(step):
            return False
        self._admits_after = step
        return True

    def is_open(self, step: int) -> bool:
        """Whether a view may still come whose newcomers take part after this step."""
        return step >= self._let_in_at

    def admits_after(self, step: int) -> bool:
        """Whether the replica's ranks have agreed to let others in after it."""
        return self._admits_after == step


class Backlog:
    """What this rank lacks since it was let in: first its state, then the steps that are merged without it.

    With the merge's lock held.
    """

    def __init__(self) -> None:
        self.came_in_at = -1  # the step at which it was let in last
        self._last_taken_at = 0  # the step that was being merged when it last took a merged step
        self._catch_up: tuple[int, int] | None = None  # once it has its state: the step it must reach, and its lag then
        self._tables: list[tuple[int, Table]] = []  # of the steps that were merged while it waits for its state

    def begin_anew(self) -> None:
        """It waits for a state from here on."""
        self._tables, self._catch_up = [], None

    def came_in(self, step: int) -> None:
        """It is let in while this step is merged."""
        self._last_taken_at = self.came_in_at = step

    def merged(self, step: int, table: Table) -> None:
        """A step is merged while it waits for its state."""
        self._tables.append((step, table))

    def healed(self, step: int) -> list[tuple[int, Table]]:
        """It has its state, and must reach this step; the steps that were merged meanwhile."""
        tables, self._tables = self._tables, []
        self._catch_up = step, sys.maxsize
        return tables

    @property
    def catches_up(self) -> bool:
        """Whether it has its state, and lacks steps."""
        return self._catch_up is not None

    def taken(self, merging: int) -> None:
        """The training thread has taken a merged step while this one is being merged."""
        self._last_taken_at = merging

    def none_taken_for(self, merging: int) -> int:
        """How many steps were merged since it took one."""
        return merging - self._last_taken_at

    def is_caught_up(self, step: int, merging: int, lag: int) -> bool:
        """Whether it need not catch up any more, as its loop enters ``step``; if not, how far it must come is renewed.

        While it takes steps, more are merged. A rank whose loop is not faster than its peers' steps would never catch
        up, so it goes on like any rank as soon as its backlog hardly shrinks.
        """
        if self._catch_up is None or step < self._catch_up[0]:
            return False
        if not 0 < lag <= _SHRINKS * self._catch_up[1]:
            return True
        self._catch_up = merging, lag
        return False

    def is_over(self) -> None:
        """It lacks nothing."""
        self._catch_up = None
