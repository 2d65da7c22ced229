"""Requests to the job's store with a time limit.

A client of torch's stores waits for an answer for ever, and serves one request at a time. So each connection has a
thread of its own, and callers wait as long as they want. A connection whose answer does not come is abandoned, and new
ones are tried.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from straggle import world
from straggle.waits import end_of

ANSWER_S = 2.0  # without an answer by then, a request has failed
_LOOK_S = 1.0
_RETRY_S = 5.0
_MAX_UNANSWERED = 4  # abandoned connections; when a network is back, TCP itself retries on them within two minutes
_CONNECT_S = 5.0
_NOTHING = "(nothing)"
_UNREACHABLE = (RuntimeError, OSError, futures.TimeoutError)

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
_Requests: TypeAlias = "SimpleQueue[tuple[Callable[[Any], Any], futures.Future[Any]] | None]"


class StoreUnreachable(RuntimeError):
    """The job's store does not answer; the text has its place."""


class JobStore:
    """A connection to the store of its own, for any number of threads.

    ``connect()`` makes one; it may block, and raise. ``place``: where the store is, in words. Every ``look_s`` seconds
    it checks which keys in ``watched`` exist, and so whether the store answers at all; ``seen`` has the last result. It
    logs when the store is lost and found again: ``who`` lost it, and what holds ``without`` it. ``sign()`` is a key and
    its value, which it sets as often, for others to see that this process is alive.
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
        sign: Callable[[], tuple[str, str]] | None = None,
    ) -> None:
        self.place = place
        self.seen: frozenset[str] = frozenset()  # written by the connection's thread
        self._connect = connect
        self._who, self._without = who, without
        self._watched, self._look_s, self._sign = tuple(watched), look_s, sign
        self._connection = _Connection(connect)  # written by the watching thread
        self._problem: str | None = None  # why the store is lost; written by the watching thread
        self._closing = world.Event()
        self._thread = world.Thread(target=self._watch, name="straggle-store", daemon=True)
        self._thread.start()

    @property
    def reachable(self) -> bool:
        """Whether the store answered at the last look."""
        return self._problem is None

    def ask(self, request: Callable[[Any], Answer], limit_s: float = ANSWER_S) -> Answer:
        """The result of ``request(store)``. Raises `StoreUnreachable` after ``limit_s``, or now if it is lost."""
        return self.begin(request).answer(limit_s)

    def begin(self, request: Callable[[Any], Answer]) -> Asked[Answer]:
        """Start ``request(store)``; its answer is awaited later. Raises `StoreUnreachable` as `ask` does."""
        self.check()
        return Asked(self, self._connection.submit(request))

    def post(self, request: Callable[[Any], object]) -> None:
        """Start ``request(store)`` without waiting; does nothing if the store is lost."""
        if self._problem is None:
            self._connection.submit(request)

    def look(self) -> None:
        """Start a look now, without waiting: the next read of ``seen`` has its result."""
        self.post(self._look)

    def close(self) -> None:
        """Carry out what was posted, as far as the store answers, and end the threads."""
        # before the threads are asked to end: from here on a lost store is no news
        self._closing.set()
        ends_at = world.monotonic() + ANSWER_S
        if self._problem is None:
            end_of([self._thread], ANSWER_S)  # it may be in a look
        # after the watching thread, which may have put another connection in this one's place
        self._connection.close()
        if self._problem is None:
            end_of([self._connection.thread], ends_at - world.monotonic())

    def check(self) -> None:
        """Raise `StoreUnreachable` if the store is known not to answer."""
        # read once: the watching thread may find the store between two reads
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
                # callers fail at once from here on, instead of each after its own two seconds
                self._lose(error)
                self._find({answer: self._connection})

    def _look(self, store: Any) -> None:
        self.seen = frozenset(key for key in self._watched if store.check([key]))
        if self._sign is not None:
            store.set(*self._sign())

    def _lose(self, error: BaseException) -> None:
        if self._closing.is_set():
            return
        self._problem = _reason(error)
        _log.warning("%s: %s does not answer (%s): %s; retrying", self._who, self.place, self._problem, self._without)

    def _find(self, asked: dict[futures.Future[None], _Connection]) -> None:
        """Wait until one of these connections answers, or a new one; try a new one every few seconds."""
        lost_at = asked_at = world.monotonic()
        while not self._closing.wait(_LOOK_S):
            for answer in [answer for answer in asked if answer.done()]:
                connection = asked.pop(answer)
                if answer.exception() is None:
                    self._use(connection, world.monotonic() - lost_at)
                    break
                connection.close()
            if self._problem is None:
                break
            if len(asked) < _MAX_UNANSWERED and world.monotonic() - asked_at >= _RETRY_S:
                asked_at, connection = world.monotonic(), _Connection(self._connect)
                asked[connection.submit(self._look)] = connection
        for connection in asked.values():
            connection.close()

    def _use(self, connection: _Connection, lost_s: float) -> None:
        # the connection first: whoever sees no problem uses it
        self._connection, self._problem = connection, None
        _log.warning("%s: %s answers again, after %.0f s", self._who, self.place, lost_s)


class Asked(Generic[Answer]):
    """A request in flight."""

    def __init__(self, store: JobStore, answer: futures.Future[Answer]) -> None:
        self._store, self._answer = store, answer

    @property
    def is_there(self) -> bool:
        """Whether `answer` would not wait."""
        return self._answer.done()

    def answer(self, limit_s: float = ANSWER_S) -> Answer:
        """The request's result. Raises `StoreUnreachable` after ``limit_s``; the request may still be carried out."""
        try:
            return self._answer.result(limit_s)
        except _UNREACHABLE as error:
            self._store.check()
            raise StoreUnreachable(f"{self._store.place} does not answer ({_reason(error)})") from error
        finally:
            self._answer.cancel()  # the answer is no longer needed


class _Connection:
    """One client of the store, on a thread that does nothing else."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._requests: _Requests = world.SimpleQueue()
        self.thread = world.Thread(
            target=_serve, args=(connect, self._requests), name="straggle-store-connection", daemon=True
        )
        self.thread.start()

    def submit(self, request: Callable[[Any], Answer]) -> futures.Future[Answer]:
        answer: futures.Future[Answer] = world.Future()
        self._requests.put((request, answer))
        return answer

    def close(self) -> None:
        """End the thread after the submitted requests; a stuck thread ends when its request returns."""
        self._requests.put(None)


def _serve(connect: Callable[[], Any], requests: _Requests) -> None:
    store = None
    while (item := requests.get()) is not None:
        request, answer = item
        # whoever asked has given up: carrying it out now would be late, and holds up the next
        if not answer.set_running_or_notify_cancel():
            continue
        try:
            # on this thread, since a name server may take seconds
            store = store or connect()
            answer.set_result(request(store))
        except Exception as error:
            answer.set_exception(error)


def _awaited(answer: futures.Future[None], limit_s: float) -> None:
    """Wait for the answer for ``limit_s``, in parts: while the process is stopped, only one part passes."""
    parts = 4
    for _ in range(parts - 1):
        with suppress(futures.TimeoutError):
            answer.exception(limit_s / parts)
            break
    answer.result(limit_s / parts)


def _reason(error: BaseException) -> str:
    """The reason in a few words: torch's errors have a C++ stack after the first line."""
    return str(error).partition("\n")[0] or "no answer in time"


def peek(store: Any, key: str) -> str | None:
    """The value of this key, or ``None`` if there is none. One request, which does not wait for the key."""
    # a store without this key changes nothing, and returns the expected value
    word = str(store.compare_set(key, _NOTHING, _NOTHING).decode())
    return None if word == _NOTHING else word


# -- which store


def default_store() -> Any:
    """The store of the default process group."""
    return world.dist.distributed_c10d._get_default_store()


def check_answers(store: Any, limit_s: float) -> None:
    """Raise `StoreUnreachable` if ``store`` does not answer on a new connection within ``limit_s``."""
    connection = _Connection(partial(connect, store, "straggle"))
    answer = connection.submit(lambda connected: connected.check(["answers"]))
    connection.close()
    try:
        answer.result(limit_s)
    except _UNREACHABLE as error:
        raise StoreUnreachable(f"{place_of(store)} does not answer ({_reason(error)})") from error


def place_of(store: Any) -> str:
    """The place of a store, in words."""
    server = server_of(store)
    if isinstance(server, world.dist.TCPStore):  # type: ignore[attr-defined]
        return f"the job's store at {server.host}:{server.port}"
    if isinstance(server, world.dist.FileStore):  # type: ignore[attr-defined]
        return f"the job's store in the file {server.path}"  # type: ignore[attr-defined]
    return "the job's store"


def connect(store: Any, prefix: str) -> Any:
    """A new connection to ``store`` under a prefix; raises if it cannot be made, and may block."""
    server = server_of(store)
    if isinstance(server, world.dist.TCPStore):  # type: ignore[attr-defined]
        # without a server, torch would try for the store's time limit, which is minutes
        socket.create_connection((server.host, server.port), _CONNECT_S).close()
    return world.dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]


def connect_all(store: Any, prefix: str) -> Any:
    """A new connection under a prefix that stays the same when a process is restarted; raises as `connect` does."""
    return world.dist.PrefixStore(prefix, connect(server_of(store), "").underlying_store)  # type: ignore[attr-defined]


def server_of(store: Any) -> Any:
    """The store itself, without its prefixes."""
    while isinstance(store, world.dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return store
