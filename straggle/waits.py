"""The ways to wait, which are few: whatever waits does it in one of these, so that its end is looked for in one place.

| what is waited for | how |
| --- | --- |
| what another thread of this process says, under a lock | `world.Condition`, notified by whoever says it |
| what nobody says: a key in the store, a peer's sign, a thread's end | `until`, which looks now and then |
| the next turn of a thread that acts now and then | the event that ends or wakes it: ``closing.wait(every_s)`` |
| threads that end | `end_of`, for a while; `end_before_exit`, if they may be in a request |
| collectives | `is_over` and its like in `merge/wire/groups.py`, and the channel's ``wait`` |
| the next request, or its answer | the queue and the futures of `merge/wire/store.py` |
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TypeVar

from straggle import world

_AT_EXIT_S = 10.0  # for a thread that forms a group, which has a limit; a store that is gone may never answer
_SAY_S = 1.0  # of that, before it is logged

Found = TypeVar("Found")

_log = logging.getLogger(__name__)


def until(
    found: Callable[[], Found],
    *,
    every_s: float,
    most_s: float = 0.0,
    limit_s: float = math.inf,
    clock: Callable[[], float] = world.clock,
    pause: Callable[[float], object] = world.pause,
) -> Found:
    """Call ``found()`` every ``every_s`` seconds, for ``limit_s`` at most; its last answer, true if it found something.

    ``most_s``: if it is longer, each pause is twice the last one, up to so long. ``pause(seconds)`` passes the time:
    the ``wait`` of an event ends it sooner. Without a limit, ``found()`` itself raises, or answers, when there is
    nothing to wait for any more.
    """
    ends_at = clock() + limit_s
    while not (answer := found()) and clock() < ends_at:
        pause(every_s)
        every_s = max(every_s, min(2 * every_s, most_s))
    return answer


class NowAndThen:
    """Whether something is due that is done every ``every_s`` seconds, the first time at once or ``after_s`` later."""

    def __init__(self, every_s: float, *, after_s: float = 0.0) -> None:
        self._every_s, self._due_at = every_s, world.monotonic() + after_s

    def is_due(self) -> bool:
        """Whether it is; whoever asks does it then."""
        if (now := world.monotonic()) < self._due_at:
            return False
        self._due_at = now + self._every_s
        return True


def end_of(threads: Iterable[world.Thread], limit_s: float = math.inf) -> bool:
    """Wait until these threads have ended, for ``limit_s`` in all, if it is given; returns whether they have.

    The caller's own, and those that were not started, are not waited for: a finalizer may run on any thread.
    """
    ends_at, own = world.monotonic() + limit_s, threading.current_thread()
    others = [thread for thread in threads if thread is not own and thread.is_alive()]
    for thread in others:
        thread.join(None if ends_at == math.inf else max(0.0, ends_at - world.monotonic()))
    return not any(thread.is_alive() for thread in others)


_told_to_end: weakref.WeakSet[world.Thread] = weakref.WeakSet()  # and were not seen to


def end_before_exit(threads: Iterable[world.Thread], limit_s: float) -> None:
    """`end_of` threads that were told to end; those that have not by then are waited for when this process ends.

    A thread that comes back from torch's C++, as from a request to a store, while Python ends would abort the process:
    Python unwinds it, and C++ calls that an error. A launcher would take that for a failed worker, and end them all.
    """
    if not end_of(told := list(threads), limit_s) and world.process() == os.getpid():  # not for a simulated rank
        _told_to_end.update(told)


def _end_of_told() -> None:
    if not end_of(told := list(_told_to_end), _SAY_S):
        names = ", ".join(sorted({thread.name for thread in told if thread.is_alive()}))
        _log.warning(
            "this process ends, and %s still wait for the job's store or for peers: waited for, up to %g s, as "
            "Python would abort if they came back while it ends",
            names,
            _AT_EXIT_S,
        )
        end_of(told, _AT_EXIT_S - _SAY_S)


def exit_frees_nothing() -> None:
    """This process is going to end without freeing what Python has: no thread is unwound, and none is waited for."""
    _at_exit.detach()


# made before those of all models, which run before it: the last one made is the first to run
_at_exit = weakref.finalize(end_before_exit, _end_of_told)
