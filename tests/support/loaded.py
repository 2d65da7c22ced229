"""Ranks and jobs with a framework loaded: they are forked from a process that has loaded it once for a test file."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import ranks
from launch_jobs import loaded_launch

_fork = multiprocessing.get_context("fork")
_forkserver = multiprocessing.get_context("forkserver")
_started: dict[int, BaseProcess] = {}  # by process id, in the process that has loaded it
Launch = Callable[..., AbstractContextManager[ranks.Started]]


@contextlib.contextmanager
def ranks_with(*modules: str) -> Iterator[Callable[..., list[Any]]]:
    """`run_forked`, each of whose ranks has these modules: seconds of CPU that each would take to load them."""
    with _process_with(modules) as ask:
        yield partial(ask, _run_forked)


@contextlib.contextmanager
def launch_with(*modules: str) -> Iterator[Launch]:
    """`loaded_launch`, each of whose workers has these modules."""
    with _process_with(modules) as ask:
        yield partial(loaded_launch, process=partial(_Process, ask))


class _Process:
    """One that is forked there, with what `multiprocessing` has of one's own."""

    def __init__(self, ask: Callable[..., Any], target: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._ask, self._target, self._args = ask, target, args
        self.pid: int | None = None
        self.exitcode: int | None = None

    def start(self) -> None:
        self.pid = self._ask(_start, self._target, *self._args)

    def join(self, timeout: float | None = None) -> None:
        self.exitcode = self._ask(_join, self.pid, timeout)

    def is_alive(self) -> bool:
        self.join(0.0)
        return self.exitcode is None

    def kill(self) -> None:
        if self.pid is not None and self.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def _process_with(modules: tuple[str, ...]) -> Iterator[Callable[..., Any]]:
    """What calls a function of a module in a process that has these modules."""
    ours, theirs = _forkserver.Pipe()
    process = _forkserver.Process(target=_serve, args=(theirs, modules))
    process.start()
    theirs.close()
    try:
        yield partial(_ask, ours)
    finally:
        ours.close()
        process.kill()
        process.join()


def _ask(connection: Connection, function: Callable[..., Any], *words: Any, **options: Any) -> Any:
    connection.send_bytes(pickle.dumps((function, words, options)))
    try:
        outcome = pickle.loads(connection.recv_bytes())
    except BaseException:
        connection.close()  # the answer, which may come yet, is not for the next test
        raise
    if isinstance(outcome, AssertionError):
        raise outcome
    return outcome


def _serve(connection: Connection, modules: tuple[str, ...]) -> None:
    for module in modules:
        importlib.import_module(module)
    with contextlib.suppress(EOFError):
        while True:
            function, words, options = pickle.loads(connection.recv_bytes())
            try:
                outcome: Any = function(*words, **options)
            except AssertionError as error:
                outcome = error
            connection.send_bytes(pickle.dumps(outcome))


# -- in the process that has them


def _run_forked(function: Callable[..., Any], *words: Any, **options: Any) -> list[Any]:
    return ranks.run_forked(function, *words, context=_fork, **options)


def _start(target: Callable[..., object], *args: Any) -> int:
    process = _fork.Process(target=target, args=args)
    process.start()
    assert process.pid is not None
    _started[process.pid] = process
    return process.pid


def _join(pid: int, timeout: float | None) -> int | None:
    _started[pid].join(timeout)
    return _started[pid].exitcode
