"""A job's store that was restarted is empty: its members write again what they know, so that the job can go on.

Each rank writes the newest view that it knows. As soon as all members of the newest of these have done so, or after a
moment enough of them, its successor is written, with the same members. It is a new view, because no rank knows what the
store had last: a view that only half of the members had seen is superseded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from straggle import world
from straggle.members.views.in_replica import ALONE, InReplica
from straggle.members.views.view import View
from straggle.merge.wire.store import peek

GATHER_S = 5.0  # for members to find the store again; each tries every second

_log = logging.getLogger(__name__)


def following(known: Mapping[int, View], waited_s: float, *, least: int) -> View | None:
    """The view to go on with, from the newest that each rank knows; ``None`` if more ranks have to write theirs.

    Ranks that were out know an old view. So as many members of the newest view are needed as a job goes on with: some
    of them have seen each view that any rank acted on. A member that writes nothing within `GATHER_S` is not waited
    for.
    """
    if not known:
        return None
    newest = max(known.values(), key=lambda view: view.generation)
    here = {rank: own for rank, own in newest.members.items() if rank in known}
    if len(here) < len(newest.members) and (
        waited_s < GATHER_S or replace(newest, members=here).shortfall(least, with_returning=False)
    ):
        return None
    return newest.again()


class Refill:
    """This rank's part in filling the store: one thread fills, and any thread notes what is to be written again."""

    def __init__(self, rank: int, world_size: int, least: int, inside: InReplica = ALONE) -> None:
        self._rank, self._world_size, self._least, self._inside = rank, world_size, least, inside
        self._words: dict[str, str] = {}  # as they lie in the store
        self._began_at: float | None = None

    def note(self, key: str, word: str) -> None:
        """Note a word, as it lies in the store, that ranks which come later must find there."""
        self._words[key] = word

    def fill(self, store: Any, view: View) -> bool:
        """Write what this rank knows; ``view`` is the newest that it has seen. Call it until the store has a view.

        Returns whether it has begun with that now.
        """
        if begins := self._began_at is None:
            self._began_at = world.monotonic()
            name = self._inside.rank(self._rank)
            _log.warning("rank %d: the job's store was restarted; its members write again what it had", name)
        # of a copy: other threads note words meanwhile
        for key, word in list(self._words.items()):
            store.compare_set(key, "", word)
        key = f"known/{self._inside.rank(self._rank)}"
        store.set(key, view.encode())
        known = self._all_known(store, view.job)
        waited_s = world.monotonic() - self._began_at
        if (again := following(known, waited_s, least=self._least)) is not None:
            word = again.encode()
            # after the words above: once there is a view, nobody writes them again
            if store.compare_set("view", "", word).decode() == word:
                _log.warning(
                    "generation %d, %s: the members, which the job's store has again",
                    again.generation,
                    self._inside.named(again.ranks),
                )
        return begins

    def begun(self, store: Any, job: str) -> View | None:
        """The newest view of this job that others have written, if it has begun; for a rank that has not seen that."""
        known = [view for view in self._all_known(store, job).values() if view.has_begun]
        return max(known, key=lambda view: view.generation, default=None)

    def filled(self) -> None:
        """Note that the store has a view."""
        self._began_at = None

    def _all_known(self, store: Any, job: str) -> dict[int, View]:
        """By rank, the newest view of this job that it has written, if it has."""
        return {rank: own for rank in range(self._world_size) if (own := self._known(store, rank, job))}

    def _known(self, store: Any, rank: int, job: str) -> View | None:
        """The newest view of this job that a rank knows, if it has written one."""
        if (word := peek(store, f"known/{self._inside.rank(rank)}")) is None:
            return None
        view = View.decode(word, self._world_size)
        return view if view.job == job else None
