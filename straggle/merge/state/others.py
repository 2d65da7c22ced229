"""The module's state that is not averaged with the gradients: changes are noticed, and set to another rank's value.

It has booleans, complex numbers, float8, large buffers, buffers that get their shape in the first forward pass, and
frozen parameters that change in the forward pass, as in a momentum encoder.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from straggle.merge.fingerprint import digest
from straggle.merge.state.held import Held
from straggle.merge.tensor_bytes import bytes_of


class _Stamps:
    """Identity, address and version of each tensor, which reveal most changes."""

    def __init__(self, held: Iterable[Held]) -> None:
        self.objects = [one.object for one in held]  # kept alive, so that no new tensor gets the id of an old one
        there = [tensor for tensor in self.objects if tensor is not None]
        self._marks = [(tensor._version, tensor.data_ptr()) for tensor in there]

    def differ(self, other: _Stamps) -> bool:
        """Whether one of the tensors has changed."""
        if self._marks != other._marks:
            return True
        return any(one is not another for one, another in zip(self.objects, other.objects, strict=True))

    def of(self, number: int) -> tuple[int, int, int] | None:
        """The stamps of one tensor."""
        tensor = self.objects[number]
        return None if tensor is None else (id(tensor), tensor._version, tensor.data_ptr())


class Others:
    """The other state of one module; used on the training thread.

    A copy keeps each buffer's value at the beginning of a step. Frozen parameters are not copied, because most never
    change and all are large: a digest reveals a write to ``parameter.data``, which leaves no other trace. Parameters
    that were once seen to change like this are compared in each step, the rest in some steps.
    """

    def __init__(self, held: Iterable[Held]) -> None:
        self._held = list(held)
        self._by_content: set[str] = set()
        self._base: dict[str, Tensor | None] = {}
        self._digests: dict[str, int] = {}
        self._before: dict[str, tuple[int, int, int] | None] = {}
        self._stamps = _Stamps(())
        self._looks: set[str] = set()  # tensors whose elements are compared in this step

    def follow(self, held: Iterable[Held]) -> None:
        """Follow these tensors from here on; also in the middle of a step."""
        self._held = list(held)

    def begin(self, *, by_content: bool) -> None:
        """Note the values before the forward passes; ``by_content``: also find changes that leave no other trace."""
        stamps = _Stamps(self._held)
        is_new = len(stamps.objects) != len(self._stamps.objects) or stamps.differ(self._stamps)
        looks = {one.name for one in self._held} if by_content else self._by_content
        for number, one in enumerate(self._held if is_new or looks else ()):
            same = one.name in self._before and self._before[one.name] == stamps.of(number)
            self._before[one.name] = stamps.of(number)
            if one.is_buffer and (one.name in looks or not same):
                self._base[one.name] = None if (tensor := one.tensor) is None else tensor.clone()
        frozen = [one for one in self._held if looks and not one.is_buffer and one.name in looks]
        self._digests = {one.name: digest(tensor) for one in frozen if (tensor := one.tensor) is not None}
        self._looks, self._stamps = looks, stamps

    def changed(self) -> list[str]:
        """The names of the tensors that changed since `begin`."""
        stamps = _Stamps(self._held)
        if not self._looks and not stamps.differ(self._stamps):
            return []
        return [one.name for number, one in enumerate(self._held) if self._is_changed(one, stamps.of(number))]

    def _is_changed(self, one: Held, stamp: tuple[int, int, int] | None) -> bool:
        tensor = one.tensor
        if one.name not in self._before or stamp != self._before[one.name]:
            base = self._base.get(one.name)
            return tensor is None or base is None or not _equal(tensor, base)
        if tensor is None or one.name not in self._looks:
            return False
        if one.is_buffer:
            base = self._base.get(one.name)
            differs = base is None or not _equal(tensor, base)
        else:
            differs = digest(tensor) != self._digests.get(one.name)
        if differs:
            self._by_content = self._by_content | {one.name}
        return differs

    def has_bad(self, name: str, tensor: Tensor) -> bool:
        """Whether elements that were finite at the beginning of the step, as far as known, no longer are."""
        if not tensor.is_floating_point() or tensor.itemsize == 1 or torch.isfinite(tensor).all():
            return False
        base = self._base.get(name)
        if base is None or base.shape != tensor.shape or base.dtype is not tensor.dtype:
            return True
        return not bool((torch.isfinite(tensor) | ~torch.isfinite(base)).all())

    def restore(self, held: Held) -> bool:
        """Restore a tensor to its value at the beginning; false if that is unknown."""
        if not held.is_buffer:
            return False
        if (base := self._base.get(held.name)) is None:  # it did not exist then
            held.owner._buffers[held.key] = None
        else:
            held.put(base.clone())
        return True


def _equal(tensor: Tensor, other: Tensor) -> bool:
    if tensor.shape != other.shape or tensor.dtype is not other.dtype:
        return False
    return torch.equal(bytes_of(tensor), bytes_of(other))
