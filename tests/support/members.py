"""A job whose ranks are killed, stopped and started again while it runs: in a simulated world, or real processes.

The store of processes is a file, whose lock is held while a rank is killed or stopped: one in the middle of a record,
or with the lock itself, would stop all others. A store that is a server, as torchrun's agent has it, has no such
trouble.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from network import Network, enter
from ranks import Raised, outcome_of, own_to_the_ranks  # which sets what the server of forks has loaded
from stores import serve_store

from straggle.backward import stages
from straggle.lab.world import run as simulated
from straggle.lab.world.run import Rank
from straggle.lab.world.scheduler import Thread
from straggle.lab.world.store import Outside

_context = multiprocessing.get_context("forkserver")
_POLL_S = 0.02
_NO_END = 1 << 40
QUICK_MS, SLOW_MS, VIRTUAL_MS = 10, 150, 50


class Board:
    """What ranks and test tell each other, in a file of numbers: how many steps each has made, and when to end."""

    def __init__(self, path: Path, world_size: int) -> None:
        self.folder = path.parent
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self._end = world_size
        self._step_ms = world_size + 1
        if os.fstat(self._file).st_size == 0:
            for place in range(world_size):
                self._write(place, 0)
            self._write(self._end, _NO_END)
            self._write(self._step_ms, QUICK_MS)

    def made(self, rank: int) -> int:
        """Steps that this rank has made; 0 where it was started again and has not made one yet."""
        return self._read(rank)

    def note(self, rank: int, num_steps: int) -> None:
        """This rank has made so many steps."""
        self._write(rank, num_steps)

    @property
    def end(self) -> int:
        """The step before which all loops end."""
        return self._read(self._end)

    @end.setter
    def end(self, step: int) -> None:
        self._write(self._end, step)

    @property
    def step_s(self) -> float:
        """How long a step of a loop should take at least: longer while the test does not wait for steps."""
        return self._read(self._step_ms) / 1000

    def pace(self, step_ms: int) -> None:
        """Steps should take so long from here on."""
        self._write(self._step_ms, step_ms)

    def _read(self, place: int) -> int:
        return int(struct.unpack("q", os.pread(self._file, 8, 8 * place))[0])

    def _write(self, place: int, number: int) -> None:
        os.pwrite(self._file, struct.pack("q", number), 8 * place)


class Job:
    """Ranks that run ``function(rank, board, *args)``, one of a module; see `run_job`."""

    def __init__(
        self,
        folder: Path,
        world_size: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        environment: dict[str, str],
        network: Network | None,
        served: bool,
        replica_size: int,
    ) -> None:
        self.folder, self.world_size, self.replica_size = folder, world_size, replica_size
        self.board = Board(folder / "board", world_size)
        self._environment, self._network = environment, network
        self._store_host: Any = None
        self._port = 0
        if served or network is not None:
            self.start_store()
        self._payload = pickle.dumps((function, args))
        self._processes: dict[int, Any] = {}
        self._connections: dict[int, Connection] = {}
        self._starts = dict.fromkeys(range(world_size), 0)
        self._results: dict[int, Any] = {}

    @property
    def furthest(self) -> int:
        """Steps that the rank has made which made most."""
        return max(map(self.board.made, range(self.world_size)))

    def start(self, rank: int, *args: Any, environment: dict[str, str] | None = None) -> None:
        """Start a rank, for the first time or again; with ``args`` in place of the job's, where there are any."""
        payload = self._payload
        if args:
            payload = pickle.dumps((pickle.loads(payload)[0], args))
        environment = self._environment if environment is None else environment
        self.board.note(rank, 0)
        self._results.pop(rank, None)
        ours, theirs = _context.Pipe()
        place = None
        if self._store_host is not None:
            place = ("", "127.0.0.1", self._port)
        if self._network is not None:
            place = (self._network.names[rank], self._network.addresses[-1], self._port)
        number, replica = self._starts[rank], rank // self.replica_size
        corner = f"start/{replica}/{number}" if number else "start"
        start = (theirs, rank, self.world_size, number, str(self.folder), payload, environment, place, corner)
        process = _context.Process(target=_member_main, args=start, daemon=True)
        process.start()
        theirs.close()
        self._starts[rank] += 1
        self._processes[rank], self._connections[rank] = process, ours

    def process(self, rank: int) -> Any:
        """The process of a rank that was started last."""
        return self._processes[rank]

    def start_store(self) -> None:
        """Start the server that is the job's store, for the first time or again: it is empty, and where it was."""
        ours, theirs = _context.Pipe(duplex=False)
        namespace = "" if self._network is None else self._network.names[-1]
        self._store_host = _context.Process(target=_serve_store, args=(theirs, namespace, self._port), daemon=True)
        self._store_host.start()
        theirs.close()  # so that this raises where the store's process ends
        self._port = ours.recv()

    def connect(self) -> Any:
        """A connection to the server that is the job's store, on this host."""
        return dist.TCPStore("127.0.0.1", self._port, is_master=False)

    def kill_store(self) -> None:
        """SIGKILL for that server."""
        self._store_host.kill()
        self._store_host.join()

    def kill(self, *ranks: int) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL, ranks)
        for rank in ranks:
            self._processes[rank].join()

    def stop(self, *ranks: int) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP, ranks)

    def signal(self, rank: int, number: int) -> None:
        """Another one."""
        os.kill(self._processes[rank].pid, number)

    def lives(self, rank: int) -> bool:
        """Whether its process has not ended."""
        return bool(self._processes[rank].is_alive())

    def resume(self, *ranks: int) -> None:
        """SIGCONT."""
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGCONT)

    def walk(self, num_steps: int, ranks: Iterable[int] | None = None, limit_s: float = 40.0) -> None:
        """Wait until these ranks are so many steps further than the furthest is now."""
        step = self.furthest + num_steps
        ranks = range(self.world_size) if ranks is None else list(ranks)
        with self.waits_for_steps():
            self.wait(lambda: all(self.board.made(rank) >= step for rank in ranks), f"ranks {ranks} at {step}", limit_s)

    @contextlib.contextmanager
    def waits_for_steps(self) -> Iterator[None]:
        """In this block."""
        self.board.pace(QUICK_MS)
        try:
            yield
        finally:
            self.board.pace(SLOW_MS)

    def wait(self, condition: Callable[[], bool], what: str, limit_s: float = 40.0) -> None:
        """Wait until this is so; a rank that raises meanwhile fails the test, unless the condition is about it."""
        until = time.monotonic() + limit_s
        while not condition():
            self._collect()
            raised = {rank: own for rank, own in self._results.items() if isinstance(own, Raised) and own.kind}
            if time.monotonic() > until:
                raise AssertionError(f"not within {limit_s} s: {what}; raised: {raised}\n{self._stacks()}")
            time.sleep(_POLL_S)

    def ended(self, rank: int) -> Any:
        """What a rank returned, or `Raised`; ``None`` while it runs."""
        self._collect()
        return self._results.get(rank)

    def result(self, rank: int, limit_s: float = 40.0) -> Any:
        """The same, when it has."""
        self.wait(lambda: self.ended(rank) is not None, f"rank {rank} ends", limit_s)
        return self._results[rank]

    def meet(self, limit_s: float = 60.0) -> None:
        """Wait until no rank is behind the others by more than a step or two: who was healed has caught up."""
        made = self.board.made
        with self.waits_for_steps():
            self.wait(lambda: min(map(made, range(self.world_size))) >= self.furthest - 2, "all are as far", limit_s)

    def finish(self, ranks: Iterable[int] | None = None, limit_s: float = 40.0, last_steps: int = 20) -> list[Any]:
        """End all loops at the same step, and give what these ranks return; one that raised fails the test.

        ``last_steps``: so many are made first; a rank may have made some more than the board has.
        """
        self.board.end = self.furthest + last_steps
        ranks = range(self.world_size) if ranks is None else list(ranks)
        with self.waits_for_steps():
            results = [self.result(rank, limit_s) for rank in ranks]
        failed = [f"rank {rank}: {own}" for rank, own in zip(ranks, results, strict=True) if isinstance(own, Raised)]
        assert not failed, "\n".join(failed) + self.log()
        return results

    def log(self) -> str:
        """What the library has logged on all ranks."""
        return "".join(f"\n{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("log*")))

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""
        time.sleep(seconds)

    def close(self) -> None:
        """End all processes."""
        for process in (*self._processes.values(), *filter(None, [self._store_host])):
            process.kill()
            process.join()

    def _signal(self, number: int, ranks: Sequence[int]) -> None:
        with open(self.folder / "store", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for rank in ranks:
                os.kill(self._processes[rank].pid, number)
            if number == signal.SIGSTOP:  # one that waits for the lock could have it before it stops
                self.wait(lambda: all(map(self._stands, ranks)), f"ranks {ranks} have stopped")

    def _stands(self, rank: int) -> bool:
        threads = Path(f"/proc/{self._processes[rank].pid}/task").glob("*/stat")
        return all(path.read_text().rpartition(")")[2].split()[0] == "T" for path in threads)

    def _collect(self) -> None:
        for rank, connection in self._connections.items():
            if rank not in self._results and connection.poll():
                with contextlib.suppress(EOFError, ConnectionError):  # it was killed
                    self._results[rank] = pickle.loads(connection.recv_bytes())

    def _stacks(self) -> str:
        for process in self._processes.values():
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR2)
        time.sleep(0.5)
        stacks = [f"\n{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("stacks*"))]
        return "".join(stacks) + self.log()


@dataclass(frozen=True)
class Process:
    """One of a simulated world, with what `multiprocessing` has of a real one."""

    pid: int
    world: simulated.Job
    thread: Thread

    @property
    def exitcode(self) -> int | None:
        """The status with which it has ended; -9 if it was killed, ``None`` while it runs."""
        if self.is_alive():
            return None
        return self.world.statuses.get(self.pid, -9 if self.pid in self.world.scheduler.dead else 0)

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not (self.thread.is_over or self.pid in self.world.scheduler.dead)


class WorldJob(Job):
    """The same job in a simulated world, in virtual time."""

    @contextlib.contextmanager
    def waits_for_steps(self) -> Iterator[None]:
        """They are as slow as always: virtual time costs nothing, and each step made while a limit passes does."""
        yield

    def __init__(self, folder: Path, world_size: int, payload: bytes, replica_size: int) -> None:
        self.folder, self.world_size, self.replica_size = folder, world_size, replica_size
        self.board = Board(folder / "board", world_size)
        self.board.pace(VIRTUAL_MS)
        self._payloads = dict.fromkeys(range(world_size), payload)
        self._results: dict[int, Any] = {}
        self._starts = dict.fromkeys(range(world_size), 0)
        self._stopped = set[int]()
        self._handlers: list[logging.Handler] = []
        self._world: simulated.Job

    def run(self, rank: Rank) -> None:
        """What each process of a rank does."""
        number, start = rank.number, self._starts[rank.number]
        self._starts[number] += 1
        handler = logging.FileHandler(self.folder / f"log{number}.{start}")
        handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(message)s", "%M:%S"))
        logging.getLogger().addHandler(handler)
        self._handlers.append(handler)  # until the job is over: what the rank has started goes on when this ends
        self._results[number] = pickle.loads(outcome_of(self._payloads[number], number, self.board))

    def enter(self, world: simulated.Job) -> None:
        """Its ranks have begun."""
        self._world = world

    def start(self, rank: int, *args: Any, environment: dict[str, str] | None = None) -> None:
        """Start a rank again."""
        assert environment is None, "the ranks of a world share one environment"
        if args:
            self._payloads[rank] = pickle.dumps((pickle.loads(self._payloads[rank])[0], args))
        self.board.note(rank, 0)
        self._results.pop(rank, None)
        self._world.start(rank)

    def process(self, rank: int) -> Process:
        """That of a rank which was started last."""
        thread = self._world.training[rank]
        return Process(thread.process, self._world, thread)

    def start_store(self) -> None:
        """Start the job's store again: it is empty."""
        self._world.server.start()

    def kill_store(self) -> None:
        """The store is gone, with all connections to it."""
        self._world.server.kill()

    def connect(self) -> Any:
        """A connection to it, for the test."""
        return Outside(self._world.server)

    def kill(self, *ranks: int) -> None:
        """SIGKILL."""
        for rank in ranks:
            self._world.kill(rank)
        self.resume(*ranks)  # who comes after it is not stopped

    def stop(self, *ranks: int) -> None:
        """SIGSTOP."""
        for rank in {*ranks} - self._stopped:
            self._world.freeze(rank)
        self._stopped |= {*ranks}

    def resume(self, *ranks: int) -> None:
        """SIGCONT."""
        for rank in self._stopped & {*ranks}:
            self._world.resume(rank)
        self._stopped -= {*ranks}

    def sleep(self, seconds: float) -> None:
        """Let so much virtual time pass."""
        self._world.run_for(seconds)

    def signal(self, rank: int, number: int) -> None:
        """Another one."""
        self._world.signal(rank, number)

    def lives(self, rank: int) -> bool:
        """Whether its process has not ended."""
        return self._world.lives(rank)

    def wait(self, condition: Callable[[], bool], what: str, limit_s: float = 400.0) -> None:
        """Wait until this is so, in virtual time."""
        until = self._world.scheduler.now + limit_s
        while not condition():
            raised = {rank: own for rank, own in self._results.items() if isinstance(own, Raised)}
            if self._world.scheduler.now > until:
                places = self._world.scheduler.places()
                raise AssertionError(f"not within {limit_s} s: {what}; raised: {raised}{places}\n{self.log()}")
            self._world.run_for(_POLL_S)

    def close(self) -> None:
        """Log no more; the world ends all."""
        for handler in self._handlers:
            logging.getLogger().removeHandler(handler)
            handler.close()

    def _collect(self) -> None:
        """Results are there when ranks end."""


@contextlib.contextmanager
def run_job(
    world_size: int, function: Callable[..., Any], *args: Any, replica_size: int = 1, seed: int = 0
) -> Iterator[WorldJob]:
    """A job of so many ranks of a simulated world, each of which runs ``function(rank, board, *args)``.

    It ends with the block. ``replica_size`` ranks are a replica, and are started together. ``seed`` draws the order of
    events. A function may set how large a bucket is, as in a process of its own.
    """
    with tempfile.TemporaryDirectory() as folder, all_logged(), own_to_the_ranks():
        job = WorldJob(Path(folder), world_size, pickle.dumps((function, args)), replica_size)
        with (
            patch.object(stages, "BUCKET_BYTES", stages.BUCKET_BYTES),
            simulated.simulated(job.run, ranks=world_size, seed=seed, longest_s=7200.0) as world,
        ):
            job.enter(world)
            try:
                yield job
            finally:
                job.close()


@contextlib.contextmanager
def all_logged() -> Iterator[None]:
    """What the library logs is heard from its level INFO on."""
    logger = logging.getLogger("straggle")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def run_forked_job(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    environment: dict[str, str] | None = None,
    network: Network | None = None,
    served: bool = False,
    replica_size: int = 1,
) -> Iterator[Job]:
    """The same with processes, for what only these show.

    In a ``network`` each rank is on a host of its own, and the store is a server on the last host. ``served``: the
    store is a server on this one. ``replica_size`` ranks are a replica, and are started together.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), world_size, function, args, environment or {}, network, served, replica_size)
        try:
            for rank in range(world_size):
                job.start(rank)
            yield job
        finally:
            job.close()


def _member_main(
    connection: Connection,
    rank: int,
    world_size: int,
    start: int,
    folder: str,
    payload: bytes,
    environment: dict[str, str],
    place: tuple[str, str, int] | None,
    corner_name: str,
) -> None:
    gc.freeze()
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "TORCH_GLOO_LAZY_INIT": "1", **environment})
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(start)
    torch.set_num_threads(1)
    form = "%(asctime)s.%(msecs)03d %(message)s"
    logging.basicConfig(filename=f"{folder}/log{rank}.{start}", level=logging.INFO, format=form, datefmt="%M:%S")
    with open(f"{folder}/stacks{rank}.{start}", "w") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        store: Any = None
        if place is None:
            store = dist.FileStore(f"{folder}/store")
        else:
            if place[0]:
                enter(place[0])
            store = dist.TCPStore(place[1], place[2], is_master=False)
        store.set_timeout(timedelta(seconds=60))
        corner = dist.PrefixStore(corner_name, store)  # type: ignore[attr-defined]
        backend = os.environ.get("BACKEND_OF_RANKS", "gloo")
        dist.init_process_group(backend, store=corner, rank=rank, world_size=world_size)
        try:
            function, args = pickle.loads(payload)
            result: Any = function(rank, Board(Path(folder, "board"), world_size), *args)
        except BaseException as error:
            result = Raised(type(error).__name__, str(error), traceback.format_exc())
        connection.send_bytes(pickle.dumps(result))
        with contextlib.suppress(EOFError, ConnectionError):
            connection.recv_bytes()  # never comes: the test ends it


def _serve_store(connection: Any, namespace: str, port: int) -> None:
    if namespace:
        enter(namespace)
    store = serve_store("0.0.0.0", port)
    connection.send(store.port)
    signal.pause()
