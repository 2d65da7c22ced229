"""A node's spares: processes that run the script until it asks for its rank, and take a dead worker's place.

A thread of their own starts them, one after the other. Each loads for a fifth of the time, by SIGSTOP and SIGCONT, so
the workers keep their cores. A lower priority would be for good: to raise it again needs a privilege.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO

from straggle.commands.launching.restarting import RestartRules, StaysDown, next_start
from straggle.commands.launching.worker_process import GivenLater, Process, Program, SpareStarter
from straggle.members.agents import ENDED_AT, IS_SPARE, Exited
from straggle.waits import NowAndThen

_ON_S, _OFF_S = 0.02, 0.08  # of a spare that loads
_LOOK_S = 1.0
_QUIET_S = 5.0  # after one has taken a place, for the members to give it their state, before another one loads
_END_S = 2.0  # for one to end by itself
_LONGEST = 4096


@dataclass(frozen=True)
class Node:
    """What a node's spares are: all that its workers have in common, and the names of the rest."""

    program: Program
    environment: Mapping[str, str]
    later: tuple[str, ...]
    starter: SpareStarter
    log_dir: Path | None = None


class Spare:
    """A process without a rank, from `begin` until it `becomes` one, or `ends`."""

    def __init__(self, process: Process, gives: socket.socket, later: Sequence[str], log: Path | None) -> None:
        self.process, self.gives = process, gives
        self.is_ready = False  # it has come to where it needs a rank
        self._later, self._log, self._began_at = later, log, time.monotonic()

    @staticmethod
    def begin(number: int, node: Node) -> Spare:
        """Start it; raises ``OSError`` if that cannot be."""
        gives, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log = None if node.log_dir is None else node.log_dir / f"spare{number}.log"
        with theirs, contextlib.ExitStack() as stack:
            output: IO[bytes] | None = None if log is None else stack.enter_context(log.open("ab"))
            try:
                process = node.starter(node.program, node.environment, output, GivenLater(node.later, theirs))
                return Spare(process, gives, node.later, log)
            except OSError:
                gives.close()
                raise

    @property
    def ran_s(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._began_at

    def becomes(self, environment: Mapping[str, str], log: Path | None) -> Process:
        """Give it what it lacks of a rank's environment; what it has written is at the head of that rank's ``log``."""
        if self._log is not None and log is not None:
            with contextlib.suppress(OSError):
                self._log.replace(log)
        with self.gives, contextlib.suppress(OSError):  # it has died just now, as its agent will see
            given = {name: environment[name] for name in (*self._later, ENDED_AT) if name in environment}
            self.gives.send(json.dumps({**given, IS_SPARE: "1"}).encode())
        return self.process

    def hear(self) -> str | None:
        """What it says on its socket, which has something; ``None`` if it has ended."""
        with contextlib.suppress(OSError):
            if said := self.gives.recv(_LONGEST):
                self.is_ready = True
                return said.decode()
        return None

    def end(self) -> None:
        """It is not needed: it ends with status 0 where it waits, and by SIGTERM where it still loads."""
        self.gives.close()
        if not self.is_ready:
            self.process.terminate()
        # after SIGTERM: a process that is stopped hears it only when it goes on
        self.process.send_signal(signal.SIGCONT)

    def wait(self, until: float) -> int:
        """Its exit status, as `subprocess` has it; it is killed if it has not ended at that time of the clock."""
        statuses = list[int]()
        thread = threading.Thread(target=lambda: statuses.append(self.process.wait()), daemon=True)
        thread.start()
        thread.join(max(0.0, until - time.monotonic()))
        if not statuses:
            self.kill()
            thread.join()
        return statuses[0]

    def kill(self) -> None:
        """End it, and what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Spares:
    """Keeps ``number`` spares from `start` to `close`; agents take them.

    ``say(words)`` writes a line. ``no_use()``: why no spare could ever be needed, empty while one could.
    """

    def __init__(
        self,
        number: int,
        node: Node,
        rules: RestartRules,
        say: Callable[[str], None],
        no_use: Callable[[], str],
        *,
        quiet_s: float = _QUIET_S,
    ) -> None:
        self._quiet_s = quiet_s
        self._number, self._node, self._rules, self._say, self._no_use = number, node, rules, say, no_use
        self._spares: list[Spare] = []  # under the lock
        self._closing = False  # under the lock
        self._lock = threading.Lock()
        self._due_at = 0.0  # when the next one may be started; under the lock
        self._numbers, self._restarts = count(), 0  # by the thread
        self._wakes, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._run, name="straggle-spares", daemon=True)

    def start(self) -> None:
        """Start them, one after the other."""
        self._thread.start()

    def take(self) -> Spare | None:
        """One that is ready, else one that still loads; ``None`` if there is none. Another one is started for it."""
        with self._lock:
            if self._closing or not self._spares:
                return None
            spare = next((own for own in self._spares if own.is_ready), self._spares[0])
            # both with the lock: the thread stops only what is in the list, so this one stays awake
            self._spares.remove(spare)
            spare.process.send_signal(signal.SIGCONT)
            self._due_at = max(self._due_at, time.monotonic() + self._quiet_s)
        os.write(self._woken, b" ")
        return spare

    @property
    def are_there(self) -> bool:
        """Whether an agent would find one now."""
        with self._lock:
            return bool(self._spares) and not self._closing

    def close(self) -> None:
        """End those that are not needed any more, without a word."""
        with self._lock:
            self._closing = True
        os.write(self._woken, b" ")
        # before its pipe is closed: the number could be another file by the time that it looks
        self._thread.join()
        os.close(self._wakes)
        os.close(self._woken)

    # -- the thread

    def _run(self) -> None:
        self._keep()
        with self._lock:
            # with the lock: an agent takes one of them before this, or none
            self._closing, spares = True, self._spares
        for spare in spares:
            spare.end()
        until = time.monotonic() + _END_S
        for spare in spares:
            spare.wait(until)

    def _keep(self) -> None:
        """Until they are not needed any more, or there can be none."""
        runs, looks = True, NowAndThen(_LOOK_S)
        while self._number:
            if looks.is_due() and (why := self._no_use()):
                self._say(f"--spares: {why}")
                return
            with self._lock:
                if self._closing:
                    return
                spares, is_due = list(self._spares), time.monotonic() >= self._due_at
                loading = [spare for spare in spares if not spare.is_ready]
                for spare in loading:  # never one that an agent has taken
                    spare.process.send_signal(signal.SIGCONT if runs else signal.SIGSTOP)
            if len(spares) < self._number and not loading and is_due:
                self._begin()
                runs = True
                continue
            self._hear(spares, (_ON_S if runs else _OFF_S) if loading else _LOOK_S)
            runs = not runs

    def _begin(self) -> None:
        try:
            spare = Spare.begin(next(self._numbers), self._node)
        except OSError as error:
            self._failed(f"no spare can be started: {error}", Exited(0, 0.0, code=1))
        else:
            with self._lock:
                self._spares.append(spare)

    def _hear(self, spares: list[Spare], limit_s: float) -> None:
        """Until one of them says something, has ended or is taken, or the time is over."""
        by_file = {spare.gives.fileno(): spare for spare in spares if spare.gives.fileno() >= 0}
        for file in select.select([self._wakes, *by_file], [], [], limit_s)[0]:
            if file == self._wakes:
                os.read(self._wakes, _LONGEST)
                continue
            spare = by_file[file]
            with self._lock:
                if spare not in self._spares:  # it was taken, and is its agent's
                    continue
                said = spare.hear()
                if said is None:
                    self._spares.remove(spare)
            if said is None:
                self._ended(spare)
            else:
                self._ready(spare, said)

    def _ready(self, spare: Spare, where: str) -> None:
        self._restarts = 0
        self._say(f"a spare is ready after {spare.ran_s:.1f} s, at {where}")

    def _ended(self, spare: Spare) -> None:
        spare.gives.close()
        # its socket is closed a moment before it has ended; or its program has closed that, and goes on
        status = spare.wait(time.monotonic() + _END_S)
        exited = Exited.of(status, count=0, ran_s=round(spare.ran_s, 3))
        spare.kill()
        if exited.code == 0:
            self._number = 0
            self._say("a spare came to the end of the script, which does not ask for its rank: there will be none")
            return
        self._failed(f"a spare ended {exited}", exited)

    def _failed(self, what: str, exited: Exited) -> None:
        then = next_start(exited, self._restarts, self._rules)
        if isinstance(then, StaysDown):
            self._number = 0
            self._say(f"{what}, and there will be none: {then.why}")
            return
        self._restarts = then.restarts
        with self._lock:
            self._due_at = time.monotonic() + then.delay_s
        self._say(f"{what}; another one is started in {then.delay_s:g} s")
