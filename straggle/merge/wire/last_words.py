"""What a rank leaves for its peers in the store when it ends or fails, and how it leaves its process groups."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from straggle.merge.wire.groups import JobGroup, QueuedGroup, set_aside
from straggle.merge.wire.patience import PlaceFor
from straggle.merge.wire.store import JobStore, peek

TROUBLE, ENDED = "trouble", "ended"  # keys that show that ranks have left messages
_ABORT_S = 2.0


@dataclass
class Progress:
    """How far this rank is, for its last message: the last merged step, and whether the peers know why it ends.

    ``place()``: where it is, and for how many seconds. ``in_flight_s``: for how long a collective may be on its way.
    """

    merged: int = -1
    explained: bool = False
    place: Callable[[], PlaceFor] = lambda: ("outside", 0.0)
    in_flight_s: float = math.inf
    # in a notebook, the exception of another cell
    earlier: BaseException | None = field(default_factory=lambda: getattr(sys, "last_value", None))

    def merge(self, step: int) -> None:
        """This rank has merged ``step``."""
        self.merged = step

    def explain(self) -> None:
        """The peers know why this rank ends."""
        self.explained = True

    def tell(self, place: Callable[[], PlaceFor]) -> None:
        """From here on ``place()`` says where it is."""
        self.place = place

    def limit_flight(self, seconds: float) -> float:
        """A collective may be on its way for so long; for how long before."""
        before, self.in_flight_s = self.in_flight_s, seconds
        return before

    @property
    def uncaught(self) -> BaseException | None:
        """The exception that ends this process, as the interpreter keeps it for debuggers, or ``None``."""
        error: BaseException | None = getattr(sys, "last_value", None)
        return None if error is self.earlier else error

    @property
    def after(self) -> str:
        """This rank's place between its steps, in words."""
        return f"after step {self.merged}" if self.merged >= 0 else "before its first step was merged"

    def raised(self, rank: int, error: BaseException) -> str:
        """The report of an error in the user's code between steps."""
        return f"rank {rank} raised {self.after}, outside of a step: {error!r}"


@dataclass(frozen=True)
class End:
    """A rank's last message: it takes part in no step after ``merged``."""

    merged: int
    words: str

    @classmethod
    def read(cls, word: str) -> End:
        merged, _, words = word.partition(" ")
        return cls(int(merged), words)


def abandon(groups: list[JobGroup], in_flight_s: float, wait_s: float = 0.0) -> None:
    """Let nothing wait for these groups any more: each is aborted, for ``wait_s`` at most, or kept as it is."""
    while groups:
        group = groups.pop()
        if isinstance(group, QueuedGroup):
            group.abort(wait_s)
        else:
            group.set_aside(in_flight_s)


def leave_groups(groups: list[Any], job_groups: list[JobGroup], progress: Progress) -> None:
    """Drop the groups; if a peer or this rank has failed, collectives may be in flight that never end.

    Freeing such a group waits for them, until their time limit, and blocks whichever thread collects it.
    """
    if progress.explained:
        abandon(job_groups, progress.in_flight_s, _ABORT_S)
    while groups:
        group = groups.pop()
        if progress.explained:
            set_aside(group, progress.in_flight_s)


def report_end(store: JobStore, rank: int, name: int, progress: Progress, leave: Callable[[], None]) -> None:
    """When the model is closed or the process ends, report why, unless the peers know."""
    if not progress.explained:
        if (error := sys.exc_info()[1] or progress.uncaught) is not None:
            store.post(partial(leave_word, f"failure/{rank}", progress.raised(name, error), TROUBLE))
        else:
            why = "its loop was over, or it called sys.exit; use model.join(loader) for uneven data"
            word = f"{progress.merged} rank {name} ended {progress.after} ({why})"
            store.post(partial(leave_word, f"ended/{rank}", word, ENDED))
    store.close()
    leave()


# -- what the store's thread does


def leave_word(key: str, word: str, sign: str, store: Any) -> None:
    """Write a message under ``key``; ``sign`` tells ranks that watch it that there are messages."""
    store.set(key, word)
    store.set(sign, "")


def absent(store: Any, key: str, ranks: Iterable[int]) -> list[int]:
    """Those of these ranks without a message under ``key``."""
    return [rank for rank in ranks if not store.check([f"{key}/{rank}"])]


def words_under(store: Any, key: str, ranks: Iterable[int]) -> dict[int, str]:
    """The messages that ranks left under ``key``, by rank."""
    return {rank: word for rank in ranks if (word := peek(store, f"{key}/{rank}")) is not None}
