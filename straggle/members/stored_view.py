"""The view in the job's store: one value, which is replaced by compare-and-set."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from straggle.members.view import View
from straggle.merge.wire.store import peek

_KEY = "view"


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
