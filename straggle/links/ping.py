"""A ping of one way between two ranks: messages of two sizes, and the time until each has arrived.

The latency is half of the time that the kernels took to make the connection: no thread of a busy rank is in it. The
rate comes from the difference between a small and a large message, each sent a few times, of which the quickest counts:
what the ranks' own threads need is in both. A rank measures what it sends. What it receives, its peers measure.

A rank answers one ping at a time, on a thread of its own, and only to who knows the job's word. Sizes are checked,
every wait has a limit, and nothing that comes in is kept.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from straggle import world
from straggle.policies.network.merge_time import Link
from straggle.waits import end_of

TOKEN_BYTES = 32
SMALL_BYTES = 1024
FIRST_BYTES = 1 << 14  # of the large message; if that is quick, a larger one follows, up to
LEAST_BYTES = 1 << 16  # or more
MOST_BYTES = 1 << 24
RESOLUTION_S = 1e-3  # a large message that takes less is as quick as can be measured
QUICK_S = 5e-3  # if a message takes less, one follows that is four times as large
_TRIES = 3
_SMALL_TRIES = 4  # before the large ones and after them: if all of these had to wait, a link would look too quick
_LONG_S = 1.5  # after which no message is sent again
LIMIT_S = 5.0  # of each wait on either side, but for
_CONNECT_S = 0.9  # the kernels' part of a measurement, and
_SILENT_S = 1.8  # of a question: they try again after a second, so that one lost packet is no silence,
_WORD_S = 0.5  # the word of a client, which it has at hand, and
_GREET_S = 10.0  # the first answer, which comes after those to others
_CLIENT_S = 20.0  # after which a client is sent away
_CHUNK_BYTES = 1 << 20
_RTT_OFFSET = 68  # of tcpi_rtt in Linux' struct tcp_info, in microseconds
_HEAD, _ANSWER = struct.Struct("!I"), struct.Struct("!q")
_BACK = 1 << 31  # beside a number of bytes: the peer is to send so many


@dataclass(frozen=True)
class Measured:
    """A way to a peer. ``num_bytes`` were sent for it. ``progress`` is the peer's word (`PingServer`)."""

    link: Link
    num_bytes: int
    progress: int


class PingServer:
    """Answers pings on a port of ``host`` that is free, from its making until `close`.

    Who sends ``token`` is told ``progress()``: the last step of which all of this rank's part was on its way.
    """

    def __init__(self, host: str, token: bytes, progress: Callable[[], int]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=64)
        self.host, self.port = self._listener.getsockname()[:2]
        self._token, self._progress = token, progress
        self._closing = world.Event()
        self._buffer = memoryview(bytearray(LEAST_BYTES))
        self._thread = world.Thread(target=self._serve, name="straggle-ping-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._closing.set()
        with contextlib.suppress(OSError):  # to wake the thread; not all systems do so
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        end_of([self._thread], 2 * LIMIT_S)

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:  # the listener is closed, or there are too many open files
                self._closing.wait(0.1)
                continue
            with client, contextlib.suppress(OSError):
                self._answer(client)

    def _answer(self, client: socket.socket) -> None:
        _limit(client, _WORD_S)
        until = world.monotonic() + _CLIENT_S
        token = bytearray(TOKEN_BYTES)
        if not _fill(client, memoryview(token)) or not hmac.compare_digest(token, self._token):
            return
        _limit(client, LIMIT_S)
        self._say(client)
        head = memoryview(bytearray(_HEAD.size))
        while world.monotonic() < until and not self._closing.is_set() and _fill(client, head):
            (word,) = _HEAD.unpack(head)
            num_bytes = word & ~_BACK
            if not 0 < num_bytes <= MOST_BYTES:
                return
            if word & _BACK:
                client.sendall(bytes(num_bytes))
            elif not self._take(client, num_bytes):
                return
            self._say(client)

    def _say(self, client: socket.socket) -> None:
        client.sendall(_ANSWER.pack(self._progress()))

    def _take(self, client: socket.socket, num_bytes: int) -> bool:
        """Read so much and forget it; whether it came."""
        if len(self._buffer) < min(num_bytes, _CHUNK_BYTES):
            self._buffer = memoryview(bytearray(min(num_bytes, _CHUNK_BYTES)))
        while num_bytes > 0:
            part = self._buffer[: min(num_bytes, len(self._buffer))]
            if not _fill(client, part):
                return False
            num_bytes -= len(part)
        return True


def measure(host: str, port: int, token: bytes, largest_bytes: int, *, both_ways: bool = False) -> Measured:
    """The way to the rank that answers there; ``both_ways``: the slower one of that and of the way back.

    Raises ``OSError`` if it does not answer, or takes longer than `LIMIT_S` for a message.
    """
    with _connection(host, port, _CONNECT_S) as (connection, latency_s):
        progress = _greet(connection, token)
        payload = bytearray(os.urandom(min(largest_bytes, MOST_BYTES)))
        sent = _Sent(connection, memoryview(payload))
        rate = sent.bytes_per_s()
        if both_ways:
            rate = min(rate, _Asked(connection, memoryview(payload)).bytes_per_s())
        return Measured(Link(latency_s, rate), sent.num_bytes, progress)


def ask_progress(host: str, port: int, token: bytes) -> int:
    """The word of the rank that answers there. Raises ``OSError`` as `measure`, and ``ConnectionResetError`` if it
    has sent this rank away, which may have been late itself.
    """
    with _connection(host, port, _SILENT_S) as (connection, _):
        return _greet(connection, token)


class _Sent:
    """Messages over one connection."""

    def __init__(self, connection: socket.socket, payload: memoryview) -> None:
        self._connection, self._payload = connection, payload
        self._began_at = world.monotonic()
        self.num_bytes = 0

    def bytes_per_s(self) -> float:
        """From the quickest small and the quickest large message."""
        small_s = self._quickest_s(SMALL_BYTES, _SMALL_TRIES)
        size, large_s = FIRST_BYTES, self._quickest_s(FIRST_BYTES)
        while large_s - small_s < QUICK_S and size < len(self._payload):
            size = min(4 * size, len(self._payload))
            large_s = self._quickest_s(size)
        small_s = min(small_s, self._quickest_s(SMALL_BYTES, _SMALL_TRIES))
        return (size - SMALL_BYTES) / max(large_s - small_s, RESOLUTION_S)

    def _quickest_s(self, num_bytes: int, tries: int = _TRIES) -> float:
        """The shortest of a few tries; of one, if all has taken long by now."""
        quickest_s = self._seconds(num_bytes)
        for _ in range(tries - 1):
            if world.monotonic() - self._began_at < _LONG_S:
                quickest_s = min(quickest_s, self._seconds(num_bytes))
        return quickest_s

    def _seconds(self, num_bytes: int) -> float:
        """Send so much; how long it took until the peer had it and answered."""
        message = b"".join((_HEAD.pack(num_bytes), self._payload[:num_bytes]))
        begin = world.monotonic()
        self._connection.sendall(message)
        _read_answer(self._connection)
        self.num_bytes += len(message)
        return world.monotonic() - begin


class _Asked(_Sent):
    """Messages the other way: of the same sizes, when they are asked for."""

    def _seconds(self, num_bytes: int) -> float:
        begin = world.monotonic()
        self._connection.sendall(_HEAD.pack(num_bytes | _BACK))
        if not _fill(self._connection, self._payload[:num_bytes]):
            raise OSError("the peer sends nothing")
        _read_answer(self._connection)
        return world.monotonic() - begin


@contextlib.contextmanager
def _connection(host: str, port: int, limit_s: float) -> Iterator[tuple[socket.socket, float]]:
    """A connection, and the latency that making it has shown."""
    begin = world.monotonic()
    with socket.create_connection((host, port), limit_s) as connection:
        round_trip_s = _round_trip_s(connection, world.monotonic() - begin)
        connection.settimeout(None)
        _limit(connection, _GREET_S)
        yield connection, round_trip_s / 2


def _round_trip_s(connection: socket.socket, connected_s: float) -> float:
    """What the kernel measured as it made the connection or, if it has none, how long that took."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, struct.error):
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
            if (microseconds := struct.unpack_from("=I", info, _RTT_OFFSET)[0]) > 0:
                return float(microseconds) / 1e6
    return connected_s


def _limit(connection: socket.socket, limit_s: float) -> None:
    """End each wait after ``limit_s``, by the kernel: Python's own limits would wake a thread for each packet."""
    seconds, fraction = divmod(limit_s, 1)
    limit = struct.pack("@ll", int(seconds), int(fraction * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _greet(connection: socket.socket, token: bytes) -> int:
    connection.sendall(token)
    progress = _read_answer(connection)
    _limit(connection, LIMIT_S)
    return progress


def _read_answer(connection: socket.socket) -> int:
    answer = bytearray(_ANSWER.size)
    if not _fill(connection, memoryview(answer)):
        raise ConnectionResetError("the peer does not answer this ping: it came too late, or without the job's word")
    return int(_ANSWER.unpack(answer)[0])


def _fill(connection: socket.socket, view: memoryview) -> bool:
    """Read until ``view`` is full; false if the other end has closed. Raises ``TimeoutError`` after the limit."""
    while len(view):
        try:
            count = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("the peer does not answer pings") from None
        if count == 0:
            return False
        view = view[count:]
    return True
