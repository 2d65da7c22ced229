"""One worker's agent: a thread that starts it, waits for it, says in the store how it ended, and starts it again."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from straggle.commands.launching.restarting import (
    RestartRules,
    StartAgain,
    StaysDown,
    failed_again,
    job_ends,
    next_start,
)
from straggle.commands.launching.spares import Spares
from straggle.commands.launching.together import Together
from straggle.commands.launching.worker_process import Process, Program, ServerEnded, Starter, new_process
from straggle.commands.saved import durable
from straggle.members import agents
from straggle.members.agents import Exited
from straggle.merge.wire import launcher_words
from straggle.merge.wire.store import JobStore, StoreUnreachable

_CANNOT_START = 127  # as a shell says it
_KEPT_LOGS = 20  # of each rank


def say(words: str) -> None:
    """Write a line among the workers' output, in one piece; a terminal that is closed takes none."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"straggle launch: {words}\n")
        sys.stderr.flush()


@dataclass(frozen=True)
class Worker:
    """A rank's program and environment, how it is started, and the folders for its output and its process id.

    ``spares``: those of its node, one of which takes the place of a process that has died.
    """

    rank: int
    program: Program
    environment: Mapping[str, str]
    starter: Starter = new_process
    log_dir: Path | None = None
    pids_dir: Path | None = None
    spares: Spares | None = None


class Agent:
    """Keeps one worker running, on a thread of its own; it puts itself into ``ended`` when the worker stays down.

    The thread that started a process also waits for it: Linux takes the end of that thread for the death of the parent.
    """

    def __init__(
        self,
        worker: Worker,
        rules: RestartRules,
        store: JobStore,
        *,
        world_size: int,
        ended: SimpleQueue[Any],
        together: Together | None = None,
    ) -> None:
        self.rank = worker.rank
        self.exited: Exited | None = None  # how its last process ended; by the agent's thread
        self.why = ""  # it stays down, if it has not done its work; by the agent's thread
        self._ended_at: float | None = None  # of the last process; by the agent's thread
        self._worker, self._rules = worker, rules
        self._store, self._world_size = store, world_size
        self._ended = ended
        self._together = together or Together(0.0)  # with the other workers of its replica, if it has others
        self._together.add(self.rank, self.kill)
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # a process is started either before the launcher stops all, or not at all
        self._process: Process | None = None  # under the lock
        self._runs = False  # that process; under the lock
        self._thread = threading.Thread(target=self._run, name=f"agent of rank {worker.rank}", daemon=True)

    @property
    def pid(self) -> int | None:
        """The worker's process, while it runs; from any thread."""
        with self._lock:
            return self._process.pid if self._process is not None and self._runs else None

    def start(self) -> None:
        """Start the worker, and keep it running."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the worker to end (SIGTERM), and do not start it again."""
        with self._lock:
            # with the lock: `_start` looks at it there, and starts nothing after this
            self._stopping.set()
            self._together.stop()
            if self._process is not None:
                self._process.terminate()

    def kill(self) -> None:
        """End the worker; its agent then ends what it had started."""
        with self._lock:
            if self._process is not None:
                self._process.kill()

    # -- the agent's thread

    def _run(self) -> None:
        self.why = "its agent failed"  # unless this comes to its end
        try:
            self.why = self._keep_running()
        finally:
            self._ended.put(self)

    def _keep_running(self) -> str:
        """Until the worker stays down; says why, nothing if it has done its work."""
        count, restarts = self._together.first_count(self._next_count), 0
        while (own := self._run_once(count)) is not None:
            # before anything is decided: in a replica one end decides for all, and it may be another rank's
            self.exited = exited = self._together.ended(self.rank, own)
            if self._stopping.is_set():
                break
            then = next_start(exited, restarts, self._rules)
            if isinstance(then, StaysDown):
                # before this agent stays down: the agents of other nodes must not start theirs again
                if job_ends(exited):
                    self._ask(partial(agents.post_over, why=f"rank {self.rank}'s configuration is wrong"))
                return self._stays_down(then.why)
            if over := self._ask(self._over):
                return self._stays_down(over)
            delay_s = self._delay_s(then)
            say(
                f"rank {self.rank} ended {own}; started again in {delay_s:g} s "
                f"(restart {then.restarts} of {self._rules.max_restarts})"
            )
            if self._stopping.wait(delay_s):
                break
            # after the delay: ranks that fail for the same reason have ended by then, too
            if failed_again(self._ask(self._last_of_all) or [None]):
                return self._stays_down("all ranks have failed again in the same way")
            if over := self._ask(self._over):
                return self._stays_down(over)
            count, restarts = max(count + 1, self._ask(self._meeting_count) or 0), then.restarts
        return "the launcher was stopped"

    def _delay_s(self, then: StartAgain) -> float:
        """None for a spare; but a worker that dies again and again is started as rarely as without."""
        spares = self._worker.spares
        return 0.0 if then.restarts == 1 and spares is not None and spares.are_there else then.delay_s

    def _stays_down(self, why: str) -> str:
        words = f"rank {self.rank} ended {self.exited}, and is not started again: {why or 'it has done its work'}"
        self._ask(lambda store: launcher_words.post_down(store, self.rank, words))
        if why:
            say(words)
        return why

    def _over(self, store: Any) -> str | None:
        """Why no process of this rank could do anything, if so."""
        if (over := agents.over(store)) is not None or not launcher_words.needs_all(store):
            return over
        return "; ".join(launcher_words.down(store, range(self._world_size)).values())

    def _meeting_count(self, store: Any) -> int:
        """The number of the last start of any rank, if they only meet as processes of one number."""
        if not launcher_words.needs_all(store):
            return 0
        return max(agents.started(store, rank) or 0 for rank in range(self._world_size))

    def _next_count(self, ranks: Sequence[int]) -> int:
        """0, or where an earlier launcher of this node has left off: no two processes of a rank have one number."""
        return self._ask(lambda store: max(agents.last_count(store, rank) for rank in ranks) + 1) or 0

    def _last_of_all(self, store: Any) -> list[Exited | None]:
        """How each rank's last process ended; ``None`` for one that runs."""
        last = list[Exited | None]()
        for rank in range(self._world_size):
            exited = agents.exited(store, rank)
            runs = exited is None or exited.count != agents.started(store, rank)
            last.append(None if runs else exited)
        return last

    def _run_once(self, count: int) -> Exited | None:
        """Start the worker, wait for its end, and say both in the store; ``None`` if the launcher is being stopped."""
        # before it runs: others take a rank whose last end is of its last start for one that has ended
        self._ask(lambda store: agents.post_started(store, self.rank, count))
        since = time.monotonic()
        try:
            process = self._start(count)
        except OSError as error:
            say(f"rank {self.rank} cannot be started: {error}")
            status = _CANNOT_START
        else:
            if process is None:
                return None
            status = process.wait()
            self._ended_at = time.monotonic()
            with self._lock:
                self._runs = False  # its number may soon be another process's
        exited = Exited.of(status, count=count, ran_s=round(time.monotonic() - since, 3))
        # before cleaning up: members put the rank out by this word, and each second counts
        self._ask(lambda store: agents.post_exited(store, self.rank, exited))
        self._clean_up(status)
        return exited

    def _start(self, count: int) -> Process | None:
        environment = {**self._worker.environment, "TORCHELASTIC_RESTART_COUNT": str(count)}
        if self._ended_at is not None:
            environment[agents.ENDED_AT] = str(self._ended_at)
        log = None if self._worker.log_dir is None else self._log(self._worker.log_dir, count)
        with self._lock:
            if self._stopping.is_set():
                return None
            spare = self._worker.spares.take() if self._worker.spares is not None and self.exited is not None else None
            self._process = self._new(environment, log) if spare is None else spare.becomes(environment, log)
            self._runs = True
        if spare is not None:
            say(f"rank {self.rank}: a spare takes its place{'' if spare.is_ready else ', which has yet to load'}")
        self._write_pid(self._process.pid)
        return self._process

    def _new(self, environment: Mapping[str, str], log: Path | None) -> Process:
        """A new process; what it writes is appended, so that a log that is truncated (copytruncate) begins anew."""
        worker = self._worker
        with contextlib.ExitStack() as stack:
            output = None if log is None else stack.enter_context(log.open("ab"))
            try:
                return worker.starter(worker.program, environment, output)
            except ServerEnded as error:
                say(f"rank {self.rank}: {error}; a new process loads everything itself")
                return new_process(worker.program, environment, output)

    def _log(self, folder: Path, count: int) -> Path:
        """A start's own file; only the last `_KEPT_LOGS` are kept, or a worker that often dies fills the disk."""
        with contextlib.suppress(OSError):
            (folder / f"rank{self.rank}.start{count - _KEPT_LOGS}.log").unlink(missing_ok=True)
        return folder / f"rank{self.rank}.start{count}.log"

    def _write_pid(self, pid: int) -> None:
        if self._worker.pids_dir is not None:
            try:
                durable.write_text(self._worker.pids_dir / f"rank{self.rank}", f"{pid}\n")
            except OSError as error:  # the worker runs, and that is what counts
                say(f"rank {self.rank}: its process id cannot be written: {error}")

    def _clean_up(self, status: int) -> None:
        if self._worker.pids_dir is not None:  # the number may soon be another process's
            with contextlib.suppress(OSError):
                (self._worker.pids_dir / f"rank{self.rank}").unlink(missing_ok=True)
        if status and self._process is not None:
            _kill_group(self._process.pid)  # a killed worker's loaders would keep its memory, its ports and its device

    def _ask(self, request: Callable[[Any], Any]) -> Any:
        """What the store answers; ``None`` where it does not, which its connection reports."""
        try:
            return self._store.ask(request)
        except StoreUnreachable:
            return None


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the second is macOS's, for a group of the dead
        os.killpg(leader, signal.SIGKILL)
