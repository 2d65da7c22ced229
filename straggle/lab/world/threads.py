"""Locks, conditions, events, queues and futures of a simulated world: what `straggle.world` has, in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent import futures
from functools import partial
from typing import Any

from straggle.lab.world.scheduler import Scheduler, Thread


def primitives(scheduler: Scheduler) -> dict[str, Any]:
    """Those of one world, by the names that `straggle.world` gives them."""

    class OwnThread(Thread):
        world = scheduler

    class OwnFuture(futures.Future[Any]):
        def __init__(self) -> None:
            super().__init__()
            self._condition = Condition(scheduler)  # type: ignore[assignment]

    return {
        "Executor": lambda _max_workers, thread_name_prefix: Executor(
            SimpleQueue(scheduler), partial(OwnThread, name=thread_name_prefix), OwnFuture
        ),
        "Lock": lambda: Lock(scheduler),
        "Condition": lambda lock=None: Condition(scheduler, lock),
        "Event": lambda: Event(scheduler),
        "SimpleQueue": lambda: SimpleQueue(scheduler),
        "Future": OwnFuture,
        "Thread": OwnThread,
        "monotonic": scheduler.monotonic,
        "sleep": scheduler.sleep,
    }


class Lock:
    """One thread has it at a time; who gets it next is drawn."""

    def __init__(self, world: Scheduler) -> None:
        self._world = world
        self.owner: Thread | None = None
        self._waiters: list[Thread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it; false if it is not free by then."""
        self._world.switch()
        me, until = self._world.current, self._world.now + timeout
        while self.owner is not None:
            left = None if timeout < 0 else until - self._world.now
            if not blocking or (left is not None and left <= 0):
                return False
            self._world.wait(self._waiters, left)
        self.owner = me
        me.holds.append(self)
        return True

    def release(self) -> None:
        """Let it go."""
        if self.owner is None:  # its thread unwinds
            return
        self.owner.holds.remove(self)
        self.owner = None
        self._world.wake(self._waiters)

    def locked(self) -> bool:
        """Whether a thread has it."""
        return self.owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """A condition on a lock, its own if none is given."""

    def __init__(self, world: Scheduler, lock: Lock | None = None) -> None:
        self._world, self._lock = world, lock or Lock(world)
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiters: list[Thread] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Let the lock go until notified; false if the time is over first."""
        self._owned()
        self._lock.release()
        notified = self._world.wait(self._waiters, timeout)
        self._lock.acquire()
        return notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Until that holds."""
        until = None if timeout is None else self._world.now + timeout
        while not (result := predicate()):
            left = None if until is None else until - self._world.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        """Wake so many that wait."""
        self._owned()
        self._world.wake(self._waiters, n)

    def notify_all(self) -> None:
        """Wake all that wait."""
        self._owned()
        self._world.wake(self._waiters)

    def _owned(self) -> None:
        if self._lock.owner is not self._world.check():
            raise RuntimeError("the lock of this condition is not held")


class Event:
    """Set once, or until it is cleared."""

    def __init__(self, world: Scheduler) -> None:
        self._world, self._is_set = world, False
        self._waiters: list[Thread] = []

    def is_set(self) -> bool:
        """Whether it is."""
        return self._is_set

    def set(self) -> None:
        """Wake all that wait for it."""
        self._is_set = True
        self._world.wake(self._waiters)
        self._world.switch()

    def clear(self) -> None:
        """Take it back."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Until it is set; false if the time is over first."""
        if self._is_set:
            self._world.switch()
        else:
            self._world.wait(self._waiters, timeout)
        return self._is_set


class SimpleQueue:
    """Items in the order in which they came."""

    def __init__(self, world: Scheduler) -> None:
        self._world = world
        self._items = deque[Any]()
        self._waiters: list[Thread] = []

    def put(self, item: Any) -> None:
        """Give one; without waiting, so that a finalizer may."""
        self._items.append(item)
        self._world.wake(self._waiters, 1)

    def get(self) -> Any:
        """The next one."""
        while not self._items:
            self._world.wait(self._waiters)
        return self._items.popleft()

    def clear(self) -> None:
        """Forget those that nobody has."""
        self._items.clear()


class Executor:
    """One thread that makes calls one after another, as a ``ThreadPoolExecutor`` of one does."""

    def __init__(
        self, calls: SimpleQueue, make_thread: Callable[..., Thread], make_future: Callable[[], futures.Future[Any]]
    ) -> None:
        self._calls, self._make_thread, self._make_future = calls, make_thread, make_future
        self._thread: Thread | None = None

    def submit(self, call: Callable[..., Any], *arguments: Any) -> futures.Future[Any]:
        """Its result, when it has been made."""
        future = self._make_future()
        if self._thread is None:
            self._thread = self._make_thread(target=self._run)
            self._thread.start()
        self._calls.put((future, call, arguments))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread when it has made all calls, or with ``cancel_futures`` this one."""
        if cancel_futures:
            self._calls.clear()
        self._calls.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            future, call, arguments = asked
            try:
                future.set_result(call(*arguments))
            except Exception as error:
                future.set_exception(error)
