"""A few numbers of a merge as plain memory: an operation on a tensor costs ten times as much, or more."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import torch
from torch import Tensor

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
