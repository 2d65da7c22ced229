"""A connection between a leaf and one of its parents: messages with a small header, each way.

A leaf sends its part of a bucket in pieces, and stops where the bucket is merged by then: the rest is of no use, and is
not to stand in the way of what is. Sizes from the wire are checked, nothing is unpickled, and who connects has to know
what the leaf left in the job's store.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

PART, ROW, COMING, MERGED, DONE = range(5)  # a leaf's part of a bucket and its telemetry; merged; a step is over for it
TOKEN_BYTES = 32
_HEADER = struct.Struct("!BBIIQQ")  # kind, flag, step, bucket, bytes of the message, and of it before this piece
_PIECE = 1 << 16
_UNSENT = 1 << 17  # bytes in the kernel: what waits there cannot be stopped
_CLOSE_S = 60.0  # for a leaf to take what was merged, as long as it takes anything
_SILENT_S = 3.0  # after which the other end is taken for gone


@dataclass
class Message:
    """What is sent, or has come.

    Of what is merged, ``flag``: this leaf's part is in it; ``last``: all of the step is merged; ``waited``: parents
    wait in this step, for some time.
    """

    kind: int
    step: int
    bucket: int = 0
    flag: bool = False
    last: bool = False
    waited: bool = False
    payload: bytearray = field(default_factory=bytearray)
    stopped: bool = False  # no further piece of it is to be sent; by any thread


class Wire:
    """One end of a connection. ``on_message(message)`` is called by the thread that receives.

    ``on_lost(reason)`` is called once, by one of its threads, where the connection ends before `close`, after the last
    message that came. A message of more than ``max_bytes`` ends it.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        max_bytes: int,
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._socket = connection
        self._max_bytes = max_bytes
        self._on_message, self._on_lost = on_message, on_lost
        self._queue: deque[Message] = deque()
        self._changed = threading.Condition()
        self._closing = self._ended = False
        self._num_moved = 0  # pieces that went over it, more or less: two threads count without a lock
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
        self._threads = [
            threading.Thread(target=self._guarded, args=(run,), name=f"straggle-leaf-{word}", daemon=True)
            for word, run in (("send", self._send), ("receive", self._receive))
        ]
        for thread in self._threads:
            thread.start()

    def post(self, message: Message, *, first: bool = False) -> None:
        """Send it, after what was posted before, or ``first``."""
        with self._changed:
            (self._queue.appendleft if first else self._queue.append)(message)
            self._changed.notify()

    def close(self) -> None:
        """Send what was posted, and end the connection when the other end does, or nothing has gone over it for long.

        For at most a minute.
        """
        self.finish()
        moved, since = self._num_moved, time.monotonic()
        until = since + _CLOSE_S
        while (running := self._running()) and time.monotonic() < min(until, since + _SILENT_S):
            running.join(0.1)
            if moved != self._num_moved:
                moved, since = self._num_moved, time.monotonic()
        with contextlib.suppress(OSError):  # which ends a thread that still waits
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def finish(self) -> None:
        """Nothing is posted any more: `close` is to follow."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _running(self) -> threading.Thread | None:
        own = threading.current_thread()
        return next((thread for thread in self._threads if thread is not own and thread.is_alive()), None)

    # -- its threads

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except (OSError, ValueError) as error:
            with self._changed:
                known, self._ended = self._ended or self._closing, True
                self._changed.notify()
            if not known:
                self._on_lost(str(error))

    def _send(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing or self._ended)
                if self._ended or not self._queue:
                    break
                message = self._queue.popleft()
            self._send_one(message)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _send_one(self, message: Message) -> None:
        view, size, sent = memoryview(message.payload), len(message.payload), 0
        while not message.stopped:
            piece = view[sent : sent + _PIECE]
            flags = message.flag + 2 * message.last + 4 * message.waited
            header = _HEADER.pack(message.kind, flags, message.step, message.bucket, size, sent)
            self._socket.sendall(header + bytes(piece))
            self._num_moved += 1
            sent += len(piece)
            if sent == size:
                return

    def _receive(self) -> None:
        header, payload = bytearray(_HEADER.size), bytearray()
        while self._fill(memoryview(header), may_end=True):
            kind, flag, step, bucket, size, before = _HEADER.unpack(header)
            if size > self._max_bytes or before > size:
                raise ValueError(f"a message of {size} bytes, where at most {self._max_bytes} were expected")
            if before == 0:
                payload = bytearray(size)
            if len(payload) != size:
                raise ValueError("a piece of another message than the one before")
            end = min(size, before + _PIECE)
            self._fill(memoryview(payload)[before:end])
            if end == size:
                self._on_message(Message(kind, step, bucket, bool(flag & 1), bool(flag & 2), bool(flag & 4), payload))
        if not self._closing:
            raise OSError("the connection was closed")

    def _fill(self, view: memoryview, *, may_end: bool = False) -> bool:
        """Read until ``view`` is full; false where the other end has closed, which it may before a header."""
        whole = len(view)
        while len(view):
            count = self._socket.recv_into(view)
            self._num_moved += 1
            if count == 0:
                if may_end and len(view) == whole:
                    return False
                raise OSError("the connection was closed")
            view = view[count:]
        return True


def close_all(wires: Collection[Wire]) -> None:
    """Close all of these, and wait for them together."""
    for wire in wires:
        wire.finish()
    for wire in wires:
        wire.close()


def greet(address: tuple[str, int], token: bytes, rank: int, limit_s: float) -> socket.socket:
    """A parent's connection to a leaf. Raises ``OSError`` where there is none within ``limit_s``."""
    connection = socket.create_connection(address, limit_s)
    connection.sendall(token + struct.pack("!I", rank))
    return connection


def greeted(listener: socket.socket, token: bytes, limit_s: float) -> tuple[int, socket.socket] | None:
    """A connection that one of the parents made, and its rank; ``None``: who connected is none of them."""
    connection, _ = listener.accept()
    try:
        connection.settimeout(limit_s)
        word = bytearray()
        while len(word) < TOKEN_BYTES + 4:
            if not (more := connection.recv(TOKEN_BYTES + 4 - len(word))):
                raise OSError("it said nothing")
            word += more
    except OSError:
        connection.close()
        return None
    if not hmac.compare_digest(bytes(word[:TOKEN_BYTES]), token):
        connection.close()
        return None
    return int(struct.unpack("!I", word[TOKEN_BYTES:])[0]), connection
