"""Jobs of `straggle launch` over a script that a test writes, and what its workers leave in the job's folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ranks import Started, started_command
from torch.distributed import TCPStore

LIMIT_S = 60.0  # for what takes a tenth of a second, or never comes

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
def launched(folder: Path, body: str, *options: object, **environment: str) -> Iterator[Started]:
    """`straggle launch` with these options, over workers that run ``body``."""
    with started_command("launch", *options, script(folder, body), folder=folder, environment=environment) as job:
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
