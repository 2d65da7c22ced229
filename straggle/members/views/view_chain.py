"""The chain of views as one rank sees it: the view that it saw last, and the next one that it proposes.

In the job's store the view is one value, which is replaced by compare-and-set.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch.distributed as dist

from straggle import world
from straggle.members.views.view import Change, View
from straggle.merge.wire.store import peek

_KEY = "view"
_log = logging.getLogger(__name__)


class Hold(NamedTuple):
    """The members wait before ``step`` for a view in which others are let in, or those that are ``leaving`` are gone.

    ``leads``: this rank writes it.
    """

    step: int
    leads: bool
    leaving: frozenset[int] = frozenset()


class ViewChain:
    """The views of one incarnation of one rank; any thread may use it. ``store`` is a connection to the job's store."""

    def __init__(self, rank: int, incarnation: str, stored: StoredView, kind: str = "rank") -> None:
        self.rank, self.incarnation, self._kind = rank, incarnation, kind
        self.giving: View | None = None  # the last view that was seen in which this member gives its state to others
        self.was_member = False  # in a view that was seen
        self.held: Hold | None = None  # what the members wait for before they begin their next step
        self.annulled = ""  # the job of a first view that was given up before it had begun
        self.left: Change | None = None  # why this member is in no view now, if a view that was seen has it
        self.changes: dict[tuple[int, bool], Change] = {}  # how each rank left and joined last, in views that were seen
        self._stored = stored
        self._changed = world.Condition()
        self._view: View | None = None

    @property
    def view(self) -> View:
        """The last view that was seen."""
        assert self._view is not None
        return self._view

    @property
    def has_view(self) -> bool:
        """Whether a view was seen."""
        return self._view is not None

    @property
    def is_member(self) -> bool:
        """Whether this incarnation is a member in the last view that was seen."""
        return self.is_in(self.view)

    def is_in(self, view: View) -> bool:
        """Whether this incarnation is a member in that view."""
        return view.members.get(self.rank) == self.incarnation

    def hold(self, held: Hold) -> None:
        """Wait for a view that the members know to come."""
        with self._changed:
            self.held = held
            self._changed.notify_all()

    def release(self, held: Hold) -> None:
        """Wait no more for what ``held`` says; for another view that is known to come by now, the members still do."""
        with self._changed:
            if self.held is held:
                self.held = None

    def wait_newer(self, generation: int, seconds: float) -> bool:
        """Wait for a view after ``generation``, or until one is known to come."""
        with self._changed:
            return self._changed.wait_for(lambda: self.view.generation > generation or self.held is not None, seconds)

    def find(self, store: Any) -> bool:
        """Whether there is a view that this process is in, or one of a job that has begun without it."""
        try:
            view = self._stored.read(store)
        except StoreEmptied:
            return False
        if not view.has_begun and not self.is_in(view):
            self.annul(store, view)  # it names a process of this rank that is gone: the ranks would never meet
            return False
        with self._changed:
            self._view, self.was_member = view, self.is_in(view)
            self._forget_annulled(view)
        return True

    def has_begun(self, job: str) -> bool:
        """Whether the members of this first view have begun, as far as is known here."""
        view = self._view
        return view is not None and view.job == job and view.has_begun

    def _forget_annulled(self, view: View) -> None:
        if view.job == self.annulled and view.has_begun:  # it was not given up: the store had lost it
            self.annulled = ""

    def begin(self, store: Any, first: View) -> None:
        """Write a first view unless there is a view."""
        self._stored.begin(store, first)

    def annul(self, store: Any, first: View) -> None:
        """Give up a first view that has not begun: all its ranks agree on another one."""
        self._stored.annul(store, first)

    def replace(self, store: Any, old: View, new: View) -> bool:
        """Replace ``old`` by ``new`` if ``old`` is the view; returns whether ``new`` is the view now, unseen."""
        return self._stored.replace(store, old, new)

    def propose(self, store: Any, old: View, new: View) -> bool:
        """Propose the next view; returns whether it was accepted. Either way, the accepted view is seen then."""
        if is_next := self.replace(store, old, new):
            level = logging.DEBUG if all(change.kind == "done" for change in new.changes) else logging.WARNING
            words = new.said(self._kind)
            _log.log(level, "generation %d, %ss %s: %s", new.generation, self._kind, list(new.ranks), words)
        self.look(store)
        return is_next

    def look(self, store: Any) -> None:
        """Read the view and note it as seen."""
        self.saw(self.read(store))

    def saw(self, view: View) -> None:
        """Note a view as seen, if it is newer."""
        with self._changed:  # several threads read the store: an older answer may come after a newer one
            known = self._view
            if known is None or (view.generation, view.begun) > (known.generation, known.begun):
                self._view = view
                self._forget_annulled(view)
                self.was_member |= self.is_in(view)
                told = (*view.changes, *view.before)  # that of a view which was not seen, too
                own = (change for change in told if change.rank == self.rank and not change.joined)
                self.left = None if self.is_in(view) else next(own, self.left)
                if view.giver == self.rank and (self.giving is None or view.step > self.giving.step):
                    self.giving = view
                self.changes.update({(change.rank, change.joined): change for change in view.changes})
                self._changed.notify_all()

    def read(self, store: Any) -> View:
        """Read the view without noting it. Raises `StoreEmptied`, or ``ValueError`` for a view of another job."""
        known = self._view
        try:
            view = self._stored.read(store)
            if known is not None and view.job != known.job:
                if known.has_begun:
                    raise ValueError("the job's store has the members of another job")
                raise StoreEmptied("the ranks of the job have met again")
        except StoreEmptied:
            if known is not None and not known.has_begun:
                self.annulled = known.job
            raise
        return view


class StoreEmptied(dist.DistStoreError):
    """The job's store has no view: it was restarted, or its ranks have yet to agree on a first one."""


class StoredView:
    """Reads and replaces the view; any thread may, with a connection of its own."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._last: tuple[str, View] | None = None  # the view that was read last, and its word

    def read(self, store: Any) -> View:
        """The view. Raises `StoreEmptied` if there is none, and ``ValueError`` if it is not of this job."""
        if not (word := peek(store, _KEY)):
            raise StoreEmptied("the job's store has no view of its members")
        if (last := self._last) is not None and last[0] == word:
            return last[1]
        view = View.decode(word, self._world_size)
        # both in one assignment: several threads read views, without a lock
        self._last = word, view
        return view

    def begin(self, store: Any, first: View) -> bool:
        """Write a first view unless there is a view; returns whether ``first`` is the view now."""
        return self._swap(store, "", first.encode())

    def replace(self, store: Any, old: View, new: View) -> bool:
        """Replace ``old`` by ``new`` if ``old`` is the view; returns whether ``new`` is the view now."""
        return self._swap(store, old.encode(), new.encode())

    def annul(self, store: Any, first: View) -> None:
        """Give up a first view that has not begun: all its ranks agree on another one."""
        self._swap(store, first.encode(), "")

    def _swap(self, store: Any, old: str, new: str) -> bool:
        return bool(store.compare_set(_KEY, old, new).decode() == new)
