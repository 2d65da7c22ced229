"""Threads that ping one another: real sockets and a real store, in one process."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from straggle.links import ping
from straggle.links.pings import Merged, Pings
from straggle.merge.wire.store import JobStore, connect, peek
from straggle.policies.network.merge_time import Link
from straggle.policies.network.rank_links import RankLink, Way

LOCAL = "127.0.0.1"
LIMIT_S = 60.0  # on a busy machine; it ends as soon as all have measured


class Rank:
    """One of several, whose merges end as often as the test says."""

    def __init__(self, rank: int, world_size: int, store: dist.FileStore) -> None:
        self.store = JobStore(
            partial(connect, store, "test"), "the store", who=f"rank {rank}", without="all", watched=("nothing",)
        )
        self.ways: tuple[tuple[float, Way], ...] = ()
        self.measured = threading.Event()
        self.on_its_way = 0, 0.0
        self.num_looks = 0  # at the merge that is on its way
        self.members = tuple(range(world_size))
        self.out: tuple[int, ...] = ()
        self.known: tuple[Way, ...] = ()  # of all ranks
        self.in_long_merges: list[Sequence[RankLink]] = []
        self.pings = Pings(
            rank,
            world_size,
            self.store,
            merged_bytes=1 << 20,
            sink=self._take,
            on_its_way=self._look,
            on_long=self.in_long_merges.append,
            begins_s=-math.inf,
        )

    def _look(self) -> tuple[int, float]:
        self.num_looks += 1
        return self.on_its_way

    def _take(self, ways: tuple[tuple[float, Way], ...]) -> None:
        self.ways = ways
        self.measured.set()

    def merge(self, step: int) -> None:
        self.pings.merged(step, lambda: Merged(step, 0.1, 0.01, self.members, self.known, self.out))


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sequence[Rank]]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(tmp_path / "store"))
    monkeypatch.setattr("straggle.links.pings.default_store", lambda: store)
    made = [Rank(rank, 3, store) for rank in range(3)]
    try:
        yield made
    finally:
        for one in made:
            one.pings.close()
            one.store.close()


def test_each_rank_measures_the_ways_to_its_two_neighbours_until_it_is_no_member(ranks: Sequence[Rank]) -> None:
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
        assert len(one.ways) == len({way.target for _, way in one.ways}) == 2
        assert one.pings.num_bytes > 3 * 2 * 3 * (1 << 14)  # to two peers, each message three times
    ranks[0].members = ()
    while time.monotonic() < until and ranks[0].ways:
        ranks[0].measured.clear()
        ranks[0].merge(step)
        ranks[0].measured.wait(1.0)
    assert ranks[0].ways == ()


def test_who_is_out_is_pinged_in_a_turn_of_its_own(ranks: Sequence[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    one, peer, out = ranks
    one.members, one.out, step, turns = (0, 1), (2,), 0, list[tuple[int, bool]]()
    measured = ping.measure

    def measure(*place: Any, both_ways: bool) -> ping.Measured:
        turns.append((step, both_ways))
        return measured(*place, both_ways=both_ways)

    monkeypatch.setattr("straggle.links.pings.measure", measure)
    for other in (peer, out):
        other.pings.begin()
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until and {way.target for _, way in one.ways} != {1, 2}:
        one.merge(step)
        time.sleep(0.3)  # more than a ping takes here
        step += 1
    assert {way.target for _, way in one.ways} == {1, 2}
    pinged = dict(turns)
    assert len(pinged) == len(turns)  # in no turn both of them
    in_turns = list(pinged.values())
    assert in_turns[:4] == [False, True, False, True]


def test_who_is_closed_before_its_first_merge_opens_no_port(ranks: Sequence[Rank]) -> None:
    ranks[0].pings.close()
    ranks[0].merge(0)
    assert not ranks[0].pings.running


def _said(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


def test_a_cut_is_said_while_it_lasts_though_a_ping_is_due(
    ranks: Sequence[Rank], caplog: pytest.LogCaptureFixture
) -> None:
    one, cut_off = ranks[0], ranks[1]
    with socket.create_server((LOCAL, 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        # no room for one more: the kernel does not answer, as where packets are lost
        cut_off.store.ask(lambda store: store.set("ping/1", f"{full.getsockname()[1]} {LOCAL}"))
        ranks[2].pings.begin()
        one.on_its_way = 1 << 20, 2.0
        until, step, said = time.monotonic() + LIMIT_S, 0, list[str]()
        while time.monotonic() < until and not said:
            one.merge(step)
            one.measured.wait(0.01)
            step, said = step + 1, _said(caplog, "do not answer pings")
    assert len(said) == 1
    assert (
        f"step {1 << 20}: the merge has been on the network for 2.0 s, where 10 ms are usual; ranks [1] do not"
        in said[0]
    )


def test_where_no_ping_comes_through_none_is_said_to_be_silent(
    ranks: Sequence[Rank], caplog: pytest.LogCaptureFixture
) -> None:
    one = ranks[0]
    with socket.create_server((LOCAL, 0)) as closed:
        nowhere = f"{closed.getsockname()[1]} {LOCAL}"
    for peer in (1, 2):
        one.store.ask(partial(_publish, key=f"ping/{peer}", place=nowhere))
    one.on_its_way = 1 << 20, 60.0
    until, step = time.monotonic() + LIMIT_S, 0
    while time.monotonic() < until and one.num_looks < 8:  # five merges say what is usual
        one.merge(step)
        one.measured.wait(0.01)
        step += 1
    assert one.num_looks >= 8
    assert not _said(caplog, "on the network")


def test_a_way_that_is_no_slower_than_the_way_to_itself_is_not_said(
    ranks: Sequence[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    # so coarse that all ways of this machine have the same rate, far below what the others are said to have
    monkeypatch.setattr("straggle.links.ping.QUICK_S", 1e6)
    for module in ("ping", "pings"):
        monkeypatch.setattr(f"straggle.links.{module}.RESOLUTION_S", 1e6)
    one = ranks[0]
    one.known = tuple(Way(a, b, Link(1e-5, 1e12)) for a, b in ((1, 2), (2, 1)))
    for peer in ranks[1:]:
        peer.pings.begin()
    until, step, enough = time.monotonic() + LIMIT_S, 0, 4 * 2 * 3 * (1 << 18)  # of four rounds at least
    while time.monotonic() < until and one.pings.num_bytes < enough:
        one.merge(step)
        one.measured.wait(0.01)
        step += 1
    assert one.pings.num_bytes >= enough
    assert one.ways == ()


@contextlib.contextmanager
def narrow_way(port: int) -> Iterator[int]:
    """A port that leads to another one, to which it carries 1 MB a second."""
    closing = threading.Event()

    def carry(source: socket.socket, target: socket.socket, seconds: float) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(4096):
                time.sleep(seconds)
                target.sendall(part)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def serve(listener: socket.socket) -> None:
        while not closing.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = listener.accept()
                with client, socket.create_connection((LOCAL, port)) as peer:
                    back = threading.Thread(target=carry, args=(peer, client, 0.0))
                    back.start()
                    carry(client, peer, 0.004)
                    back.join()

    with socket.create_server((LOCAL, 0)) as listener:
        listener.settimeout(0.1)
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield listener.getsockname()[1]
        closing.set()
        thread.join()


def long_merge(ranks: Sequence[Rank]) -> None:
    """Rank 0's merge of step 10 does not end, where the ones before took 10 ms; the others are known to be quick."""
    one = ranks[0]
    one.known = tuple(Way(a, b, Link(1e-4, 65e6)) for a, b in ((1, 2), (2, 1)))
    for peer in ranks[1:]:
        peer.pings.begin()
        peer.on_its_way = 10, 2.0
    for step in range(10):
        one.merge(step)
        one.measured.wait(0.6)  # it has seen each of them
    assert not one.in_long_merges
    one.on_its_way = 10, 2.0


@pytest.mark.parametrize("has_submitted", [True, False])
def test_what_is_found_in_a_long_merge_of_ranks_that_have_submitted_is_told(
    ranks: Sequence[Rank], has_submitted: bool
) -> None:
    one, slow, _ = ranks
    slow.pings.begin()
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until and (place := slow.store.ask(lambda store: peek(store, "ping/1"))) is None:
        time.sleep(0.01)
    assert place is not None
    with narrow_way(int(place.split()[0])) as port:
        slow.store.ask(partial(_publish, key="ping/1", place=f"{port} {LOCAL}"))
        long_merge(ranks)
        slow.on_its_way = 10, 2.0 if has_submitted else 0.0
        while time.monotonic() < until and not one.in_long_merges:
            time.sleep(0.01)
        links = one.in_long_merges[0]
        one.pings.close()
    assert [link.is_known for link in links] == [True, has_submitted, True]
    assert links[2].down_bytes_per_s > 3e6
    assert not links[1].down_bytes_per_s > 3e6  # where it is known


def test_a_long_merge_in_which_no_link_is_slow_is_not_pinged_for_long(ranks: Sequence[Rank]) -> None:
    one = ranks[0]
    long_merge(ranks)
    until, num_bytes = time.monotonic() + LIMIT_S, -1
    while time.monotonic() < until and one.pings.num_bytes != num_bytes:
        num_bytes, looks = one.pings.num_bytes, one.num_looks
        while time.monotonic() < until and one.num_looks < looks + 16:  # at least two in each half a second
            time.sleep(0.01)
    assert one.pings.num_bytes == num_bytes


def _publish(store: Any, *, key: str, place: str) -> None:
    store.set(key, place)
