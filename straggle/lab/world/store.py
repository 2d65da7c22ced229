"""The job's store in a simulated world: one server, whose answers take a while, and may not come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from straggle.lab.world.scheduler import Scheduler, Thread

Answer = TypeVar("Answer")


class Server:
    """Keys and values. ``answer_s``: the mean time of a request; ``cut``: ranks whose requests do not come."""

    def __init__(self, world: Scheduler, answer_s: float = 2e-4) -> None:
        self.world = world
        self.answer_s = answer_s
        self.cut: Counter[int] = Counter()
        self._num_away = 0  # for how many reasons it answers nobody
        self.data: dict[str, bytes] = {}
        self.waiters: list[Thread] = []
        self.number = 0  # how often it was killed: connections to an earlier one are closed
        self.is_down = False

    def answers(self, rank: int) -> bool:
        """Whether this rank's requests are answered now."""
        return not (self._num_away or self.cut[rank])

    def go_away(self) -> None:
        """Answer nobody."""
        self._num_away += 1

    def come_back(self) -> None:
        """Answer again."""
        self._num_away -= 1
        self.world.wake(self.waiters)

    def kill(self) -> None:
        """Its process is gone: what it had is lost, and connections to it close."""
        self.data.clear()
        self.number, self.is_down = self.number + 1, True
        self.world.wake(self.waiters)

    def start(self) -> None:
        """Another one is in its place, which has nothing."""
        self.is_down = False

    def mend(self, rank: int) -> None:
        """This rank's requests come again."""
        self.cut[rank] -= 1
        self.world.wake(self.waiters)


class Store(dist.Store):  # type: ignore[name-defined, misc]
    """A connection to it, with what torch's stores have."""

    def __init__(self, server: Server, timeout: timedelta = timedelta(seconds=300)) -> None:
        super().__init__()
        self.server, self._timeout = server, timeout
        self._number = server.number
        if server.is_down:
            raise dist.DistNetworkError("The client socket has failed to connect to the store: connection refused")

    @property
    def timeout(self) -> timedelta:
        """Of requests that wait for a key."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """The same, from now on."""
        self._timeout = timeout

    def clone(self) -> Store:
        """Another connection."""
        return Store(self.server, self.timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._ask(lambda data: data.__setitem__(key, _bytes(value)))

    def get(self, key: str) -> bytes:
        """Nobody asks so: a key that was just there may be deleted, or the store restarted; this would wait for it."""
        raise self.server.world.broken(f"a store is asked for {key}, and waits for it if it is gone: peek at it")

    def add(self, key: str, number: int) -> int:
        """Count."""

        def add(data: dict[str, bytes]) -> int:
            data[key] = _bytes(str(now := int(data.get(key, b"0")) + number))
            return now

        return self._ask(add)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether these are there."""
        return self._ask(lambda data: all(key in data for key in keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` if the value is ``expected``, or there is none and that is empty; what there is then."""

        def compare_set(data: dict[str, bytes]) -> bytes:
            if key not in data and expected:
                return _bytes(expected)
            if key not in data or data[key] == _bytes(expected):
                data[key] = _bytes(desired)
            return data[key]

        return self._ask(compare_set)

    def delete_key(self, key: str) -> bool:
        """Remove it; whether it was there."""
        return self._ask(lambda data: data.pop(key, None) is not None)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until these are there."""
        world, begin = self.server.world, self.server.world.now
        while not self.check(keys):
            if (waited := world.now - begin) >= (timeout or self.timeout).total_seconds():
                raise dist.DistStoreError(f"wait timeout, keys: {', '.join(keys)}")
            world.sleep(max(0.001, 0.01 * (waited - 1.0)))  # a thread that waits for minutes asks seldom

    def _ask(self, request: Callable[[dict[str, bytes]], Answer]) -> Answer:
        world = self.server.world
        if world.check().holds:
            raise world.broken("a thread asks the store while it holds a lock")
        world.sleep(world.random.expovariate(1 / self.server.answer_s))
        while self._is_open() and not self.server.answers(world.current.rank):
            world.wait(self.server.waiters)
        answer = request(self.server.data) if self._is_open() else None
        world.sleep(world.random.expovariate(1 / self.server.answer_s))
        if not self._is_open():
            raise dist.DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed")
        return cast(Answer, answer)

    def _is_open(self) -> bool:
        return self._number == self.server.number


class Outside(Store):
    """A connection of whoever runs the world: it answers at once, and no time passes."""

    def _ask(self, request: Callable[[dict[str, bytes]], Answer]) -> Answer:
        return request(self.server.data)


class PrefixStore(dist.Store):  # type: ignore[name-defined, misc]
    """The part of a store whose keys begin so."""

    def __init__(self, prefix: str, store: Any) -> None:
        super().__init__()
        self.prefix, self.underlying_store = prefix, store

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    @property
    def timeout(self) -> timedelta:
        """Of requests that wait for a key."""
        found: timedelta = self.underlying_store.timeout
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        """Of the store itself."""
        self.underlying_store.set_timeout(timeout)

    def clone(self) -> PrefixStore:
        """Another connection."""
        return PrefixStore(self.prefix, self.underlying_store.clone())

    def set(self, key: str, value: str | bytes) -> None:
        """As `Store` has them."""
        self.underlying_store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        """As `Store` has them."""
        return bytes(self.underlying_store.get(self._key(key)))

    def add(self, key: str, number: int) -> int:
        """As `Store` has them."""
        return int(self.underlying_store.add(self._key(key), number))

    def check(self, keys: Sequence[str]) -> bool:
        """As `Store` has them."""
        return bool(self.underlying_store.check([self._key(key) for key in keys]))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As `Store` has them."""
        return bytes(self.underlying_store.compare_set(self._key(key), expected, desired))

    def delete_key(self, key: str) -> bool:
        """As `Store` has them."""
        return bool(self.underlying_store.delete_key(self._key(key)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """As `Store` has them."""
        self.underlying_store.wait([self._key(key) for key in keys], timeout)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
