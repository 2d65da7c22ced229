"""The folder of a run: whether it can be written, and whether another run uses it."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = "lock"
_log = logging.getLogger(__name__)


def check_run_dir(run_dir: Path, *, comes_back: bool = False) -> None:
    """Raise ``ValueError`` if ``run_dir`` cannot be written, or another run writes into it; leaves no file there.

    For a rank that ``comes_back``, ranks that share the folder are those of its own run; if they are not, the run is
    refused when it begins.
    """
    place = run_dir.absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise _unwritable(run_dir, f"{place}: {error.strerror}") from None
    if (run_dir / _LOCK).exists():
        with one_run_of_members(run_dir, begins=False) if comes_back else one_run(run_dir):
            pass


@contextmanager
def one_run(run_dir: Path) -> Iterator[None]:
    """Make ``run_dir``, and keep other runs out of it until the end of the block or of this process, however it ends.

    Raises ``ValueError`` if it cannot be written, or another run holds it. The lock belongs to the process: unlike with
    ``flock``, no child that outlives the process keeps it. A file system without locks is used without one, and a
    warning is logged.
    """
    with _opened(run_dir) as handle:
        _lock(handle, run_dir)
        yield


@contextmanager
def one_run_of_members(run_dir: Path, *, begins: bool) -> Iterator[None]:
    """The same for a run whose ranks come and go: other runs are kept out while any of its ranks is there.

    The rank that ``begins`` the run holds ``run_dir`` alone for a moment, and then shares it with the others.
    """
    with _opened(run_dir) as handle:
        if begins:
            _lock(handle, run_dir)
        _lock(handle, run_dir, fcntl.LOCK_SH)
        yield


@contextmanager
def _opened(run_dir: Path) -> Iterator[int]:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(run_dir / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _unwritable(run_dir, str(error)) from None
    try:
        yield handle
    finally:
        os.close(handle)


def _lock(handle: int, run_dir: Path, kind: int = fcntl.LOCK_EX) -> None:
    try:
        fcntl.lockf(handle, kind | fcntl.LOCK_NB)
        if kind == fcntl.LOCK_EX:
            os.truncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on host {socket.gethostname()}\n".encode())
    except (BlockingIOError, PermissionError):
        holder = os.pread(handle, 1000, 0).decode(errors="replace").strip() or "another process"
        raise ValueError(
            f"run_dir={run_dir} is in use by {holder}: wait for the end of that run, or give another run_dir"
        ) from None
    except OSError as error:
        _log.warning("%s cannot be locked (%s): do not start a second run there", run_dir / _LOCK, error)


def _unwritable(run_dir: Path, why: str) -> ValueError:
    return ValueError(f"run_dir={run_dir} cannot be written ({why}): give another run_dir")
