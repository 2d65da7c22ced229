"""Seconds of CPU that this process and all that it started have used, so that no test is slow without saying so."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_SUMMANDS = 5_000_000
_NOMINAL_S = 0.28  # what adding them up takes of an idle core of a server of 2023


def slowness() -> float:
    """How many times as long as a nominal core this one takes for the same work now; 1 on one that is faster.

    A core that shares its units with a busy neighbour was seen to take 1.8 times as long, all of it counted as CPU.
    """
    begin = time.process_time()
    total = 0
    for number in range(_SUMMANDS):
        total += number * number
    return max(1.0, (time.process_time() - begin) / _NOMINAL_S)


def used_s() -> float:
    """Of this process, of its children that have ended, and of those that still run, with what they started.

    A forkserver's own CPU is left out, but for that of the ranks that it forked: it goes into imports, once a session,
    and the test that happens to be the first should not pay for it. Where there is no ``/proc``, children count when
    they have ended.
    """
    times = os.times()
    ended = times.user + times.system + times.children_user + times.children_system
    return ended + sum(_used_s(child) for child in _children(os.getpid()))


def _used_s(pid: int) -> float:
    try:
        # user, system, and the same of its children that have ended; the name before them may have spaces in it
        own, system, *ended = (int(x) for x in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15])
        serves = b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return 0.0  # it has just ended, and its parent counts it
    return (sum(ended) + (0 if serves else own + system)) / _TICKS + sum(_used_s(child) for child in _children(pid))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return found
    for task in tasks:
        with contextlib.suppress(OSError):  # that thread has just ended; the others' children count all the same
            found += [int(child) for child in (task / "children").read_text().split()]
    return found
