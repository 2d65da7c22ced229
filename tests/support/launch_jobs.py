"""Jobs of `straggle launch` over a script that a test writes, and what its workers leave in the job's folder.

With ``loaded`` the workers are forked by the launcher's own fork server, which here is a fork itself, of a process
that has torch and the package: nobody spends the three seconds of CPU in which a new process, or a new server of
``--preload``, loads them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ranks import Started, started, started_command
from torch.distributed import TCPStore

from straggle.commands import launch
from straggle.commands.launching import fork_server
from straggle.commands.launching.worker_process import fork_from
from straggle.commands.process_end import end_process

LIMIT_S = 200.0  # for what takes a tenth of a second, or never comes

# leaves its environment and its process id, then does what the rest of it says
HEAD = """\
import json, os, signal, subprocess, sys, time
from pathlib import Path
rank, count = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def leave(what, text=""):
    Path(f"{what}.{rank}.{count}.part").write_text(text)
    os.replace(f"{what}.{rank}.{count}.part", f"{what}.{rank}.{count}")
def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.01)
"""
WAITS = 'leave("pid", str(os.getpid())); wait_for("end")'


def script(folder: Path, body: str) -> Path:
    path = folder / "worker.py"
    path.write_text(HEAD + 'leave("environment", json.dumps(dict(os.environ)))\n' + textwrap.dedent(body))
    return path


@contextlib.contextmanager
def loaded_launch(
    *words: object, folder: Path, environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator[Started]:
    """`straggle launch` with these words, whose workers have torch and the package loaded as they begin.

    ``options`` are those of `started`.
    """
    around = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **(environment or {})}
    with started(launch_loaded, *map(str, words), folder=folder, environment=around, **options) as job:
        yield job


def launch_loaded(*words: str) -> int:
    """What the launcher's process runs then: it forks the server while it has no thread, and ends after it."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher, server = os.getpid(), os.fork()
    if server == 0:
        control.close()
        _serve(theirs, launcher)
    theirs.close()
    sys.argv = ["straggle", *words]
    try:
        return launch.main(partial(fork_from, control), partial(fork_from, control))
    finally:
        control.close()
        os.waitpid(server, 0)


def _serve(control: socket.socket, launcher: int) -> NoReturn:
    """Fork workers until the launcher has gone; each ends as a Python program does."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: as a server that the launcher starts
    if os.getppid() != launcher:
        os._exit(1)
    status: object = 0
    try:
        own = fork_server.serve(control)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        sys.path.insert(0, "")  # the program's own place takes that of the server's
        gc.freeze()
        fork_server.run(*own)
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = error = sys.exc_info()
        sys.excepthook(*error)  # type: ignore[arg-type]
        status = 1
    if not isinstance(status, int):
        sys.stderr.write(f"{status}\n")
        status = 1
    end_process(status)


@contextlib.contextmanager
def launched(folder: Path, body: str, *options: object, loaded: bool = False, **environment: str) -> Iterator[Started]:
    """`straggle launch` with these options, over workers that run ``body``."""
    words = (*options, script(folder, body))
    with (
        loaded_launch(*words, folder=folder, environment=environment)
        if loaded
        else started_command("launch", *words, folder=folder, environment=environment)
    ) as job:
        yield job


def wait_until(job: Started, condition: Callable[[], Any]) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert job.process.is_alive(), job.log.read_text()
        assert time.monotonic() < until, job.log.read_text()
        time.sleep(0.01)


def left(folder: Path, what: str, rank: int, count: int = 0) -> str:
    return (folder / f"{what}.{rank}.{count}").read_text()


def starts(folder: Path, rank: int) -> int:
    """How often this rank was started."""
    return len(list(folder.glob(f"environment.{rank}.*")))


def wait_for(job: Started, folder: Path, *files: str) -> None:
    wait_until(job, lambda: all((folder / file).exists() for file in files))


def store_of(folder: Path) -> TCPStore:
    """The store of the job, as rank 0 finds it."""
    environment = json.loads(left(folder, "environment", 0))
    return TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pid: int) -> None:
    """Of a process that somebody has ended; fails the test, and ends it, if nobody has."""
    until = time.monotonic() + LIMIT_S
    while alive(pid):
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"process {pid} still runs")
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
