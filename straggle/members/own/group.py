"""The default process group of `torch.distributed` as the members' loop sees it: it hands on to those that are there.

``size()`` is how many ranks make the next collective, and ``rank()`` this one's place among them; on a rank that is no
member, the number of the job's ranks and its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from straggle import world
from straggle.members.own import collectives
from straggle.members.own.collectives import Call, Collective
from straggle.members.own.in_flight import InFlight

_ProcessGroup: Any = dist.ProcessGroup  # whose methods have other arguments in each version of torch
_Backend: Any = torch._C._distributed_c10d.Backend


class OwnWork(dist.Work):
    """A collective of the loop's own."""

    def __init__(self, calls: InFlight, call: Call, written: Sequence[Tensor]) -> None:
        super().__init__()
        self._calls, self._call, self._written = calls, call, written

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Until it is over. Raises `MembersChanged` if it has to be repeated."""
        self._calls.wait(self._call, max(0.0, timeout.total_seconds()))
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._calls.has_ended(self._call)

    def is_success(self) -> bool:
        """Whether it is over, and did not fail."""
        return self.is_completed() and self._call.error is None

    def result(self) -> list[Tensor]:
        """What it has written."""
        return [*self._written]

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Waits here: a thread of its own for each future would wait no shorter."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([*self._written])
        return future


class LoopGroup(_ProcessGroup):  # type: ignore[misc]
    """Takes the place of ``of_job``, the group of all ranks that the job began with, until `give_back`."""

    def __init__(self, of_job: Any, calls: InFlight) -> None:
        super().__init__(of_job.rank(), of_job.size())
        self.of_job, self._calls = of_job, calls
        self.options = of_job._get_backend(of_job._device_types[0]).options
        for device in of_job._device_types:  # DDP's C++ asks for a backend, and calls the methods here all the same
            if isinstance(backend := of_job._get_backend(device), _Backend):
                self._register_backend(device, _ProcessGroup.BackendType.GLOO, backend)
                self._set_default_backend(_ProcessGroup.BackendType.GLOO)

    # -- what torch asks of a group

    def size(self) -> int:
        """How many ranks make the next collective."""
        ranks = self._calls.ranks
        return int(self.of_job.size()) if ranks is None else len(ranks)

    def rank(self) -> int:
        """This rank's place among them."""
        ranks, own = self._calls.ranks, int(self.of_job.rank())
        return own if ranks is None else ranks.index(own)

    getSize, getRank = size, rank  # noqa: N815

    @property
    def _device_types(self) -> Any:
        return self.of_job._device_types

    @property
    def group_name(self) -> str:
        """As torch knows the group of the job."""
        return str(self.of_job.group_name)

    @property
    def group_desc(self) -> str:
        """What it is for."""
        return str(self.of_job.group_desc)

    def name(self) -> str:
        """The backend's."""
        return str(self.of_job.name())

    getBackendName = name  # noqa: N815

    def _get_backend(self, _device: Any) -> LoopGroup:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Collectives are counted from step to step."""

    def _get_sequence_number_for_group(self) -> int:
        return self._calls.count

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.of_job._get_backend(self.of_job._device_types[0])._set_default_timeout(timeout)

    set_timeout = _set_default_timeout

    def supports_tensor_alloc(self, _device: Any) -> bool:
        """gloo has no memory of its own for tensors."""
        return False

    def abort(self) -> None:
        """gloo has none."""

    def shutdown(self) -> None:
        """The job's own group is in torch's list, too."""

    # -- collectives

    def _begin(self, collective: Collective, written: Sequence[Tensor] = ()) -> OwnWork:
        return OwnWork(self._calls, self._calls.begin(collective), written)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> OwnWork:
        """Of all ranks, in place."""
        return self._begin(collectives.all_reduce(tensors, _reduced(options)), tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any = None) -> OwnWork:
        """The same of several tensors."""
        return self.allreduce(tensors, options)

    def reduce(self, tensors: list[Tensor], options: Any) -> OwnWork:
        """Of all ranks, on one."""
        return self._begin(collectives.reduce(tensors, options), tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> OwnWork:
        """That of one rank."""
        return self._begin(collectives.broadcast(tensors, options), tensors)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], _options: Any = None) -> OwnWork:
        """All of them, in order of the places."""
        return self._begin(collectives.all_gather(outputs, tensors), outputs[0])

    def allgather_coalesced(self, outputs: list[list[Tensor]], tensors: list[Tensor], _options: Any = None) -> OwnWork:
        """The same of several tensors; ``outputs`` are lists of them, one for each place."""
        return self._begin(collectives.all_gather(list(zip(*outputs, strict=True)), tensors))

    def all_gather_single(self, output: Tensor, tensor: Tensor, _options: Any = None) -> OwnWork:
        """All of them, in one tensor."""
        return self._begin(collectives.all_gather_single([output], [tensor]), [output])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], _options: Any = None
    ) -> OwnWork:
        """The same of several tensors."""
        return self._begin(collectives.all_gather_single(outputs, tensors), outputs)

    def reduce_scatter(self, outputs: list[Tensor], parts: list[list[Tensor]], options: Any = None) -> OwnWork:
        """Each place has the sum of what is for it."""
        return self._begin(collectives.reduce_scatter(outputs, parts, _reduced(options)), outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> OwnWork:
        """The same of one tensor."""
        return self._begin(collectives.reduce_scatter_single([output], [tensor], _reduced(options)), [output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], options: Any = None
    ) -> OwnWork:
        """The same of several tensors."""
        return self._begin(collectives.reduce_scatter_single(outputs, tensors, _reduced(options)), outputs)

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], options: Any) -> OwnWork:
        """All of them, on one rank."""
        return self._begin(collectives.gather(outputs, tensors[0], options))

    def scatter(self, outputs: list[Tensor], parts: list[list[Tensor]], options: Any) -> OwnWork:
        """Each place has what one rank gives for it."""
        return self._begin(collectives.scatter(outputs[0], parts, options), outputs)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, to: list[int] | None, of: list[int] | None, options: Any = None
    ) -> OwnWork:
        """Each place has what all others give for it."""
        options = world.dist.AllToAllOptions() if options is None else options
        return self._begin(collectives.all_to_all_single(output, tensor, to or [], of or [], options), [output])

    # as older versions of torch name them
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def alltoall(self, _outputs: list[Tensor], _tensors: list[Tensor], _options: Any = None) -> OwnWork:
        """gloo has none."""
        raise RuntimeError("gloo has no all_to_all of lists, only all_to_all_single")

    def barrier(self, opts: Any = None) -> OwnWork:  # noqa: ARG002
        """Ends when all ranks have come to it."""
        return self._begin(collectives.barrier())

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:  # noqa: ARG002
        """The same, within a time."""
        self.barrier().wait(timeout)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        """To the rank at this place."""
        return cast(dist.Work, self.of_job.send(tensors, self._of_job(to), tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """From the rank at this place."""
        return cast(dist.Work, self.of_job.recv(tensors, self._of_job(source), tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """From any rank."""
        return cast(dist.Work, self.of_job.recv_anysource(tensors, tag))

    def _of_job(self, place: int) -> int:
        ranks = self._calls.ranks
        return place if ranks is None else ranks[place]


def _reduced(options: Any) -> Any:
    return world.dist.AllreduceOptions() if options is None else options


def take_place(calls: InFlight) -> LoopGroup | None:
    """Put a group that follows the members in the place of the default one; ``None`` if there is one already."""
    known: Any = world.dist.distributed_c10d._world
    if isinstance(old := known.default_pg, LoopGroup):
        return None
    new = LoopGroup(old, calls)
    for held in (known.pg_map, known.pg_names, known.pg_backend_config, known.pg_to_tag):
        if old in held:
            held[new] = held[old]
    known.pg_group_ranks[new] = _Places(new)
    _swap(old, new)
    return new


def give_back(group: LoopGroup) -> None:
    """Put the group that the job began with in its place again."""
    known: Any = world.dist.distributed_c10d._world
    if known.default_pg is not group:  # destroyed meanwhile
        return
    _swap(group, group.of_job)
    for held in (known.pg_map, known.pg_names, known.pg_backend_config, known.pg_to_tag, known.pg_group_ranks):
        held.pop(group, None)


def _swap(old: Any, new: Any) -> None:
    c10d: Any = world.dist.distributed_c10d
    known = c10d._world
    for tagged in known.tags_to_pg.values():
        tagged[:] = [new if own is old else own for own in tagged]
    known.default_pg = new
    with suppress(RuntimeError, ValueError):  # of another thread's, in a simulated world
        c10d._unregister_process_group(new.group_name)
    with suppress(RuntimeError, ValueError):
        c10d._register_process_group(new.group_name, new)


class _Places(Mapping[int, int]):
    """For each of the default group's ranks its place there, which it is; their number changes."""

    def __init__(self, group: LoopGroup) -> None:
        self._group = group

    def __getitem__(self, rank: int) -> int:
        return range(self._group.size())[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._group.size()))

    def __len__(self) -> int:
        return self._group.size()
