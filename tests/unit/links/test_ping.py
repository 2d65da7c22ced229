"""A ping between two sockets of this machine, and who is not answered."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from straggle.links.ping import (
    FIRST_BYTES,
    LEAST_BYTES,
    MOST_BYTES,
    RESOLUTION_S,
    PingServer,
    ask_progress,
    measure,
)

HOST, TOKEN = "127.0.0.1", bytes(range(32))


@pytest.fixture
def server() -> Iterator[PingServer]:
    answering = PingServer(HOST, TOKEN, lambda: 41)
    try:
        yield answering
    finally:
        answering.close()


@pytest.mark.parametrize("largest", [LEAST_BYTES, 1 << 18])
def test_a_ping_measures_a_latency_and_a_rate_and_counts_its_bytes(server: PingServer, largest: int) -> None:
    measured = measure(HOST, server.port, TOKEN, largest)
    assert 0 < measured.link.latency_s < 1
    assert 0 < measured.link.bytes_per_s <= largest / RESOLUTION_S
    assert 3 * (1024 + FIRST_BYTES) <= measured.num_bytes < 3 * (1024 + 2 * largest)
    assert measured.progress == 41


class Slow:
    """A way that lets a number of bytes a second through, in one direction, in parts of a hundredth of a second."""

    def __init__(self, port: int, bytes_per_s: float) -> None:
        self._port, self._part = port, int(bytes_per_s / 100)
        self._listener = socket.create_server((HOST, 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.port = self._listener.getsockname()[1]
        self._over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._over.set()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            server = socket.create_connection((HOST, self._port))
            threading.Thread(target=self._forward, args=(server, client, 1 << 16, 0.0), daemon=True).start()
            self._forward(client, server, self._part, 0.01)

    def _forward(self, source: socket.socket, target: socket.socket, part: int, rest_s: float) -> None:
        with contextlib.suppress(OSError), source, target:
            while (data := source.recv(part)) and not self._over.wait(rest_s * len(data) / part):
                target.sendall(data)


def test_a_narrow_way_has_its_rate(server: PingServer) -> None:
    way = Slow(server.port, 1e6)
    try:
        measured = measure(HOST, way.port, TOKEN, 1 << 20)
    finally:
        way.close()
    # never quicker than the way lets through; on a busy machine it may be slower
    assert 1e4 < measured.link.bytes_per_s < 1.3e6
    assert measured.num_bytes < 4 * FIRST_BYTES, "no more than what a narrow way needs to be known"


def test_who_does_not_know_the_word_is_sent_away(server: PingServer) -> None:
    with pytest.raises(ConnectionResetError, match="does not answer"):
        measure(HOST, server.port, bytes(32), LEAST_BYTES)
    assert ask_progress(HOST, server.port, TOKEN) == 41


def test_who_is_cut_off_is_told_from_who_sends_a_late_rank_away(server: PingServer) -> None:
    with pytest.raises(ConnectionResetError):
        ask_progress(HOST, server.port, bytes(32))
    with (
        socket.create_server((HOST, 0), backlog=0) as full,
        socket.create_connection(full.getsockname()),
        pytest.raises(TimeoutError),  # its kernel has no room for one more, and says nothing
    ):
        ask_progress(HOST, full.getsockname()[1], TOKEN)


@pytest.mark.parametrize("size", [0, MOST_BYTES + 1, 2**32 - 1])
def test_a_size_that_no_ping_has_ends_the_connection(server: PingServer, size: int) -> None:
    with socket.create_connection((HOST, server.port), 5) as client:
        client.sendall(TOKEN)
        assert client.recv(8) == struct.pack("!q", 41)
        client.sendall(struct.pack("!I", size))
        assert client.recv(8) == b""


def test_a_client_that_says_nothing_is_let_go_and_others_are_answered(server: PingServer) -> None:
    with socket.create_connection((HOST, server.port)), socket.create_connection((HOST, server.port)) as other:
        other.close()
        assert ask_progress(HOST, server.port, TOKEN) == 41


def test_who_is_closed_answers_no_more(server: PingServer) -> None:
    server.close()
    with pytest.raises(OSError, match=r"."):
        measure(HOST, server.port, TOKEN, LEAST_BYTES)
