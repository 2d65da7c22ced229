"""How a worker's process is started: as a new one, or forked from one that has modules loaded (`fork_server.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Protocol

from straggle.commands.launching.fork_server import SPARE, WORKER

# Has the kernel kill the worker when its launcher dies, whatever it dies of. Only the process itself can ask for that.
# It is a program that becomes the worker, and no preexec_fn: after a fork of a process with threads Python code may
# hang, and the launcher with it. The launcher may have died already: then the worker has another parent.
_DIE_WITH_LAUNCHER = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]): os.execv(sys.argv[2], sys.argv[2:])
"""
# its own folder is not where modules are looked for: those of these names are Python's
_RUN_FILE = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
_SERVER = Path(__file__).with_name("fork_server.py")
# a module that asks whether there is a CUDA device begins to use none, which no process that is forked then could
_NO_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_ENDED = "the process that workers are forked from has ended, or cannot fork"
_LONGEST = 65536  # bytes of what the server says of modules that it cannot load


@dataclass(frozen=True)
class Program:
    """What a worker runs: a script, or a module as with ``python -m``."""

    program: str
    arguments: tuple[str, ...] = ()
    module: bool = False

    def command(self) -> tuple[str, ...]:
        """The command line of a new process."""
        return (sys.executable, "-u", *(["-m"] if self.module else []), self.program, *self.arguments)


class ServerEnded(OSError):
    """The process that workers are forked from has ended, or cannot fork."""


class Process(Protocol):
    """A worker's process."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def wait(self) -> int:
        """Its exit status, once it has ended; -9 if SIGKILL has ended it."""

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""

    def kill(self) -> None:
        """End it (SIGKILL)."""

    def send_signal(self, sig: int) -> None:
        """Send it this signal, if it runs."""


class Starter(Protocol):
    """A way to start a worker's process."""

    def __call__(self, program: Program, environment: Mapping[str, str], output: IO[bytes] | None) -> Process:
        """Start it, with the launcher's output if no file is given; raises ``OSError`` if it cannot be started."""


@dataclass(frozen=True)
class GivenLater:
    """What a spare does not have yet: the variables of these names. It finds them on this socket, as JSON."""

    names: tuple[str, ...]
    gives: socket.socket


class SpareStarter(Protocol):
    """A way to start a process that is given its rank later."""

    def __call__(
        self, program: Program, environment: Mapping[str, str], output: IO[bytes] | None, later: GivenLater
    ) -> Process:
        """As a `Starter` does; ``environment`` has none of what is given later."""


def new_process(program: Program, environment: Mapping[str, str], output: IO[bytes] | None) -> Process:
    """A ``Starter``: Python begins, and loads everything."""
    return subprocess.Popen(
        [*_dying_with_launcher(), *program.command()],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,  # Ctrl-C in a terminal reaches the launcher alone, which tells the workers
    )


class ForkServer:
    """A ``Starter`` and ``SpareStarter``: forks each process from one of the launcher's that may have modules loaded.

    That takes milliseconds and no CPU, where loading torch takes seconds of it. The workers of a node share the memory
    of what is loaded. All of them die with the server, which itself dies with the launcher. Linux only.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """``environment``: of the workers; what a module reads as it is loaded is the same in all."""
        self._option = f"--preload {','.join(modules)}" if modules else "--spares"
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, "-u", "-c", _RUN_FILE, str(_SERVER), str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(
                [*_dying_with_launcher(), *words],
                env={**_NO_CUDA, **environment},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether it has loaded its modules within this time; raises ``OSError`` with the reason if it cannot."""
        if not select.select([self._control], [], [], timeout_s)[0]:
            return False
        said = self._control.recv(_LONGEST).decode()
        if said != "ready":
            raise OSError(f"{self._option}: {said or 'the process that loads it has ended'}")
        return True

    def __call__(
        self,
        program: Program,
        environment: Mapping[str, str],
        output: IO[bytes] | None,
        later: GivenLater | None = None,
    ) -> Process:
        """Fork a worker or a spare; raises ``ServerEnded`` if the server cannot."""
        return fork_from(self._control, program, environment, output, later)

    def close(self) -> None:
        """End the server, whose workers have ended."""
        self._process.kill()
        self._process.wait()
        self._control.close()


def fork_from(
    control: socket.socket,
    program: Program,
    environment: Mapping[str, str],
    output: IO[bytes] | None,
    later: GivenLater | None = None,
) -> Process:
    """What the server at the other end of this socket forks; raises ``ServerEnded`` if it cannot.

    ``later``: it is a spare, which is given its rank later.
    """
    own, theirs = socket.socketpair()
    files: list[socket.socket | IO[bytes]] = [
        theirs,
        *([] if later is None else [later.gives]),
        *([] if output is None else [output]),
    ]
    wanted = {**asdict(program), "environment": dict(environment), "later": later.names if later else ()}
    with own:
        try:
            with theirs:
                socket.send_fds(control, [WORKER if later is None else SPARE], [file.fileno() for file in files])
            own.sendall(json.dumps(wanted).encode())
            own.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise ServerEnded(_ENDED) from error
        return _Forked(own)


class _Forked:
    """A worker that the server has forked; the server says on its socket how it ended."""

    def __init__(self, own: socket.socket) -> None:
        self._words = own.makefile()
        if not (said := self._words.readline()):
            raise ServerEnded(_ENDED)
        self.pid = int(said)
        self._lock = threading.Lock()
        self._runs = True  # the number is no other process's; under the lock

    def wait(self) -> int:
        said = self._words.readline()
        with self._lock:
            self._runs = False
        self._words.close()
        return int(said) if said else -signal.SIGKILL  # it died with the server

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._runs:
                os.kill(self.pid, sig)


def _dying_with_launcher() -> Sequence[str]:
    # elsewhere there is no such request to the kernel, and a launcher that is killed by SIGKILL leaves its workers
    if sys.platform != "linux":
        return ()
    return (sys.executable, "-ISc", _DIE_WITH_LAUNCHER, str(os.getpid()))
