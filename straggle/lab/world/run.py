"""`run_world`: a loop of the user's on ranks of a simulated world, with faults, and what must always hold."""

from __future__ import annotations

import gc
import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from straggle import world
from straggle.building import load_optional_parts
from straggle.lab.world import process, torch_distributed
from straggle.lab.world.groups import Network
from straggle.lab.world.scheduler import Broken, Ended, Scheduler, Thread
from straggle.lab.world.store import Server
from straggle.lab.world.threads import primitives
from straggle.policies.deadline import check_count


class Fault(Protocol):
    """Something that happens in a world; its ``repr`` is how a schedule is written down."""

    def begin(self, job: Job) -> None:
        """Set the timers that make it happen; before the first thread runs."""


@dataclass(frozen=True)
class Rank:
    """What a loop knows of its rank."""

    number: int
    size: int
    job: Job

    def work(self, seconds: float) -> None:
        """Take so long, as a layer does, or the loading of a batch."""
        world.sleep(seconds)

    def note(self, **values: Any) -> None:
        """Keep these for whoever runs the world, with the time."""
        self.job.notes[self.number].append({"at": self.now, **values})

    @property
    def now(self) -> float:
        """The world's time, which no rank's clock need show."""
        return self.job.scheduler.now

    @property
    def is_told(self) -> bool:
        """Whether this rank's process was told to end soon."""
        return self.job.training[self.number].process in self.job.told


@dataclass
class Job:
    """A world that is being run."""

    scheduler: Scheduler
    network: Network
    server: Server
    loop: Callable[[Rank], Any]
    size: int
    make_thread: Callable[..., Thread]
    training: dict[int, Thread] = field(default_factory=dict)  # each rank's training thread
    notes: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    finalizers: dict[int, list[Any]] = field(default_factory=dict)  # by process
    hooks: list[RemovableHandle] = field(default_factory=list)  # of leaf tensors
    handlers: dict[tuple[int, int], Callable[..., Any]] = field(default_factory=dict)  # by process and signal
    starts: dict[int, int] = field(default_factory=dict)  # how often each rank was started again
    told: set[int] = field(default_factory=set)  # processes that were told to end soon
    statuses: dict[int, int] = field(default_factory=dict)  # by process that has ended itself at once
    num_processes: int = 0
    num_to_start: int = 0

    def run_for(self, seconds: float) -> None:
        """Let so much virtual time pass. Raises `Broken`."""
        scheduler, is_over = self.scheduler, list[bool]()

        def over() -> None:
            is_over.append(True)
            scheduler.look()

        scheduler.after(seconds, over)
        scheduler.run(lambda: bool(is_over))

    def run_to_the_end(self, end_s: float) -> Run:
        """Run until no thread is left. Raises `Broken`."""
        scheduler, seen_over = self.scheduler, list[float]()

        def threads_are_left() -> None:
            scheduler.broken(f"threads are left {end_s:g} s after all loops were over")

        def all_over() -> bool:
            if self.loops_are_over and not seen_over:
                seen_over.append(scheduler.now)
                scheduler.after(end_s, threads_are_left)
            return self.is_over

        scheduler.run(all_over)
        results = tuple(self.results.get(number) for number in range(self.size))
        fingerprint = f"{scheduler.digest & (1 << 64) - 1:016x}"
        return Run(results, self.notes, fingerprint, scheduler.now, scheduler.num_switches)

    def start(self, number: int) -> None:
        """Start a process of this rank."""
        thread = self.training[number] = self.make_thread(target=self._run, args=(number,), name="training")
        self.scheduler.begin(thread, number, self.num_processes)
        self.num_processes += 1
        super(Thread, thread).start()

    def start_later(self, number: int, after_s: float) -> None:
        """Start one so much later, if none of this rank lives then; until then the job is not over."""

        def starts() -> None:
            self.num_to_start -= 1
            self.scheduler.look()
            if not self.lives(number):
                self.start(number)

        self.num_to_start += 1
        self.scheduler.after(after_s, starts)

    def lives(self, number: int) -> bool:
        """Whether a process of this rank trains."""
        return not (self.training[number].is_over or self.training[number].process in self.scheduler.dead)

    def kill(self, number: int) -> None:
        """End the process of this rank at once."""
        self.scheduler.dead.add(self.training[number].process)
        self.scheduler.look()
        self.network.lose(number)

    def freeze(self, number: int) -> None:
        """None of this rank's threads runs from now on, as after SIGSTOP."""
        self.scheduler.hold(number)

    def resume(self, number: int) -> None:
        """They run again."""
        self.scheduler.let_go(number)

    def signal(self, number: int, which: int) -> None:
        """Its training thread runs the handler of this signal when it runs next; without one the process ends."""
        thread = self.training[number]
        if (handler := self.handlers.get((thread.process, which))) is None:
            self.kill(number)
        else:
            thread.interrupts.append(lambda: handler(which, None))

    def end_self(self, status: int) -> None:
        """End the process that calls this at once, with this status."""
        me = self.scheduler.current
        self.statuses[me.process] = status
        if me.process == self.training[me.rank].process:
            self.kill(me.rank)
        self.scheduler.dead.add(me.process)
        self.scheduler.check()

    def at(self, when: float, rank: int, turns: int, call: Callable[[], None]) -> None:
        """Call it then, or so many turns of this rank's threads later: most turns are where threads and ranks meet."""
        self.scheduler.at(when, lambda: self.scheduler.after_turns(rank, turns, call))

    @property
    def is_over(self) -> bool:
        """Whether no thread is left, nor comes."""
        scheduler = self.scheduler
        alive = (thread for thread in scheduler.threads if not thread.is_over and thread.process not in scheduler.dead)
        return not self.num_to_start and next(alive, None) is None

    @property
    def loops_are_over(self) -> bool:
        """Whether no training thread is left, nor comes."""
        return not self.num_to_start and not any(map(self.lives, self.training))

    def _run(self, number: int) -> None:
        process = self.training[number].process
        start = self.starts[number] = self.starts.get(number, -1) + 1
        try:
            torch_distributed.begin(self.network, number, start)
            self.results[number] = self.loop(Rank(number, self.size, self))
        except (Exception, SystemExit) as error:
            self.results[number] = error
        for finalizer in reversed(self.finalizers.pop(process, [])):  # as when a process ends
            finalizer()

    def finalize(
        self, of: object, call: Callable[..., object], *arguments: Any, **named: Any
    ) -> weakref.finalize[Any, Any]:
        """As ``weakref.finalize``, for when the process of this rank ends."""
        finalizer = weakref.finalize(of, call, *arguments, **named)
        finalizer.atexit = False
        self.finalizers.setdefault(self.scheduler.check().process, []).append(finalizer)
        return finalizer

    def free(self) -> None:
        """Let go of what killed processes have left behind: Python's collector does not see these references."""
        for finalizer in (own for of_one in self.finalizers.values() for own in of_one):
            finalizer.detach()
        for hook in self.hooks:
            hook.remove()


@dataclass(frozen=True)
class Run:
    """What came of it.

    ``results``: what each rank's loop returned, or what it raised. ``notes``: by rank, what it has noted. ``schedule``:
    a fingerprint of who ran when. ``seconds``: of virtual time.
    """

    results: tuple[Any, ...]
    notes: dict[int, list[dict[str, Any]]]
    schedule: str
    seconds: float
    num_switches: int


@contextmanager
def simulated(
    loop: Callable[[Rank], Any],
    *,
    ranks: int = 4,
    seed: int = 0,
    faults: Sequence[Fault] = (),
    longest_s: float = 600.0,
    backend: str = "gloo",
) -> Iterator[Job]:
    """A job for whoever calls `Job.run_for`, and kills, freezes and starts ranks in between; see `run_world`."""
    check_count("ranks", ranks, least=1)
    for fault in faults:
        if not 0 <= (of := getattr(fault, "rank", 0)) < ranks:
            raise ValueError(f"{fault}: there is no rank {of} of {ranks}")
    load_optional_parts()  # a rank that loaded one later would hold Python's lock of imports where threads take turns
    scheduler = Scheduler(seed, longest_s, process.RandomNumbers().switch)
    server = Server(scheduler)
    network = Network(scheduler, server, ranks, backend=backend)
    own = primitives(scheduler)
    job = Job(scheduler, network, server, loop, ranks, own["Thread"], notes={number: [] for number in range(ranks)})
    others = {
        **own,
        "process": scheduler.process,
        "end_process": job.end_self,
        "finalize": job.finalize,
        "has_sockets": False,
    }
    collects = gc.isenabled()
    gc.disable()  # or finalizers run on whichever thread is there
    try:
        with (
            world.enter(others),
            process.entered(scheduler, job.handlers),
            process.leaf_hooks_seen(job.hooks.append),
            torch_distributed.entered(network),
        ):
            for number in range(ranks):
                job.start(number)
            for fault in faults:
                fault.begin(job)
            try:
                yield job
            finally:
                with suppress(Ended):
                    scheduler.end()
    finally:
        job.free()
        if collects:
            gc.enable()


def run_world(
    loop: Callable[[Rank], Any],
    *,
    ranks: int = 4,
    seed: int = 0,
    faults: Sequence[Fault] = (),
    longest_s: float = 600.0,
    end_s: float = 60.0,
    backend: str = "gloo",
) -> Run:
    """Run ``loop(rank)`` on each of the ``ranks``, in one order of events, which ``seed`` draws.

    The loop is a training loop as it would be under torchrun, around `StagedDataParallel`; it
    takes time by ``rank.work(seconds)`` or ``time.sleep`` alone. Links are not measured here, as that needs sockets.
    ``backend``: of the default process group, as ranks see it; with "cuda:nccl2" members merge over a simulated nccl.
    Raises `Broken` if no thread can go on,
    if it is not over after ``longest_s`` seconds of virtual time, if a thread waits for others while it holds a lock,
    if a thread of straggle's ends by an error, if ranks' collectives differ, or if threads are left ``end_s`` after
    the loops; ``ValueError`` for a fault of a rank that there is not.
    """
    with simulated(loop, ranks=ranks, seed=seed, faults=faults, longest_s=longest_s, backend=backend) as job:
        return job.run_to_the_end(end_s)


def parameters_of(module: nn.Module, *, buffers: bool = False) -> str:
    """A fingerprint of all parameters, and ``buffers``: equal on two ranks if these are equal bit for bit."""
    digest = hashlib.sha256()
    for parameter in itertools.chain(module.parameters(), module.buffers() if buffers else ()):
        digest.update(parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


__all__ = ["Broken", "Job", "Rank", "Run", "parameters_of", "run_world", "simulated"]
