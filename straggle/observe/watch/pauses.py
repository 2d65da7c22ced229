"""When this process was paused by a garbage collection, or did not run at all."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

_POLL_S = 0.02  # between two looks at the clock
_PAUSE_S = 0.05  # a look that comes this much too late, while the process did nothing, was a pause


class PauseDetector:
    """Pauses of this process: garbage collections, and times in which nothing of it ran at all.

    A thread sleeps for a short time, again and again. If it wakes much too late and the process used no processor time
    meanwhile, the process was stopped, throttled or swapped out. A long call that holds the interpreter is work, not a
    pause. ``now`` and ``cpu_now`` give seconds of wall time, and of the processor's time of this process.
    """

    def __init__(
        self, now: Callable[[], float] = time.monotonic, cpu_now: Callable[[], float] = time.process_time
    ) -> None:
        self._now, self._cpu_now = now, cpu_now
        self._lock = threading.Lock()
        self._gc_s = self._stopped_s = 0.0
        self._gc_since = 0.0
        self._pauses: dict[str, dict[str, float]] = {}
        self._polled_at, self._cpu_s = now(), cpu_now()
        self._closing = threading.Event()

    def start(self) -> None:
        """Begin to watch the clock, in a separate thread, and to be called back by garbage collections."""
        gc.callbacks.append(self.collecting)
        threading.Thread(target=self._run, name="straggle-pauses", daemon=True).start()

    def credit(self, phase: str) -> None:
        """Count the pauses since the last call in this phase."""
        if self._now() - self._polled_at > _POLL_S + _PAUSE_S:  # sooner there is nothing to find
            self._poll()
        if not (self._gc_s or self._stopped_s):
            return
        with self._lock:  # the thread that polls adds to these
            found, self._gc_s, self._stopped_s = {"gc_s": self._gc_s, "stopped_s": self._stopped_s}, 0.0, 0.0
        for kind, seconds in found.items():
            if seconds > 0:
                kinds = self._pauses.setdefault(phase, {})
                kinds[kind] = kinds.get(kind, 0.0) + seconds

    def take(self) -> dict[str, dict[str, float]]:
        """The pauses of each phase since the last call."""
        pauses, self._pauses = self._pauses, {}
        return pauses

    def close(self) -> None:
        """End the thread and the callback."""
        self._closing.set()
        if self.collecting in gc.callbacks:
            gc.callbacks.remove(self.collecting)

    def collecting(self, phase: str, _info: Any) -> None:
        """A garbage collection begins or ends: a callback of ``gc``."""
        # without the lock: it may begin in a thread that holds it, and that would wait for itself
        if phase == "start":
            self._gc_since = self._now()
        else:
            self._gc_s += self._now() - self._gc_since

    def _run(self) -> None:
        while not self._closing.wait(_POLL_S):
            self._poll()

    def _poll(self) -> None:
        with self._lock:
            now, cpu_s = self._now(), self._cpu_now()
            late_s = now - self._polled_at - _POLL_S - (cpu_s - self._cpu_s)
            if late_s > _PAUSE_S:
                self._stopped_s += late_s
            self._polled_at, self._cpu_s = now, cpu_s
