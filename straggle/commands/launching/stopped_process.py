"""What a node knows of a worker's process that gives no word of itself: the kernel's view of it, and its stack."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from straggle.commands.launching.agent import Agent, say
from straggle.members import agents
from straggle.merge.wire.store import JobStore, StoreUnreachable

_LOOK_S = 1.0
_STATE_S = 0.1  # between two looks at states
_PY_SPY_S = 20.0
_STATES: Mapping[str, str] = {
    "R": "running: something may hold its GIL, or it is starved",
    "S": "sleeping: in a call that holds the GIL, or its threads wait for each other",
    "D": "waiting in the kernel for a device or a file system that does not answer",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended, and not yet waited for",
}


def state_of(stat: str) -> str:
    """The state in the text of ``/proc/PID/stat``; the command in it may have blanks and parentheses."""
    return stat.rpartition(")")[2].split()[0]


def described(pid: int, stat: str, wchan: str) -> str:
    """A process in words, and what may help."""
    state = state_of(stat)
    words = f"process {pid}: state {state} ({_STATES.get(state, 'see proc(5)')})"
    if wchan not in ("", "0"):
        words += f", in the kernel's {wchan}"
    return f"{words}; `kill -CONT {pid}` lets it go on" if state == "T" else words


def look_at(pid: int, proc: Path = Path("/proc")) -> str:
    """The process in words, and its Python stack where ``py-spy`` is installed."""
    try:
        stat = (proc / str(pid) / "stat").read_text()
    except OSError as error:
        return f"process {pid}: {error.strerror or error}"
    try:
        wchan = (proc / str(pid) / "wchan").read_text()
    except OSError:  # without the right to see it
        wchan = ""
    return f"{described(pid, stat, wchan)}{_stack_of(pid)}"


def _stack_of(pid: int) -> str:
    """What py-spy prints; a process that is stopped is read as it is."""
    if (program := shutil.which("py-spy", path=_programs())) is None:
        return "; py-spy, which shows its Python stack, is not installed"
    try:
        words = [program, "dump", "--nonblocking", "--pid", str(pid)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PY_SPY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"; py-spy: {error}"
    return f"\n{without_own_threads(done.stdout)}" if done.returncode == 0 else f"; py-spy: {done.stderr.strip()}"


def without_own_threads(dump: str) -> str:
    """A dump of py-spy's without the threads of straggle, which wait."""
    head, *threads = dump.rstrip().split("\nThread ")
    return "\nThread ".join([head, *(thread for thread in threads if '"straggle-' not in thread.partition("\n")[0])])


def _programs() -> str | None:
    """Where programs are: also beside this Python, whose folder may not be in PATH."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


class _Looks(ABC):
    """Looks at a node's workers now and then, on a thread of its own, until the launcher ends."""

    def __init__(self, workers: Sequence[Agent], store: JobStore, *, name: str, look_s: float) -> None:
        self._workers, self._store, self._look_s = workers, store, look_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def look(self) -> None:
        """Look once."""

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closing.set()

    def join(self) -> None:
        """Wait for the end of a last look."""
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._look_s):
            self.look()


class SilentWorkers(_Looks):
    """Looks at those of a node's workers that their peers miss, and says what it sees by ``look_at(pid)``."""

    def __init__(
        self,
        workers: Sequence[Agent],
        store: JobStore,
        look_at: Callable[[int], str] = look_at,
        *,
        look_s: float = _LOOK_S,
    ) -> None:
        super().__init__(workers, store, name="straggle-silent-workers", look_s=look_s)
        self._look_at = look_at

    def look(self) -> None:
        """Look once, at those of whom peers ask."""
        for worker in self._workers:
            if (pid := worker.pid) is not None and (why := self._asked(worker.rank)) is not None:
                say(f"rank {worker.rank} gives no word of itself ({why}); {self._look_at(pid)}")

    def _asked(self, rank: int) -> str | None:
        try:
            said: Any = self._store.ask(lambda store: agents.take_silent(store, rank))
        except StoreUnreachable:
            return None
        return None if said is None else str(said)


class StoppedWorkers(_Looks):
    """Reports workers that a signal has stopped (SIGSTOP), and when they go on.

    Peers need not wait for the time after which silence is suspicious: no busy machine makes the kernel say this of a
    process that runs. Two looks must see it, so that a stop of a moment is none. The first look takes back what an
    earlier launcher of these ranks has left: a busy rank would be put out by that after half a second.
    """

    def __init__(
        self, workers: Sequence[Agent], store: JobStore, *, proc: Path = Path("/proc"), look_s: float = _STATE_S
    ) -> None:
        super().__init__(workers, store, name="straggle-stopped-workers", look_s=look_s)
        self._proc = proc
        self._seen: dict[int, int] = {}  # the process of each rank that was stopped at the last look
        self._said: dict[int, bool] = {}  # of each rank, whether it is stopped; at first nothing is known to be said

    def look(self) -> None:
        """Look once, and report what has changed; what cannot be reported now is at the next look."""
        before = self._seen
        pids = {worker.rank: pid for worker in self._workers if (pid := worker.pid) is not None}
        self._seen = {rank: pid for rank, pid in pids.items() if self._is_stopped(pid)}
        now = {rank for rank, pid in self._seen.items() if before.get(rank) == pid}
        for rank in (worker.rank for worker in self._workers):
            if self._said.get(rank) != (is_stopped := rank in now):
                try:
                    self._store.ask(partial(agents.post_stopped, rank=rank, is_stopped=is_stopped))
                except StoreUnreachable:
                    return
                self._said[rank] = is_stopped

    def _is_stopped(self, pid: int) -> bool:
        try:
            return state_of((self._proc / str(pid) / "stat").read_text()) == "T"
        except OSError:
            return False
