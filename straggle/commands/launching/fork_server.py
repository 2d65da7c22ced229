"""A process that workers and spares are forked from, and that may have modules loaded: `straggle launch --preload`.

``fork_server.py FD MODULE ...``. It is run as a file, so that it loads no module but these and a few of Python's own,
and it never has a thread. On the socket FD it says ``ready``, or why it cannot be. Each message from there brings
descriptors, and a process is forked for each: its own socket, for a spare the one by which it is given a rank, and, if
wanted, the file for its output. On its own socket a process finds what it is to run, as JSON; the server writes its
process id there, and its exit status once it has ended.

A spare runs the program, too, until that asks for what only one rank has, such as RANK. Up to there all ranks do the
same. What it asks for is waited for, so it is right whoever asks, and when.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import selectors
import signal
import socket
import sys
import threading
import traceback
import types
import zipfile
from collections.abc import Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1
_LONGEST = 65536  # bytes of a rank's own environment
WORKER, SPARE = b"w", b"s"  # what is to be forked


class CannotFork(Exception):
    """The modules cannot be loaded here, or no worker could be forked from a process that has loaded them."""


def preload(modules: Sequence[str]) -> None:
    """Load these modules; raises ``CannotFork`` with what to do."""
    for name in modules:
        try:
            module = importlib.import_module(name)
            for public in getattr(module, "__all__", ()):  # which some modules load when they are first asked for
                getattr(module, public, None)
        except Exception as error:
            if not (isinstance(error, ModuleNotFoundError) and error.name == name):
                traceback.print_exc()
            raise CannotFork(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
        if started := [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]:
            raise CannotFork(
                f"{name} starts threads ({', '.join(started)}), which no fork has: leave it to the workers"
            )
    if "straggle" in sys.modules:
        importlib.import_module("straggle.building").load_optional_parts()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        importlib.import_module("torch._dynamo")  # as the first optimizer does, for half of torch's time
        if torch.cuda.is_initialized():
            raise CannotFork("a module uses a CUDA device as it is loaded, which no fork can: leave it to the workers")


def serve(control: socket.socket) -> tuple[socket.socket, socket.socket | None]:
    """Fork a process for each message, until the launcher has gone.

    Returns in each of them, with its own socket and, in a spare, the one by which it is given a rank.
    """
    server = os.getpid()
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                _report_end(selector, key)
                continue
            kind, descriptors, _, _ = socket.recv_fds(control, 1, 3)
            if not descriptors:
                raise SystemExit(0)
            own, others = socket.socket(fileno=descriptors[0]), descriptors[1:]
            pid = _fork()
            if pid == 0:
                _leave_server(control, selector, server)
                gives = socket.socket(fileno=others.pop(0)) if kind == SPARE else None
                _redirect(others)
                return own, gives
            for descriptor in others:
                os.close(descriptor)
            if pid is None:
                own.close()
            else:
                _send(own, pid)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, own))


def run(own: socket.socket, gives: socket.socket | None = None) -> None:
    """Become the worker: its environment, arguments and program, as if a new process had begun with them.

    ``gives``: of a spare, the socket by which it is given a rank.
    """
    with own, own.makefile() as request:
        wanted = json.load(request)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    if gives is not None:
        GivenLater.begin(gives, wanted["later"])
    program, sys.argv[1:] = wanted["program"], wanted["arguments"]
    sys.argv[0] = program
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own does so by itself, and torch begins with a constant
    if not getattr(sys.flags, "safe_path", False):  # nothing to take away where Python was told to add nothing
        del sys.path[0]
    if wanted["module"]:
        _look_first_in(os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif os.path.isdir(program) or zipfile.is_zipfile(program):
        runpy.run_path(program, run_name="__main__")  # which adds it to the path
    else:
        _look_first_in(os.path.dirname(os.path.realpath(program)))
        _run_file(program)


class GivenLater(os._Environ):  # type: ignore[type-arg]
    """`os.environ` of a spare: who asks for what only one rank has, waits until this process is given a rank.

    It is the usual one again from then on. A process that is not needed ends where it waits, with status 0. Whoever
    looks through all of it, as libraries do while they are loaded, finds what is there.
    """

    _gives: socket.socket
    _later: frozenset[str]

    @classmethod
    def begin(cls, gives: socket.socket, later: Sequence[str]) -> None:
        """Have `os.environ` wait for these names; whoever has it already has this one."""
        gives.set_inheritable(False)
        os.environ.__class__ = cls
        assert isinstance(os.environ, GivenLater)
        os.environ._wait_by(gives, frozenset(later))
        os.register_at_fork(before=cls._await_if_spare)  # what is forked has all of the environment

    def _wait_by(self, gives: socket.socket, later: frozenset[str]) -> None:
        self._gives, self._later = gives, later

    @staticmethod
    def _await_if_spare() -> None:
        if isinstance(os.environ, GivenLater):
            os.environ._await()

    def _await(self) -> None:
        """Say where, and wait. Nothing is taken away there: a signal's handler may ask meanwhile, or another thread."""
        said = b""
        with contextlib.suppress(OSError, ValueError):
            with contextlib.suppress(OSError):  # the launcher may have said all that it has to say
                self._gives.send(_asked_at().encode())
            select.select([self._gives], [], [])  # which wakes all that wait, as `recv` does not
            said = self._gives.recv(_LONGEST, socket.MSG_PEEK)
        if not said:
            raise SystemExit(0)
        self.__class__ = os._Environ  # type: ignore[assignment]
        os.environ.update(json.loads(said))

    # not by `super()`: this is none of this class any more once it has waited

    def __getitem__(self, name: str) -> Any:
        if name in self._later:
            self._await()
        return os._Environ.__getitem__(self, name)

    def __contains__(self, name: object) -> bool:
        if name in self._later:
            self._await()
        return os._Environ.__contains__(self, name)

    def __setitem__(self, name: str, value: str) -> None:
        if name in self._later:
            self._await()
        os._Environ.__setitem__(self, name, value)

    def __delitem__(self, name: str) -> None:
        if name in self._later:
            self._await()
        os._Environ.__delitem__(self, name)

    def copy(self) -> dict[str, str]:
        """All of it, for a process that is started with it."""
        self._await()
        return dict(self)


def _asked_at() -> str:
    """Where the program asks: its own innermost line, if it is in one."""
    own = getattr(sys.modules["__main__"], "__file__", None)
    stack = traceback.extract_stack()
    places = [f"{os.path.basename(at.filename)}:{at.lineno}" for at in stack if at.filename == own]
    return places[-1] if places else "a thread, or a module of its own"


def _look_first_in(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _run_file(path: str) -> None:
    """As ``python path`` does; `runpy` would change ``sys.argv[0]``, and take the module away before Python's end."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(path)
    try:
        with io.open_code(main.__file__) as file:
            text = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {main.__file__!r}: {error}\n")
        raise SystemExit(2) from None  # as of a command line that is wrong: it is not started again
    code = compile(text, main.__file__, "exec")
    exec(code, main.__dict__)


def _fork() -> int | None:
    """0 in the worker; in the server its process id, and ``None`` if there may be no process more."""
    try:
        return os.fork()
    except OSError:
        return None


def _report_end(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    pid, own = key.data
    selector.unregister(key.fileobj)
    os.close(key.fd)
    _, status = os.waitpid(pid, 0)
    _send(own, os.waitstatus_to_exitcode(status))
    own.close()


def _leave_server(control: socket.socket, selector: selectors.BaseSelector, server: int) -> None:
    """Nothing that the server has open stays open in a worker, which the kernel kills when the server dies."""
    os.setsid()  # Ctrl-C in a terminal reaches the launcher alone, and what the worker starts can be ended with it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    control.close()
    for key in list(selector.get_map().values()):
        if key.data is not None:
            os.close(key.fd)
            key.data[1].close()
    selector.close()


def _redirect(output: Sequence[int]) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for descriptor in output:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)


def _send(own: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the launcher may have gone
        own.sendall(f"{number}\n".encode())


def main() -> None:
    """Serve; ends as a worker in each worker."""
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        os.close(os.pidfd_open(os.getpid()))
        preload(sys.argv[2:])
    except OSError as error:
        control.send(f"no process can be waited for by a descriptor here: {error}".encode())
    except CannotFork as error:
        control.send(str(error).encode())
    else:
        control.send(b"ready")
        gc.collect()
        gc.freeze()  # what is there now is looked at by no worker's collector, which would copy its pages
        run(*serve(control))


if __name__ == "__main__":
    main()
