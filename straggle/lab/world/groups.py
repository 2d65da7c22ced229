"""Process groups in a simulated world: what `torch.distributed` and gloo give straggle, between threads.

A collective is over when all ranks of its group have begun it and each link has had its delay. What a rank gives is
read as late as gloo may, when all have begun, and what it gets is written when it is over there: buffers that are used
too early show. Ranks whose collectives at the same place differ would hang, or sum what does not belong together: the
world is `Broken` then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from straggle.lab.world.scheduler import Scheduler, Thread
from straggle.lab.world.store import PrefixStore, Server, Store

LOST = "Connection closed by peer"
LATE = "Timed out waiting for recv operation to complete"


class Network:
    """The links between ranks. ``delay_s``: the mean of one message's."""

    def __init__(self, world: Scheduler, server: Server, num_ranks: int, delay_s: float = 5e-4) -> None:
        self.world, self.server, self.num_ranks, self.delay_s = world, server, num_ranks, delay_s
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


class Operation:
    """One collective of a group, and what each rank has given it."""

    def __init__(self, meeting: Meeting, kind: Hashable) -> None:
        self.kind = kind
        self._meeting = meeting
        self._given: dict[int, tuple[Work, list[Tensor]]] = {}

    def begin(
        self,
        rank: int,
        given: list[Tensor],
        written: list[Tensor],
        result: Callable[[list[list[Tensor]]], list[Tensor]],
        limit_s: float,
    ) -> Work:
        """A rank begins it: it gives these, and has the result in those when it is over."""
        meeting, world = self._meeting, self._meeting.network.world
        work = Work(world, written)
        self._given[rank] = work, given
        world.after(limit_s, lambda: work.end(LATE))
        if meeting.is_lost:
            work.end(LOST)
        elif len(self._given) == meeting.size:
            parts = [[tensor.detach().clone() for tensor in self._given[rank][1]] for rank in meeting.ranks_in_order]
            merged = result(parts)
            everybody = tuple(self._given)
            for other, _ in self._given.values():
                meeting.network.send(everybody, lambda other=other: other.end("", merged))  # type: ignore[misc]
        return work

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
        work = Work(world, written)
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


class Work:
    """A collective that this rank has begun."""

    def __init__(self, world: Scheduler, written: list[Tensor]) -> None:
        self._world, self._written = world, written
        self._is_over, self._error = False, ""
        self._waiters: list[Thread] = []

    def end(self, error: str, result: Sequence[Tensor] = ()) -> None:
        """It is over."""
        if self._is_over:
            return
        self._is_over, self._error = True, error
        with torch.no_grad():
            for to, merged in zip(self._written, result, strict=False):
                to.copy_(merged)
        self._world.wake(self._waiters)

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
            raise RuntimeError("[Gloo] Timed out: the work is not over")
        if self._error:
            raise RuntimeError(f"[Gloo] {self._error}")
        return True


class Group:
    """One rank's end of a group, with gloo's methods."""

    def __init__(self, network: Network, name: str, place: int, size: int, form_s: float) -> None:
        self._world, self._rank = network.world, network.world.current.rank
        self.group_name, self.group_desc = name, "straggle"
        self._place, self._number, self._limit_s = place, 0, form_s
        self._letters: dict[Hashable, int] = {}
        self._meeting = meeting = network.meetings.setdefault(name, Meeting(network, name, size))
        meeting.ranks[self._rank] = place
        until = self._world.now + form_s
        self._world.wake(meeting.waiters)
        while len(meeting.ranks) < size and not meeting.is_lost and self._world.now < until:
            self._world.wait(meeting.waiters, until - self._world.now)
        if len(meeting.ranks) < size or meeting.is_lost:
            raise RuntimeError(f"[Gloo] Gloo connectFullMesh failed with timed out connecting in {name}")

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._limit_s = timeout.total_seconds()

    def allreduce(self, tensors: list[Tensor]) -> Work:
        """Sum, in place."""
        shape = ("all_reduce", tuple(tensors[0].shape), tensors[0].dtype)
        return self._begin(shape, tensors, tensors, lambda parts: [_sum([part[0] for part in parts])])

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor]) -> Work:
        """All of them, in order of the places."""
        shape = ("all_gather", tuple(tensors[0].shape), tensors[0].dtype)
        return self._begin(shape, tensors, outputs[0], lambda parts: [part[0] for part in parts])

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        """That of one."""
        source = options.rootRank
        shape = ("broadcast", tuple(tensors[0].shape), tensors[0].dtype, source)
        return self._begin(shape, tensors, tensors, lambda parts: [parts[source][0]])

    def barrier(self) -> Work:
        """Wait for all."""
        return self._begin(("barrier",), [], [], lambda _: [])

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        """To the rank at this place; over when it has come."""
        return self._letter(self._place, to, tag).begin(self._rank, tensors, [], self._limit_s)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        """From the rank at this place."""
        return self._letter(source, self._place, tag).begin(self._rank, [], tensors, self._limit_s)

    def _letter(self, source: int, to: int, tag: int) -> Letter:
        self._world.switch()
        key = source, to, tag
        number = self._letters[key] = self._letters.get(key, -1) + 1
        return self._meeting.letters.setdefault((*key, number), Letter(self._meeting))

    def _begin(
        self, kind: Hashable, given: list[Tensor], written: list[Tensor], result: Callable[..., list[Tensor]]
    ) -> Work:
        number, self._number = self._number, self._number + 1  # as the thread that is here began it, whoever is next
        self._world.switch()
        operation = self._meeting.operation(number, kind)
        return operation.begin(self._rank, given, written, result, self._limit_s)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


class Distributed:
    """What straggle asks of `torch.distributed`, for ranks that are threads."""

    def __init__(self, network: Network) -> None:
        self._network, self._world = network, network.world
        parent = SimpleNamespace(
            _device_types=["cpu"],
            _get_backend=lambda _: SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=1800))),
        )
        self.group = SimpleNamespace(WORLD=parent)
        self._stores: dict[int, Store] = {}
        self.PrefixStore, self.TCPStore, self.FileStore = PrefixStore, dist.TCPStore, dist.FileStore  # type: ignore[attr-defined]
        self.BroadcastOptions, self.Backend = dist.BroadcastOptions, dist.Backend
        self.distributed_c10d = SimpleNamespace(
            _world=SimpleNamespace(pg_map={}),
            _get_default_store=self._store,
            _set_pg_timeout=lambda timeout, group: group._set_default_timeout(timeout),
            _abort_process_group=lambda _: None,
        )
        self.ProcessGroupGloo = _gloo_of(network)

    def _store(self) -> Store:
        return self._stores.setdefault(self.get_rank(), Store(self._network.server))

    def is_available(self) -> bool:
        """It is."""
        return True

    def is_initialized(self) -> bool:
        """It is."""
        return True

    def get_rank(self, _group: Any = None) -> int:
        """That of the thread which asks."""
        return self._world.current.rank

    def get_world_size(self, _group: Any = None) -> int:
        """All ranks."""
        return self._network.num_ranks

    def get_process_group_ranks(self, _group: Any) -> list[int]:
        """All ranks."""
        return list(range(self._network.num_ranks))

    def get_backend_config(self, _group: Any) -> str:
        """gloo."""
        return "cpu:gloo"

    def new_group(self, ranks: Sequence[int], timeout: timedelta, *_: Any, **__: Any) -> Group:
        """A group of all these, which call this in the same order."""
        rank = self.get_rank()
        name = f"group {self._network.number((tuple(ranks), rank))} of {list(ranks)}"
        return Group(self._network, name, list(ranks).index(rank), len(ranks), timeout.total_seconds())

    def all_gather(self, tensors: list[Tensor], tensor: Tensor, *, group: Group, async_op: bool) -> Work:  # noqa: ARG002
        """Begin it."""
        return group.allgather([tensors], [tensor])

    def broadcast(self, tensor: Tensor, *, group: Group, group_src: int, async_op: bool) -> Work:  # noqa: ARG002
        """Begin it."""
        return group.broadcast([tensor], SimpleNamespace(rootRank=group_src))

    def barrier(self, group: Group, async_op: bool) -> Work:  # noqa: ARG002
        """Begin it."""
        return group.barrier()

    def destroy_process_group(self, group: Group) -> None:
        """Nothing is to be freed."""


def _gloo_of(network: Network) -> Any:
    """What stands in the place of ``ProcessGroupGloo``."""

    class Gloo(Group):
        _Options = SimpleNamespace

        def __init__(self, store: Any, place: int, size: int, options: Any) -> None:
            super().__init__(network, _path(store), place, size, options._timeout.total_seconds())

        @staticmethod
        def create_device(**_: Any) -> str:
            return "a link"

        create_default_device = create_device

    return Gloo


def _path(store: Any) -> str:
    parts = []
    while isinstance(store, PrefixStore):
        parts.append(store.prefix)
        store = store.underlying_store
    return "/".join(reversed(parts))
