"""`run_forked` with a framework loaded: its ranks are forked from a process that has loaded it once for a test file."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import ranks

_fork = multiprocessing.get_context("fork")
_forkserver = multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def ranks_with(*modules: str) -> Iterator[Callable[..., list[Any]]]:
    """`run_forked`, each of whose ranks has these modules: seconds of CPU that each would take to load them."""
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


def _ask(connection: Connection, function: Callable[..., Any], *words: Any, **options: Any) -> list[Any]:
    connection.send_bytes(pickle.dumps((function, words, options)))
    try:
        outcome = pickle.loads(connection.recv_bytes())
    except BaseException:
        connection.close()  # the answer, which may come yet, is not for the next test
        raise
    if isinstance(outcome, AssertionError):
        raise outcome
    return list(outcome)


def _serve(connection: Connection, modules: tuple[str, ...]) -> None:
    for module in modules:
        importlib.import_module(module)
    with contextlib.suppress(EOFError):
        while True:
            function, words, options = pickle.loads(connection.recv_bytes())
            try:
                outcome: Any = ranks.run_forked(function, *words, context=_fork, **options)
            except AssertionError as error:
                outcome = error
            connection.send_bytes(pickle.dumps(outcome))
