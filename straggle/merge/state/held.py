"""A module's state beside its trainable parameters: persistent buffers and frozen parameters, by owner."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Held:
    """One tensor of one module, which may be replaced by another, or be ``None``.

    It is looked up by its name in the owning module. So wrappers that rename their contents do not matter.
    """

    name: str
    owner: nn.Module
    key: str
    is_buffer: bool

    @property
    def object(self) -> Tensor | None:
        """The present tensor."""
        table = self.owner._buffers if self.is_buffer else self.owner._parameters
        try:
            return table.get(self.key)
        except AttributeError:  # a scripted module has no dicts
            found: Tensor | None = getattr(self.owner, self.key, None)
            return found

    @property
    def tensor(self) -> Tensor | None:
        """The present tensor, detached."""
        return None if (found := self.object) is None else found.detach()

    @property
    def kind(self) -> str:
        """Its kind and name, for messages."""
        return f"buffer {self.name}" if self.is_buffer else f"frozen parameter {self.name}"

    def put(self, tensor: Tensor) -> None:
        """Set its elements, in place if shape, dtype and memory allow that."""
        now = self.tensor
        with torch.no_grad():
            if now is not None and now.shape == tensor.shape and now.dtype is tensor.dtype and not overlaps(now):
                now.copy_(tensor)
            elif self.is_buffer:
                self.owner._buffers[self.key] = tensor.to(tensor.device if now is None else now.device)
            elif now is not None:
                self.owner._parameters[self.key].data = tensor.to(now.device)  # type: ignore[union-attr]


def held_by(module: nn.Module) -> list[Held]:
    """The persistent buffers and the frozen parameters, each shared one once, in the module tree's order."""
    found, seen = [], set[int]()
    for prefix, owner in module.named_modules():
        start = f"{prefix}." if prefix else ""
        for key, buffer in owner._buffers.items():
            if key not in owner._non_persistent_buffers_set and id(buffer) not in seen and _is_plain(buffer):
                found.append(Held(start + key, owner, key, is_buffer=True))
                seen |= set() if buffer is None else {id(buffer)}
        for key, parameter in owner._parameters.items():
            if parameter is not None and not parameter.requires_grad and id(parameter) not in seen:
                if _is_plain(parameter):
                    found.append(Held(start + key, owner, key, is_buffer=False))
                seen.add(id(parameter))
    return found


class BufferTables:
    """The buffers and modules that a module has now, by identity, to notice replaced or added ones."""

    def __init__(self, module: nn.Module) -> None:
        tables: list[dict[str, Any]] = []
        for child in module.modules():
            tables += (child._buffers, child._modules)
        self._empty = [table for table in tables if not table]
        self._tables = [table for table in tables if table]
        self._now = [table.values() for table in self._tables]  # views of the dicts: they show later changes
        self._entries = list(chain.from_iterable(self._now))

    def unchanged(self) -> bool:
        """Whether all of them are still the same; called in every step."""
        if any(self._empty) or sum(map(len, self._tables)) != len(self._entries):
            return False
        return all(map(is_, chain.from_iterable(self._now), self._entries))


def overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory, as in an expanded tensor."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _is_plain(tensor: Tensor | None) -> bool:
    """Whether its elements can be sent: not for a sparse, quantized, meta or lazy tensor, or a subclass."""
    if tensor is None:
        return True
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return False
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
