"""In which messages a bucket travels: gradients over the data group, weights and rows with them or over control."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from straggle.policies.merge_time import largest_message_bytes

ALIGN = 16  # elements: each gradient starts on a cache line


class Message(NamedTuple):
    """One collective's ``tensor``, over the data group or the control group."""

    tensor: Tensor
    is_control: bool = False


@dataclass(frozen=True)
class Placed:
    """Where one flat buffer lies: ``gradients``, ``numbers`` of float32 or finer, and the ``messages`` that bring both.

    ``wire``: the gradients as they travel, if that is not as they are. ``memory`` begins with the gradients.
    """

    gradients: Tensor
    numbers: Tensor
    messages: tuple[Message, ...]
    wire: Tensor | None
    memory: Tensor

    def with_numbers(self, count: int) -> tuple[Tensor, ...]:
        """The gradients and the first of the numbers; one tensor if they lie together."""
        if len(self.memory) > (end := len(self.gradients)):
            return (self.memory[: end + count],)
        return self.gradients, self.numbers[:count]


class Carrier(Protocol):
    """Decides where what ranks decide by (weights, presence, rows) lies, and in which messages it travels."""

    def place(self, numel: int, num_numbers: int, dtype: torch.dtype, device: torch.device) -> Placed:
        """Zeros for the gradients of one flat buffer, and for the numbers that belong to it."""

    def place_state(self, state: Tensor, device: torch.device) -> Message:
        """The module's other state, which goes with the last bucket."""


class RowsWithData:
    """Numbers lie at the end of their gradients' buffer if that is exact, and travel in its message.

    On the CPU each message more would cost one latency more. If gradients are of less than fp32, or are rounded to
    ``wire_dtype`` as they travel, the numbers go beside them.
    """

    def __init__(self, num_replicas: int, wire_dtype: torch.dtype | None = None) -> None:
        self._num_replicas, self._wire_dtype = num_replicas, wire_dtype

    def place(self, numel: int, num_numbers: int, dtype: torch.dtype, device: torch.device) -> Placed:
        rounded = dtype is torch.float32 and self._wire_dtype is not None
        together = dtype in (torch.float32, torch.float64) and not rounded
        memory = torch.zeros(numel + (num_numbers if together else 0), dtype=dtype, device=device)
        numbers = memory[numel:] if together else torch.zeros(num_numbers, device=device)
        wire = torch.zeros(numel, dtype=self._wire_dtype, device=device) if rounded else None
        tensors = cut(memory if wire is None else wire, self._num_replicas)
        beside = () if together else (numbers,)
        return Placed(memory[:numel], numbers, tuple(map(Message, (*tensors, *beside))), wire, memory)

    def place_state(self, state: Tensor, device: torch.device) -> Message:
        return Message(state.to(device))


def cut(data: Tensor, num_replicas: int) -> tuple[Tensor, ...]:
    """One message, or as many equal ones as it takes for none to pay more latencies than a small one."""
    data = (torch.view_as_real(data) if data.is_complex() else data).view(-1)  # nccl has no complex numbers
    count = 1 if data.is_cuda else math.ceil(data.nbytes / largest_message_bytes(num_replicas))
    size = -(-data.numel() // (count * ALIGN)) * ALIGN
    return tuple(data[start : start + size] for start in range(0, data.numel(), size))
