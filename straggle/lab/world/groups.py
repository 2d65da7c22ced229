"""Process groups in a simulated world: what gloo gives `torch.distributed` and straggle, between threads.

A collective is over when all ranks of its group have begun it and each link has had its delay. What a rank gives is
read as late as gloo may, when all have begun, and what it gets is written when it is over there: buffers that are used
too early show. Ranks whose collectives at the same place differ would hang, or sum what does not belong together: the
world is `Broken` then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from straggle.lab.world.scheduler import Scheduler, Thread
from straggle.lab.world.store import PrefixStore, Server

LOST = "Connection closed by peer"
LATE = "Timed out waiting for recv operation to complete"


class Network:
    """The links between ranks. ``delay_s``: the mean of one message's."""

    def __init__(
        self, world: Scheduler, server: Server, num_ranks: int, delay_s: float = 5e-4, backend: str = "gloo"
    ) -> None:
        self.world, self.server, self.num_ranks, self.delay_s = world, server, num_ranks, delay_s
        self.backend = backend  # of the default group, as its ranks see it
        self._cut: Counter[int] = Counter()  # ranks that nothing comes from or to, and for how many reasons
        self._held: list[Callable[[], None]] = []  # what comes when links are whole again
        self.meetings: dict[Hashable, Meeting] = {}
        self._counts: dict[Hashable, int] = {}

    def number(self, of: Hashable) -> int:
        """How often this was asked before."""
        self._counts[of] = number = self._counts.get(of, -1) + 1
        return number

    def send(self, ranks: Sequence[int], call: Callable[[], None]) -> None:
        """Call it when a message between these ranks has come."""

        def comes() -> None:
            if any(self._cut[rank] for rank in ranks):
                self._held.append(comes)
            else:
                call()

        self.world.after(self.world.random.expovariate(1 / self.delay_s), comes)

    def cut_off(self, rank: int) -> None:
        """Nothing comes from this rank or to it, the store's answers included."""
        self._cut[rank] += 1
        self.server.cut[rank] += 1

    def mend(self, rank: int) -> None:
        """What was held up by that comes now."""
        self._cut[rank] -= 1
        self.server.mend(rank)
        held, self._held = self._held, []
        for comes in held:
            comes()

    def lose(self, rank: int) -> None:
        """A rank's process is gone: its peers' connections to it close."""
        for meeting in self.meetings.values():
            if rank in meeting.ranks:
                self.send((), meeting.lose)


class Meeting:
    """A group as all of its ranks see it."""

    def __init__(self, network: Network, name: str, size: int) -> None:
        self.network, self.name, self.size = network, name, size
        self.ranks: dict[int, int] = {}  # by rank, its place
        self.waiters: list[Thread] = []
        self.operations: list[Operation] = []
        self.letters: dict[Hashable, Letter] = {}
        self.is_lost = False

    @property
    def ranks_in_order(self) -> list[int]:
        """By their places."""
        return sorted(self.ranks, key=lambda rank: self.ranks[rank])

    def lose(self) -> None:
        """Nothing comes through any more."""
        self.is_lost = True
        self.network.world.wake(self.waiters)
        begun: list[Operation | Letter] = [*self.operations, *self.letters.values()]
        for own in begun:
            own.fail(LOST)

    def operation(self, number: int, kind: Hashable) -> Operation:
        """Number so many; the same kind on all ranks."""
        if number == len(self.operations):
            self.operations.append(Operation(self, kind))
        operation = self.operations[number]
        if operation.kind != kind:
            raise self.network.world.broken(
                f"collective {number} of group {self.name} is {operation.kind} on one rank and {kind} on another"
            )
        return operation


@dataclass(frozen=True)
class Kind:
    """Which collective it is: ``of`` must be the same on all ranks.

    ``join`` gives what comes of all ranks' tensors, in order of their places, and ``take`` what a place gets of it.
    """

    of: Hashable
    join: Callable[[list[list[Tensor]]], Any]
    take: Callable[[Any, int], Sequence[Tensor]]


class Operation:
    """One collective of a group, and what each rank has given it."""

    def __init__(self, meeting: Meeting, kind: Hashable) -> None:
        self.kind = kind
        self._meeting = meeting
        self._given: dict[int, tuple[Work, Sequence[Tensor]]] = {}

    def begin(self, rank: int, kind: Kind, given: Sequence[Tensor], work: Work) -> None:
        """A rank gives these to it, and has the result in what ``work`` writes when it is over."""
        meeting = self._meeting
        self._given[rank] = work, given
        if meeting.is_lost:
            work.end(LOST)
        elif len(self._given) == meeting.size:
            everybody = meeting.ranks_in_order
            joined = kind.join([[tensor.detach().clone() for tensor in self._given[own][1]] for own in everybody])
            for place, own in enumerate(everybody):
                ends, result = self._given[own][0].end, kind.take(joined, place)
                meeting.network.send(everybody, lambda ends=ends, result=result: ends("", result))  # type: ignore[misc]

    def withdraw(self, rank: int) -> None:
        """The rank takes no part: if not all have begun it by now, it never ends."""
        self._given.pop(rank, None)

    def fail(self, why: str) -> None:
        """It never ends on those ranks where it has not."""
        for work, _ in self._given.values():
            work.end(why)


class Letter:
    """A message from one rank of a group to another."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._ends: list[tuple[int, Work, list[Tensor]]] = []

    def begin(self, rank: int, given: list[Tensor], written: list[Tensor], limit_s: float) -> Work:
        """One of the two begins it."""
        world = self._meeting.network.world
        work = Work(world, written, when_late=self._meeting.lose)
        self._ends.append((rank, work, given))
        world.after(limit_s, lambda: work.end(LATE))
        if self._meeting.is_lost:
            work.end(LOST)
        elif len(self._ends) == 2:
            sent = [tensor.detach().clone() for _, _, tensors in self._ends for tensor in tensors]
            for _, other, _ in self._ends:
                self._meeting.network.send([at for at, _, _ in self._ends], lambda other=other: other.end("", sent))  # type: ignore[misc]
        return work

    def fail(self, why: str) -> None:
        """It never comes."""
        for _, work, _ in self._ends:
            work.end(why)


class Work(dist.Work):
    """A collective that this rank has begun."""

    def __init__(
        self, world: Scheduler, written: Sequence[Tensor], when_late: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._world, self._written = world, written
        self._when_late = when_late  # as gloo closes the connection when a message is waited for in vain
        self._is_over, self.error = False, ""
        self._waiters: list[Thread] = []
        self._then: list[Callable[[], None]] = []

    def end(self, error: str, result: Sequence[Tensor] = ()) -> None:
        """It is over."""
        if self._is_over:
            return
        self._is_over, self.error = True, error
        with torch.no_grad():
            for to, merged in zip(self._written, result, strict=False):
                to.copy_(merged)
        self._world.wake(self._waiters)
        for call in self._then:
            call()

    def then(self, call: Callable[[], None]) -> None:
        """Call it when this is over; it is not yet."""
        self._then.append(call)

    def is_completed(self) -> bool:
        """Whether it is over; without a switch, as finalizers ask it."""
        return self._is_over

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Until it is over. Raises ``RuntimeError`` if it failed, or is not over by then."""
        if not self._is_over:
            if self._world.check().holds:
                raise self._world.broken("a thread waits for its peers while it holds a lock")
            self._world.wait(self._waiters, timeout.total_seconds() or None)
        if not self._is_over:
            self._when_late()
            raise RuntimeError("[Gloo] Timed out: the work is not over")
        if self.error:
            raise RuntimeError(f"[Gloo] {self.error}")
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """For DDP, which waits for it where no other thread of the world could run: so its thread waits here."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([*self._written])
        return future


_ProcessGroup: Any = dist.ProcessGroup  # whose methods have other arguments in each version of torch


class Group(_ProcessGroup):  # type: ignore[misc]
    """One rank's end of a group, with gloo's methods. ``connects``: it waits here for all others."""

    _device_types = [torch.device("cpu")]  # noqa: RUF012

    def __init__(
        self, network: Network, name: str, place: int, size: int, form_s: float, *, connects: bool = True
    ) -> None:
        super().__init__(place, size)
        self._world, self._rank = network.world, network.world.current.rank
        self._place, self._number = place, 0
        self.options = SimpleNamespace(_timeout=timedelta(seconds=form_s))
        self._letters: dict[Hashable, int] = {}
        self._begun: list[Work] = []  # that are not over
        self._meeting = meeting = network.meetings.setdefault(name, Meeting(network, name, size))
        meeting.ranks[self._rank] = place
        self._world.wake(meeting.waiters)
        if connects:
            self._connect(form_s)

    def _connect(self, form_s: float) -> None:
        meeting, until = self._meeting, self._world.now + form_s
        while len(meeting.ranks) < meeting.size and not meeting.is_lost and self._world.now < until:
            self._world.wait(meeting.waiters, until - self._world.now)
        if len(meeting.ranks) < meeting.size or meeting.is_lost:
            raise RuntimeError(f"[Gloo] Gloo connectFullMesh failed with timed out connecting in {meeting.name}")

    # -- what torch asks of a group

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        """As torch numbers them."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What it is for."""
        return self._description

    def _get_backend(self, _device: Any) -> Group:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Collectives are compared by their places here."""

    def _get_sequence_number_for_group(self) -> int:
        return self._number

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    set_timeout = _set_default_timeout

    def abort(self) -> None:
        """gloo has none."""

    def shutdown(self) -> None:
        """Nothing is to be freed."""

    def supports_tensor_alloc(self, _device: Any) -> bool:
        """gloo has no memory of its own for tensors."""
        return False

    # -- collectives

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        """Of all ranks, in place."""
        kind = _reduction("all_reduce", options, tensors)
        return self._begin(Kind(kind.of, kind.join, lambda merged, _: merged), tensors, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        """Of all ranks, on one."""
        kind, root = _reduction("reduce", options, tensors), options.rootRank
        return self._begin(Kind(kind.of, kind.join, lambda merged, at: merged if at == root else ()), tensors, tensors)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], _options: Any = None) -> Work:
        """All of them, in order of the places."""
        kind = Kind(_of("all_gather", tensors), lambda parts: [part[0] for part in parts], _whole)
        return self._begin(kind, tensors, outputs[0])

    def all_gather_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> Work:
        """The same into one tensor."""
        return self.allgather([list(output.chunk(self.size()))], [tensor], options)

    def all_gather_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], options: Any = None) -> Work:
        """The same of several tensors."""
        works = [self.all_gather_single(*pair, options) for pair in zip(outputs, tensors, strict=True)]
        return self._all_of(works)

    def reduce_scatter(self, outputs: list[Tensor], parts: list[list[Tensor]], options: Any = None) -> Work:
        """Each place has the sum of what is for it."""
        kind = _reduction("reduce_scatter", options, parts[0])
        return self._begin(Kind(kind.of, kind.join, lambda merged, at: [merged[at]]), parts[0], outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> Work:
        """The same of one tensor."""
        return self.reduce_scatter([output], [list(tensor.chunk(self.size()))], options)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], options: Any = None
    ) -> Work:
        """The same of several tensors."""
        works = [self.reduce_scatter_single(*pair, options) for pair in zip(outputs, tensors, strict=True)]
        return self._all_of(works)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        """That of one."""
        root = options.rootRank
        return self._begin(Kind(_of("broadcast", tensors, root), lambda parts: parts[root], _whole), tensors, tensors)

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], options: Any) -> Work:
        """All of them, on one."""
        kind = Kind(_of("gather", tensors, options.rootRank), lambda parts: [part[0] for part in parts], _whole)
        return self._begin(kind, tensors, outputs[0] if outputs else [])

    def scatter(self, outputs: list[Tensor], parts: list[list[Tensor]], options: Any) -> Work:
        """Each place has what one gives for it."""
        root = options.rootRank
        kind = Kind(_of("scatter", outputs, root), lambda given: given[root], lambda given, at: [given[at]])
        return self._begin(kind, parts[0] if parts else [], outputs)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, to: list[int] | None, of: list[int] | None, _options: Any = None
    ) -> Work:
        """Each place has what all others give for it; ``to`` and ``of``: rows of each in output and input."""
        given = torch.split(tensor, of) if of else tensor.chunk(self.size())
        written = torch.split(output, to) if to else output.chunk(self.size())
        kind = Kind(("all_to_all", tensor.dtype), lambda parts: parts, lambda parts, at: [part[at] for part in parts])
        return self._begin(kind, given, written)

    # as older versions of torch name them
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def barrier(self, _options: Any = None, **_: Any) -> Work:
        """Ends when all that was begun before is over, on all ranks: a rank comes to it when its own is."""
        return self._begin(Kind(("barrier",), lambda _: (), _whole), (), (), after=self._not_over())

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        """To the rank at this place; over when it has come."""
        return self._letter(self._place, to, tag).begin(self._rank, tensors, [], self._limit_s)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        """From the rank at this place."""
        return self._letter(source, self._place, tag).begin(self._rank, [], tensors, self._limit_s)

    @property
    def _limit_s(self) -> float:
        return float(self.options._timeout.total_seconds())

    def _letter(self, source: int, to: int, tag: int) -> Letter:
        self._world.switch()
        key = source, to, tag
        number = self._letters[key] = self._letters.get(key, -1) + 1
        return self._meeting.letters.setdefault((*key, number), Letter(self._meeting))

    def _begin(
        self, kind: Kind, given: Sequence[Tensor], written: Sequence[Tensor], after: Sequence[Work] = ()
    ) -> Work:
        number, self._number = self._number, self._number + 1  # as the thread that is here began it, whoever is next
        work = Work(self._world, written)
        self._begun = [*self._not_over(), work]
        self._world.switch()
        operation = self._meeting.operation(number, kind.of)
        self._world.after(self._limit_s, lambda: work.end(LATE))
        when_over(after, work, lambda: operation.begin(self._rank, kind, given, work))
        return work

    def _not_over(self) -> list[Work]:
        return [work for work in self._begun if not work.is_completed()]

    def _all_of(self, works: list[Work]) -> Work:
        for work in works[:-1]:
            work.wait()
        return works[-1]


def when_over(works: Sequence[Work], work: Work, call: Callable[[], None]) -> None:
    """Call it when all ``works`` are over; if one failed, so does ``work``."""
    left = [own for own in works if not own.is_completed()]
    failed = [own.error for own in works if own.is_completed() and own.error]
    if failed:
        work.end(failed[0])
    elif left:
        left[0].then(lambda: when_over(works, work, call))
    else:
        call()


def _of(name: str, tensors: Sequence[Tensor], *more: Hashable) -> Hashable:
    return (name, tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors), *more)


def _whole(joined: Sequence[Tensor], _place: int) -> Sequence[Tensor]:
    return joined


def _reduction(name: str, options: Any, tensors: Sequence[Tensor]) -> Kind:
    """The sum of each place's tensors, or what ``options`` say, as all have it."""
    by = "SUM" if options is None else options.reduceOp.op.name
    return Kind(_of(name, tensors, by), lambda parts: [_REDUCE[by](each) for each in zip(*parts, strict=True)], _whole)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


_REDUCE: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "SUM": _sum,
    "AVG": lambda tensors: _sum(tensors) / len(tensors),
    "MAX": lambda tensors: reduce(torch.maximum, tensors),
    "MIN": lambda tensors: reduce(torch.minimum, tensors),
    "PRODUCT": lambda tensors: reduce(torch.mul, tensors),
    "BAND": lambda tensors: reduce(torch.bitwise_and, tensors),
    "BOR": lambda tensors: reduce(torch.bitwise_or, tensors),
}


def gloo_of(network: Network) -> Any:
    """What stands in the place of ``ProcessGroupGloo``."""

    class Gloo(Group):
        _Options = SimpleNamespace

        def __init__(
            self, store: Any, place: int, size: int, options: Any = None, *, timeout: timedelta | None = None, **_: Any
        ) -> None:
            form_s = (options._timeout if timeout is None else timeout).total_seconds()
            is_default = dist.distributed_c10d._world.default_pg is None  # whose connections are made when needed
            super().__init__(network, path_of(store), place, size, form_s, connects=not is_default)

        @staticmethod
        def create_device(**_: Any) -> str:
            return "a link"

        create_default_device = create_device

    return Gloo


def path_of(store: Any) -> str:
    """Where in the store: the prefixes."""
    parts = []
    while isinstance(store, PrefixStore):
        parts.append(store.prefix)
        store = store.underlying_store
    return "/".join(reversed(parts))
