"""Where a flat buffer of gradients lies with the few numbers that belong to it, and in which messages both travel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from straggle.policies.merge_time import largest_message_bytes

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
