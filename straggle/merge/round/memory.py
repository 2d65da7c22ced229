"""The memory of a round: flat buffers, the few numbers beside gradients, and gradients that the loop may still hold.

A flat buffer of gradients lies with the few numbers that belong to it, and both travel in the same messages. An
operation on a tensor costs ten times as much as on plain memory, or more, so the host has these numbers as that.
"""

from __future__ import annotations

import ctypes
import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from straggle.merge.wire.groups import ProcessGroups
from straggle.policies.network.merge_time import largest_message_bytes

ALIGN = 16  # elements: each gradient starts on a cache line


@dataclass(frozen=True)
class Placed:
    """Where one flat buffer lies: ``gradients``, ``numbers`` of float32 or finer, and the ``messages`` that bring both.

    ``wire``: the gradients as they travel, if that is not as they are. ``memory`` begins with the gradients.
    """

    gradients: Tensor
    numbers: Tensor
    messages: tuple[Tensor, ...]
    wire: Tensor | None
    memory: Tensor

    def with_numbers(self, count: int) -> tuple[Tensor, ...]:
        """The gradients and the first of the numbers; one tensor if they lie together."""
        if len(self.memory) > (end := len(self.gradients)):
            return (self.memory[: end + count],)
        return (self.gradients, self.numbers[:count]) if count else (self.gradients,)


class NumbersWithData:
    """Numbers lie at the end of their gradients' buffer if that is exact, and travel in its message.

    Each message more would cost one latency more. If gradients are of less than fp32, or are rounded to ``wire_dtype``
    as they travel, the numbers go beside them, over the same group.
    """

    def __init__(self, num_replicas: int, wire_dtype: torch.dtype | None = None) -> None:
        self._num_replicas, self._wire_dtype = num_replicas, wire_dtype

    def place(self, numel: int, num_numbers: int, dtype: torch.dtype, device: torch.device) -> Placed:
        """Zeros for the gradients of one flat buffer, and for the numbers that belong to it."""
        rounded = dtype is torch.float32 and self._wire_dtype is not None
        together = dtype in (torch.float32, torch.float64) and not rounded
        memory = torch.zeros(numel + (num_numbers if together else 0), dtype=dtype, device=device)
        numbers = memory[numel:] if together else torch.zeros(num_numbers, device=device)
        wire = torch.zeros(numel, dtype=self._wire_dtype, device=device) if rounded else None
        tensors = cut(memory if wire is None else wire, self._num_replicas)
        beside = () if together or not num_numbers else (numbers,)
        return Placed(memory[:numel], numbers, (*tensors, *beside), wire, memory)


def cut(data: Tensor, num_replicas: int) -> tuple[Tensor, ...]:
    """One message, or as many equal ones as it takes for none to pay more latencies than a small one."""
    if not data.numel():  # of parameters without elements
        return ()
    data = (torch.view_as_real(data) if data.is_complex() else data).view(-1)  # nccl has no complex numbers
    count = 1 if data.is_cuda else math.ceil(data.nbytes / largest_message_bytes(num_replicas))
    size = -(-data.numel() // (count * ALIGN)) * ALIGN
    return tuple(data[start : start + size] for start in range(0, data.numel(), size))


def between_parts(data: Tensor, parts: Iterable[tuple[int, int]]) -> tuple[Tensor, ...]:
    """What lies between these parts, each from its start to its end, in order."""
    edges = [0, *chain.from_iterable(parts), data.numel()]
    return tuple(data[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end)


def view_of(data: Tensor, start: int, like: Tensor) -> Tensor:
    """A gradient's place in the buffer, in the memory format of ``like``.

    For autograd it is no view of the buffer: `detach_` works, and its version is its own.
    """
    for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if like.dim() == dims and like.is_contiguous(memory_format=layout):
            return data.as_strided(like.size(), like.stride(), start).data
    return data[start : start + like.numel()].view(like.shape).data


_FORMATS = {torch.float32: "f", torch.float64: "d"}


class PlainNumbers:
    """The elements of a contiguous tensor of float32 or float64; on another device than the CPU, by its operations."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor  # holds the memory
        self._format = _FORMATS[tensor.dtype]
        self._bytes, self._memory = memoryview(b""), None
        if tensor.device.type == "cpu":
            raw = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
            self._bytes = memoryview(raw).cast("B")
            self._memory = self._bytes.cast(self._format)  # type: ignore[call-overload]

    def fill(self, value: float) -> None:
        """Set all of them."""
        if self._memory is None:
            self._tensor.fill_(value)
        else:
            self._memory[:] = array(self._format, [value]) * len(self._memory)

    def write(self, numbers: array[float]) -> None:
        """Set the first ones, from float32."""
        if self._memory is None:
            # they are read at once, into memory of the driver: no wait for what the device has to do before
            self._tensor[: len(numbers)].copy_(torch.frombuffer(numbers, dtype=torch.float32), non_blocking=True)
        else:
            same = numbers if self._format == "f" else array(self._format, numbers)
            self._memory[: len(numbers)] = same

    def copy(self, number: int) -> array[float]:
        """As many of the first ones, as float32."""
        if self._memory is None:
            return array("f", self._tensor[:number].tolist())
        found: array[float] = array(self._format)
        found.frombytes(self._bytes[: number * found.itemsize])
        return found if self._format == "f" else array("f", found)

    def tolist(self) -> list[float]:
        """All of them."""
        numbers: Any = self._tensor if self._memory is None else self._memory
        return list(numbers.tolist())


class RowNumbers:
    """The rows of all ranks: beside the last bucket, or where `use` has them until the step's end. ``length``: of all.

    ``numbers``: what lies there, of which the rows are the first.
    """

    def __init__(self, num_replicas: int, length: int) -> None:
        self.length, self._num_replicas = length, num_replicas
        self.rank = -1  # whose row was written
        self._own = array("f", bytes(4 * length))  # zeros but for this rank's row
        self.place(torch.zeros(length))

    def place(self, numbers: Tensor) -> None:
        """This is where they lie in each step."""
        self._usual = numbers
        self.use(numbers)

    def use(self, numbers: Tensor) -> None:
        """Where they lie from here on to the end of the step."""
        self.numbers, self._plain = numbers, PlainNumbers(numbers)
        self.table = numbers[: self.length].view(self._num_replicas, -1)

    @property
    def are_apart(self) -> bool:
        """Whether they lie somewhere else than in each step."""
        return self.numbers is not self._usual

    def use_usual(self) -> None:
        """They lie where they do in each step."""
        if self.are_apart:
            self.use(self._usual)

    def begin(self) -> None:
        """A new step begins."""
        self.rank = -1
        self.use_usual()

    def write(self, rank: int, row: array[float]) -> None:
        """This rank's."""
        self.rank = rank
        self._own[rank * len(row) : (rank + 1) * len(row)] = row
        self._plain.write(self._own)

    def copy(self) -> array[float]:
        """One after the other, for who goes on when the memory is used again."""
        return self._plain.copy(self.length)


_num_references = sys.getrefcount
_num_tensors = torch._C._storage_Use_Count


class Lent:
    """The gradients of one bucket, and the memory that they lie in; made while nobody else has any of them.

    Who keeps ``p.grad`` has one more reference to that tensor; who keeps a part of it, or ``p.grad.detach()``, has one
    more tensor in its memory; and where ``p.grad.data`` was set, there is one tensor less in it.
    """

    def __init__(self, gradients: Iterable[Tensor], memory: Iterable[Tensor]) -> None:
        self.gradients = tuple(gradients)
        self._storages = tuple(tensor.untyped_storage()._cdata for tensor in memory)
        references, *tensors = self._count()
        # the buffers have no reference to them any more then
        self._when_set_aside = references - len(self.gradients), *tensors
        self._when_used = self._when_set_aside

    def begin_use(self) -> None:
        """The buffers have these from here on, and all that they have in this memory."""
        self._when_used = self._count()

    @property
    def are_back(self) -> bool:
        """While they are in use, and no parameter has one of them: whether nobody else has any."""
        return self._count() == self._when_used

    @property
    def are_free(self) -> bool:
        """The same of what is not in use."""
        return self._count() == self._when_set_aside

    def _count(self) -> tuple[int, ...]:
        """Two operations for each bucket, and one reference count for each gradient."""
        return sum(map(_num_references, self.gradients)), *map(_num_tensors, self._storages)


@dataclass(frozen=True)
class Flat:
    """The ``gradients`` of one bucket that share a dtype and a device; ``tail``: their weights and presence flags.

    The tail is fp32 or finer. ``wire``: the gradients as they travel, if that is not as they are.
    ``plain_tail``: the tail as plain memory. ``large`` of the parameters are summed as they are copied, to see whether
    they are finite; ``between`` is the rest. ``both``: gradients and tail, one tensor if they lie together.
    """

    parameters: tuple[int, ...]
    gradients: Tensor
    tail: Tensor
    messages: tuple[Tensor, ...]
    wire: Tensor | None
    plain_tail: PlainNumbers
    large: tuple[int, ...]
    between: tuple[Tensor, ...]
    both: tuple[Tensor, ...]

    def all_reduce(self, groups: ProcessGroups) -> list[dist.Work]:
        """Send its messages."""
        return [groups.data.all_reduce(tensor) for tensor in self.messages]

    def broadcast(self, groups: ProcessGroups, source: int) -> list[dist.Work]:
        """The same, from the rank at place ``source``."""
        return [groups.data.broadcast(tensor, source) for tensor in self.messages]


@dataclass(frozen=True)
class BucketMemory:
    """What one bucket lies in. ``rows``: what of it is telemetry, if it is the last one; empty otherwise."""

    flats: list[Flat]
    lent: Lent
    rows: Tensor

    @staticmethod
    def new(flats: list[Flat], views: Sequence[Tensor], rows: Tensor) -> BucketMemory:
        """That of a bucket which nobody has used."""
        own = (views[index] for flat in flats for index in flat.parameters)  # no list: that would have them
        return BucketMemory(flats, Lent(own, (flat.gradients for flat in flats)), rows)
