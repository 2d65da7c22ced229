"""Links of a watched job: the same pings, and what they measured in the lines of `straggle.watch`.

There is no merge of straggle's that could carry what one rank measured to the others, so that goes through the job's
store.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from straggle.links.pings import Merged, Pings
from straggle.merge.store import JobStore, StoreUnreachable, connect_all, default_store, peek, place_of
from straggle.policies.links import Link
from straggle.policies.rank_links import RankLink, Way, rank_links

_CORNER = "straggle/watch"
_ASK_S = 5.0


def links_of_lines(lines: Sequence[Mapping[str, Any]]) -> tuple[RankLink, ...]:
    """Each rank's link, by the lines of all ranks for one step."""
    ways = [way for rank, line in enumerate(lines) for way in _ways_of(rank, line.get("ways", ()))]
    return rank_links(ways, len(lines))


def _ways_of(rank: int, words: Sequence[Sequence[float]]) -> list[Way]:
    return [Way(rank, int(target), Link(latency_s, rate), age_s) for target, latency_s, rate, age_s in words]


class WatchedLinks:
    """The pings of one rank of a watched job; ``group``: the ranks of the job that these are, if they are not all."""

    def __init__(self, rank: int, world_size: int, *, merged_bytes: int, group: Sequence[int] = ()) -> None:
        store, corner = default_store(), "/".join([_CORNER, *map(str, group)])
        self._rank, self._world_size = rank, world_size
        self._measured: tuple[tuple[float, Way], ...] = ()  # by the thread that pings
        self._known: list[Way] = []  # by the same thread
        self._asked_at = -math.inf
        self._step, self._merged_at = 0, time.monotonic()
        self._store = JobStore(
            partial(connect_all, store, corner),
            place_of(store),
            who=f"rank {rank}",
            without="links are not measured meanwhile",
            watched=("links",),
        )
        self._pings = Pings(
            rank,
            world_size,
            self._store,
            merged_bytes=merged_bytes,
            sink=self._publish,
            on_its_way=lambda: (self._step, 0.0),
        )

    def words(self) -> list[list[float]]:
        """What this rank has measured, for its line of a step."""
        now = time.monotonic()
        return [
            [way.target, way.link.latency_s, round(way.link.bytes_per_s), round(now - at, 3)]
            for at, way in self._measured
        ]

    def merged(self, step: int) -> None:
        """A step is over; by the training thread."""
        now = time.monotonic()
        seconds, self._merged_at, self._step = now - self._merged_at, now, step + 1
        self._pings.merged(step, partial(self._merged, step, seconds))

    def close(self) -> None:
        """Ping no more."""
        self._pings.close()
        self._store.close()

    # -- the thread that pings

    def _publish(self, measured: tuple[tuple[float, Way], ...]) -> None:
        self._measured = measured
        key, words = f"ways/{self._rank}", json.dumps(self.words())
        self._store.post(lambda store: store.set(key, words))

    def _merged(self, step: int, seconds: float) -> Merged:
        return Merged(step, seconds, math.nan, tuple(range(self._world_size)), self._ways())

    def _ways(self) -> list[Way]:
        """What all ranks have measured, as far as the store has it; asked every few seconds."""
        if (now := time.monotonic()) < self._asked_at + _ASK_S:
            return self._known
        self._asked_at = now
        try:
            words = self._store.ask(lambda store: [peek(store, f"ways/{rank}") for rank in range(self._world_size)])
        except StoreUnreachable:
            return []
        self._known = [way for rank, own in enumerate(words) if own for way in _ways_of(rank, json.loads(own))]
        return self._known
