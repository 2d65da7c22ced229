"""Gradients that were handed out, and whether the loop still has one of them when their memory is needed again."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor

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
