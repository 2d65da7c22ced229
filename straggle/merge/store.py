"""The job's store, asked with a time limit.

A client of torch's stores waits for an answer for ever, and serves one request at a time. So each connection has a
thread of its own, and who asks waits as long as it wants to. One whose answer does not come is left to itself, and the
store is looked for on new ones.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch.distributed as dist

ANSWER_S = 2.0  # who has no answer by then has none
_LOOK_S = 1.0
_RETRY_S = 5.0
_MAX_UNANSWERED = 4  # of their connections, when a network is back, TCP itself tries again within two minutes
_CONNECT_S = 5.0
_NOTHING = "(nothing)"
_UNREACHABLE = (RuntimeError, OSError, futures.TimeoutError)

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class StoreUnreachable(RuntimeError):
    """The job's store does not answer; says where it is."""


class JobStore:
    """A connection of its own to the store, for any number of threads.

    ``connect()`` makes one; it may block, and raise. ``place`` is where the store is, in words. Each ``look_s`` seconds
    it looks which of the keys in ``watched`` there are, and finds out so whether the store answers at all: what it last
    saw is ``seen``. When the store is lost and found again, it says so in the log: ``who`` lost it, and what goes on
    ``without`` it.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        place: str,
        *,
        who: str,
        without: str,
        watched: Sequence[str],
        look_s: float = _LOOK_S,
    ) -> None:
        self.place = place
        self.seen: frozenset[str] = frozenset()  # by the connection's thread
        self._connect = connect
        self._who, self._without = who, without
        self._watched, self._look_s = tuple(watched), look_s
        self._connection = _Connection(connect)  # by the watching thread
        self._problem: str | None = None  # why the store is lost; by the watching thread
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="straggle-store", daemon=True)
        self._thread.start()

    @property
    def reachable(self) -> bool:
        """Whether the store answered when it was last looked at."""
        return self._problem is None

    def ask(self, request: Callable[[Any], Answer], limit_s: float = ANSWER_S) -> Answer:
        """What ``request(store)`` gives. Raises `StoreUnreachable` after ``limit_s``, at once where it is known."""
        return self.begin(request).answer(limit_s)

    def begin(self, request: Callable[[Any], Answer]) -> Asked[Answer]:
        """Have ``request(store)`` carried out; its answer is waited for later. Raises `StoreUnreachable` as `ask`."""
        self.check()
        return Asked(self, self._connection.submit(request))

    def post(self, request: Callable[[Any], object]) -> None:
        """Have ``request(store)`` carried out, and do not wait for that; nothing happens where the store is lost."""
        if self._problem is None:
            self._connection.submit(request)

    def look(self) -> None:
        """Look now, and do not wait for that: the next read of ``seen`` finds what is there now."""
        self.post(self._look)

    def close(self) -> None:
        """Carry out what was posted, as far as the store answers, and end the threads."""
        self._closing.set()
        until = time.monotonic() + ANSWER_S
        self._end(self._thread, until)  # it may still look
        self._connection.close()
        self._end(self._connection.thread, until)

    def _end(self, thread: threading.Thread, until: float) -> None:
        # a finalizer comes here on whatever thread it happens to run
        if self._problem is None and thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))

    def check(self) -> None:
        """Raise `StoreUnreachable` where it is known that the store does not answer."""
        if (problem := self._problem) is not None:
            raise StoreUnreachable(f"{self.place} does not answer ({problem})")
        if self._closing.is_set():
            raise StoreUnreachable(f"the connection to {self.place} is closed")

    # -- the watching thread

    def _watch(self) -> None:
        while not self._closing.wait(self._look_s):
            answer = self._connection.submit(self._look)
            try:
                _awaited(answer, ANSWER_S)
            except _UNREACHABLE as error:
                self._lose(error)
                self._find({answer: self._connection})

    def _look(self, store: Any) -> None:
        self.seen = frozenset(key for key in self._watched if store.check([key]))

    def _lose(self, error: BaseException) -> None:
        if self._closing.is_set():
            return
        self._problem = _reason(error)
        _log.warning(
            "%s: %s does not answer (%s): %s; it is looked for", self._who, self.place, self._problem, self._without
        )

    def _find(self, asked: dict[futures.Future[None], _Connection]) -> None:
        """Until one of these connections answers, or a new one; it tries a new one every few seconds."""
        lost_at = asked_at = time.monotonic()
        while not self._closing.wait(_LOOK_S):
            for answer in [answer for answer in asked if answer.done()]:
                connection = asked.pop(answer)
                if answer.exception() is None:
                    self._use(connection, time.monotonic() - lost_at)
                    break
                connection.close()
            if self._problem is None:
                break
            if len(asked) < _MAX_UNANSWERED and time.monotonic() - asked_at >= _RETRY_S:
                asked_at, connection = time.monotonic(), _Connection(self._connect)
                asked[connection.submit(self._look)] = connection
        for connection in asked.values():
            connection.close()

    def _use(self, connection: _Connection, lost_s: float) -> None:
        self._connection, self._problem = connection, None
        _log.warning("%s: %s answers again, after %.0f s", self._who, self.place, lost_s)


class Asked(Generic[Answer]):
    """A request that is on its way."""

    def __init__(self, store: JobStore, answer: futures.Future[Answer]) -> None:
        self._store, self._answer = store, answer

    def answer(self, limit_s: float = ANSWER_S) -> Answer:
        """What it gives. Raises `StoreUnreachable` after ``limit_s``; the request may still be carried out."""
        try:
            return self._answer.result(limit_s)
        except _UNREACHABLE as error:
            self._store.check()
            raise StoreUnreachable(f"{self._store.place} does not answer ({_reason(error)})") from error
        finally:
            self._answer.cancel()  # the answer is of no use any more


class _Connection:
    """One client of the store, on a thread that does nothing else."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._requests: SimpleQueue[tuple[Callable[[Any], Any], futures.Future[Any]] | None] = SimpleQueue()
        self.thread = threading.Thread(
            target=_serve, args=(connect, self._requests), name="straggle-store-connection", daemon=True
        )
        self.thread.start()

    def submit(self, request: Callable[[Any], Answer]) -> futures.Future[Answer]:
        answer: futures.Future[Answer] = futures.Future()
        self._requests.put((request, answer))
        return answer

    def close(self) -> None:
        """End the thread, after what was submitted; one that is stuck, when it comes back."""
        self._requests.put(None)


def _serve(
    connect: Callable[[], Any], requests: SimpleQueue[tuple[Callable[[Any], Any], futures.Future[Any]] | None]
) -> None:
    store = None
    while (item := requests.get()) is not None:
        request, answer = item
        if not answer.set_running_or_notify_cancel():
            continue
        try:
            store = store or connect()
            answer.set_result(request(store))
        except Exception as error:
            answer.set_exception(error)


def _awaited(answer: futures.Future[None], limit_s: float) -> None:
    """Wait for the answer ``limit_s``, in parts: only one goes by while the entire process is stopped."""
    parts = 4
    for _ in range(parts - 1):
        if futures.wait([answer], limit_s / parts).done:
            break
    answer.result(limit_s / parts)


def _reason(error: BaseException) -> str:
    """In a few words: torch's own errors have the stack of their C++ code behind the first line."""
    return str(error).partition("\n")[0] or "no answer in time"


def peek(store: Any, key: str) -> str | None:
    """What lies under this key; ``None`` where nothing does. One request, which waits for nobody to write it."""
    # a store that has no such key changes nothing, and gives back what it was told to expect
    word = str(store.compare_set(key, _NOTHING, _NOTHING).decode())
    return None if word == _NOTHING else word


# -- which store


def default_store() -> Any:
    """The store that the default process group was made with."""
    return dist.distributed_c10d._get_default_store()


def check_answers(store: Any, limit_s: float) -> None:
    """Raise `StoreUnreachable` where ``store`` does not answer on a new connection within ``limit_s``."""
    connection = _Connection(partial(connect, store, "straggle"))
    answer = connection.submit(lambda connected: connected.check(["answers"]))
    connection.close()
    try:
        answer.result(limit_s)
    except _UNREACHABLE as error:
        raise StoreUnreachable(f"{place_of(store)} does not answer ({_reason(error)})") from error


def place_of(store: Any) -> str:
    """Where a store is, in words."""
    server = server_of(store)
    if isinstance(server, dist.TCPStore):  # type: ignore[attr-defined]
        return f"the job's store at {server.host}:{server.port}"
    if isinstance(server, dist.FileStore):  # type: ignore[attr-defined]
        return f"the job's store in the file {server.path}"  # type: ignore[attr-defined]
    return "the job's store"


def connect(store: Any, prefix: str) -> Any:
    """A new connection to ``store``, in a corner of its own; raises where it cannot be had, and may block."""
    server = server_of(store)
    if isinstance(server, dist.TCPStore):  # type: ignore[attr-defined]
        # torch would try for as long as the store's time limit, minutes, where no server listens
        socket.create_connection((server.host, server.port), _CONNECT_S).close()
    return dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]


def connect_all(store: Any, prefix: str) -> Any:
    """A new connection to a corner that is the same however often a process was started again; raises as `connect`."""
    return dist.PrefixStore(prefix, connect(server_of(store), "").underlying_store)  # type: ignore[attr-defined]


def server_of(store: Any) -> Any:
    """The store itself, without its prefixes."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return store
