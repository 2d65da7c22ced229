"""Threads that ping one another: real sockets and a real store, in one process."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from straggle.merge.links.pings import Merged, Pings
from straggle.merge.store import JobStore, connect
from straggle.policies.rank_links import Way

LIMIT_S = 60.0  # on a busy machine; it ends as soon as all have measured


class Rank:
    """One of several, whose merges end as often as the test says."""

    def __init__(self, rank: int, world_size: int, store: dist.FileStore) -> None:
        self.store = JobStore(
            partial(connect, store, "test"), "the store", who=f"rank {rank}", without="all", watched=("nothing",)
        )
        self.ways: tuple[tuple[float, Way], ...] = ()
        self.measured = threading.Event()
        self._members = tuple(range(world_size))
        self.pings = Pings(
            rank,
            world_size,
            self.store,
            merged_bytes=1 << 20,
            sink=self._take,
            on_its_way=lambda: (0, 0.0),
            begins_s=-math.inf,
        )

    def _take(self, ways: tuple[tuple[float, Way], ...]) -> None:
        self.ways = ways
        self.measured.set()

    def merge(self, step: int) -> None:
        self.pings.merged(step, lambda: Merged(step, 0.1, 0.01, self._members, ()))


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sequence[Rank]]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(tmp_path / "store"))
    monkeypatch.setattr("straggle.merge.links.pings.default_store", lambda: store)
    made = [Rank(rank, 3, store) for rank in range(3)]
    try:
        yield made
    finally:
        for one in made:
            one.pings.close()
            one.store.close()


def test_each_rank_measures_the_ways_to_its_two_neighbours(ranks: Sequence[Rank]) -> None:
    until, step = time.monotonic() + LIMIT_S, 0
    while time.monotonic() < until and not all({way.target for _, way in one.ways} for one in ranks):
        for one in ranks:
            one.merge(step)
            one.measured.wait(0.01)
        step += 1
    for rank, one in enumerate(ranks):
        assert {way.source for _, way in one.ways} == {rank}
        assert {way.target for _, way in one.ways} <= {0, 1, 2} - {rank}
        assert all(0 < way.link.bytes_per_s <= 65.6e6 and way.link.latency_s > 0 for _, way in one.ways)
        assert one.pings.num_bytes > 0


def test_who_is_closed_before_its_first_merge_opens_no_port(ranks: Sequence[Rank]) -> None:
    ranks[0].pings.close()
    ranks[0].merge(0)
    assert not ranks[0].pings.running
