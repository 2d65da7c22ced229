"""Runs a function, or a command, on several ranks: of a simulated world, or processes that are forked from a server.

The server has torch loaded: a rank starts in about a tenth of a second. A function's store is a file: it outlives any
rank, as that of torchrun's agent does, and needs no name server, which a connection of ``TCPStore`` asks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import hashlib
import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stores import serve_store
from torch import Tensor, nn

from straggle import StagedDataParallel, world
from straggle.lab.world.run import Fault, Rank, run_world
from straggle.lab.world.scheduler import Thread

_MODULES = [
    "pytest",
    "torch",
    "torch._dynamo",  # which the first optimizer imports
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.profiler._cupti_monitor",  # which the first step of an optimizer imports
    "torch.utils.checkpoint",
    "straggle",
    "straggle.lab.workloads.digits",
    "straggle.lab.workloads.text",
    "straggle.observe.metrics_endpoint",
    "hydra.compose",  # which the first configuration imports
    "straggle.commands.train",
    "straggle.commands.compare",
    "straggle.commands.launch",
    "torch.distributed.run",
    "tests.support.preloaded",
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_MODULES)
_FAREWELL_S = 5.0


@dataclass(frozen=True)
class Raised:
    """How a rank ended that did not return: the exception's type and message; "Killed" where there was none."""

    kind: str
    message: str
    trace: str = ""


KILLED = Raised("Killed", "the process ended without a word")


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    seed: int = 0,
    faults: Sequence[Fault] = (),
    outcomes: bool = False,
    timeout_s: float = 7200.0,
) -> list[Any]:
    """What ``function(rank, *args)`` returns on each rank of a simulated world; the function is one of a module.

    The order of events is drawn by ``seed``, and no machine changes it. An exception in a rank is raised here with its
    rank and traceback, or with ``outcomes`` stands in its place as `Raised`. ``timeout_s``: of virtual time.
    """
    payload = pickle.dumps((function, args))

    def loop(rank: Rank) -> Any:
        return outcome_of(payload, rank.number)

    with own_to_the_ranks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in a process of its own: what torch warns of is no error there
        run = run_world(loop, ranks=world_size, seed=seed, faults=faults, longest_s=timeout_s, end_s=timeout_s)
    results = [_ended(own) for own in run.results]
    return results if outcomes else _checked(results)


@contextlib.contextmanager
def own_to_the_ranks() -> Iterator[None]:
    """What ranks set in modules and classes of straggle's is theirs, and gone with their processes.

    That is a constant, as ``stages.BUCKET_BYTES``, or a method that a rank has put in another's place.
    """
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "straggle"]
    classes = {own for module in modules for own in vars(module).values() if isinstance(own, type)}
    ours = [own for own in classes if own.__module__.partition(".")[0] == "straggle"]
    constants = [{name: value for name, value in vars(module).items() if name.isupper()} for module in modules]
    methods = [{name: value for name, value in vars(own).items() if callable(value)} for own in ours]
    try:
        yield
    finally:
        for module, before in zip(modules, constants, strict=True):
            vars(module).update(before)
        for own, of_class in zip(ours, methods, strict=True):
            for name, value in of_class.items():
                if vars(own).get(name) is not value:
                    setattr(own, name, value)


def _ended(result: Any) -> Any:
    """What a rank has returned, or how it ended."""
    if isinstance(result, BaseException):
        return Raised(type(result).__name__, str(result))
    return KILLED if result is None else pickle.loads(result)


def outcome_of(payload: bytes, *first: Any) -> bytes:
    """What a function that was packed with its arguments returns or raises, packed as between processes."""
    function, args = pickle.loads(payload)
    try:
        result: Any = function(*first, *args)
    except (Exception, SystemExit) as error:
        result = Raised(type(error).__name__, str(error), traceback.format_exc())
    return pickle.dumps(result)


def run_forked(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 150.0,
    outcomes: bool = False,
    context: Any = _context,
) -> list[Any]:
    """The same with a process for each rank, in a real gloo group: for what only these show.

    A rank that has returned or raised stays alive until all have. A rank that does not end in ``timeout_s``
    fails the test, with the stacks of its threads. ``context`` starts the processes (`loaded.py`).
    """
    payload = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                target = (theirs, rank, world_size, folder, payload, timeout_s)
                process = context.Process(target=_rank_main, args=target, daemon=True)
                process.start()
                theirs.close()
                ranks.append((process, ours))
            results = _collect([connection for _, connection in ranks], Path(folder), timeout_s, outcomes)
        except BaseException:
            for process, _ in ranks:
                process.kill()
            raise
        finally:
            for _, connection in ranks:
                with contextlib.suppress(OSError):  # it has ended
                    connection.send_bytes(
                        b""
                    )  # lets the rank end; to close does not, where ranks have inherited this end
                connection.close()
            for process, _ in ranks:
                process.join(_FAREWELL_S)
                if process.is_alive():
                    process.kill()
                    process.join()
    return results


def run_command(word: str, world_size: int, *keys: str, folder: Path, status: int = 0, timeout_s: float = 240.0) -> str:
    """What ``python -m straggle word`` prints, started in ``folder`` on several ranks with these keys.

    With the environment and the store that torchrun's agent gives them. A rank that does not end with ``status``, or
    not in ``timeout_s``, fails the test at once, with what all have printed.
    """
    store = serve_store()
    with tempfile.TemporaryDirectory() as logs:
        starts = [
            (
                straggle_main,
                (word, *keys),
                folder,
                rank_environment(rank, world_size, store.port),
                Path(logs, f"rank{rank}"),
            )
            for rank in range(world_size)
        ]
        ranks = [_context.Process(target=_started_main, args=start) for start in starts]
        until = time.monotonic() + timeout_s
        try:
            for process in ranks:
                process.start()
            running, failed = list(ranks), False
            while running and not failed and time.monotonic() < until:
                wait([process.sentinel for process in running], until - time.monotonic())
                failed = any(process.exitcode not in (None, status) for process in ranks)
                running = [process for process in running if process.is_alive()]
        finally:
            for process in ranks:
                process.kill()
                process.join()
        printed = "".join(path.read_text() for path in sorted(Path(logs).iterdir()))
    assert {process.exitcode for process in ranks} == {status}, printed
    return printed


@dataclass(frozen=True)
class Started:
    """A command in a process of its own; what it and its children print goes to ``log``."""

    process: Any  # one of multiprocessing's, or as these
    log: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def status(self, timeout_s: float = 200.0) -> int:
        """Its exit status, once it has ended; fails the test if it does not."""
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"still runs: {self.log.read_text()}"
        return self.process.exitcode


@contextlib.contextmanager
def started(
    function: Callable[..., Any],
    *args: Any,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    process: Callable[..., Any] = _context.Process,
) -> Iterator[Started]:
    """``sys.exit(function(*args))`` in a process of its own, in ``folder``, killed at the end; torch is there.

    ``process`` makes it (`loaded.py`).
    """
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".log", delete=False) as file:
        log = Path(file.name)
    own = process(target=_started_main, args=(function, args, folder, dict(environment or {}), log))
    own.start()
    try:
        yield Started(own, log)
    finally:
        own.kill()
        own.join()


@contextlib.contextmanager
def started_command(
    word: str, *words: object, folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Started]:
    """``python -m straggle word ...``, started in the same way."""
    with started(straggle_main, word, *map(str, words), folder=folder, environment=environment) as process:
        yield process


def straggle_main(word: str, *words: str) -> int | None:
    """What ``python -m straggle word ...`` runs in its process."""
    sys.argv = ["straggle", *words]
    status: int | None = importlib.import_module(f"straggle.commands.{word}").main()
    return status


@contextlib.contextmanager
def staged(module: nn.Module, **options: Any) -> Iterator[StagedDataParallel]:
    """``StagedDataParallel(module, **options)``, closed at the end."""
    model = StagedDataParallel(module, **options)
    try:
        yield model
    finally:
        model.close()


@contextlib.contextmanager
def logged(logger: str, level: int = logging.WARNING) -> Iterator[list[str]]:
    """The messages that a logger gives from here on, of this level and above."""
    messages: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger(logger).removeHandler(handler)


def die() -> None:
    """Kills this rank as the kernel would, but not while one of its threads writes the store's file.

    Half a record there makes every reader wait for the rest; a store that is a server has no such trouble.
    """
    if isinstance(threading.current_thread(), Thread):
        world.end_process(9)
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    with open(store.path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGKILL)


def digest(tensors: Iterable[Tensor | None]) -> str:
    """A hash of the exact values; a missing gradient has one too."""
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(
            b"none"
            if tensor is None
            else tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return content.hexdigest()


def _collect(connections: list[Connection], folder: Path, timeout_s: float, outcomes: bool) -> list[Any]:
    results: dict[int, Any] = {}
    until = time.monotonic() + timeout_s + 1
    while len(results) < len(connections) and (remaining := until - time.monotonic()) > 0:
        for connection in wait([c for rank, c in enumerate(connections) if rank not in results], remaining):
            rank = connections.index(connection)
            try:
                results[rank] = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                results[rank] = KILLED
            if isinstance(results[rank], Raised) and not outcomes:
                until = min(until, time.monotonic() + _FAREWELL_S)  # its peers may have more to say, or wait for it
    if not outcomes:
        _checked([results[rank] for rank in sorted(results)], sorted(results))
    if hanging := [rank for rank in range(len(connections)) if rank not in results]:
        stacks = "\n".join(f"rank {rank}:\n{Path(folder, f'rank{rank}').read_text()}" for rank in hanging)
        raise AssertionError(f"ranks {hanging} did not end within {timeout_s} s\n{stacks}")
    return [results[rank] for rank in range(len(connections))]


def _checked(results: list[Any], ranks: Sequence[int] = ()) -> list[Any]:
    """These, if no rank has raised."""
    ends = zip(ranks or range(len(results)), results, strict=True)
    if failures := [(rank, end) for rank, end in ends if isinstance(end, Raised)]:
        raise AssertionError(
            "\n".join(f"rank {rank}: {end.kind}: {end.message}\n{end.trace}" for rank, end in failures)
        )
    return results


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun's agent, whose store has this port, gives to a rank; and the loopback device for gloo."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {**{name: str(value) for name, value in own.items()}, "GLOO_SOCKET_IFNAME": "lo"}


def _started_main(
    function: Callable[..., Any], args: tuple[Any, ...], folder: Path, environment: dict[str, str], log: Path
) -> None:
    gc.freeze()  # what the server has loaded: to look at it in each process would copy its pages, for half a second
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.exit(function(*args))


def _rank_main(
    connection: Connection, rank: int, world_size: int, folder: str, payload: bytes, timeout_s: float
) -> None:
    gc.freeze()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with open(f"{folder}/rank{rank}", "w") as file:
        faulthandler.dump_traceback_later(timeout_s, file=file)
        store = dist.FileStore(f"{folder}/store")
        store.set_timeout(timedelta(seconds=timeout_s))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        try:
            function, args = pickle.loads(payload)
            result: Any = function(rank, *args)
        except BaseException as error:
            result = Raised(type(error).__name__, str(error), traceback.format_exc())
        connection.send_bytes(pickle.dumps(result))  # not send(), which shares the memory of tensors
        with contextlib.suppress(EOFError, ConnectionError):
            connection.recv_bytes()  # until all ranks have a result
        if isinstance(result, Raised):
            os._exit(1)  # threads may still wait for peers
        dist.destroy_process_group()
