"""The module's state that is not averaged with the gradients: changes are noticed, and set to another rank's value.

It has booleans, complex numbers, float8, large buffers, buffers that get their shape in the first forward pass, and
frozen parameters that change in the forward pass, as in a momentum encoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from straggle.merge.state.held import Held
from straggle.merge.wire.contents import differ, read_together, words_of


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
    change and all are large: sums reveal a write to ``parameter.data``, which leaves no other trace. Parameters that
    were once seen to change like this are compared in each step, the rest in some steps.

    All that is compared in a step is read at once: if it is on a device, the host waits once, and not at all if stamps
    tell everything.
    """

    def __init__(self, held: Iterable[Held]) -> None:
        self._held = list(held)
        self._by_content: set[str] = set()
        self._base: dict[str, Tensor | None] = {}
        self._words: dict[str, Tensor] = {}  # of parameters
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
        self._words = {one.name: words_of(tensor).clone() for one in frozen if (tensor := one.tensor) is not None}
        self._looks, self._stamps = looks, stamps

    def changed(self) -> list[str]:
        """The names of the tensors that changed since `begin`."""
        stamps = _Stamps(self._held)
        if not self._looks and not stamps.differ(self._stamps):
            return []
        same = [self._is_same(one, stamps.of(number)) for number, one in enumerate(self._held)]
        found = [self._is_changed(one, is_same=is_same) for one, is_same in zip(self._held, same, strict=True)]
        flags = iter(read_together([own for own in found if isinstance(own, Tensor)]))
        changed = [bool(next(flags)) if isinstance(own, Tensor) else own for own in found]
        found_by = {one.name: is_same for one, is_same, own in zip(self._held, same, changed, strict=True) if own}
        self._by_content = self._by_content | {name for name, is_same in found_by.items() if is_same}
        return list(found_by)

    def _is_same(self, one: Held, stamp: tuple[int, int, int] | None) -> bool:
        return one.name in self._before and stamp == self._before[one.name]

    def _is_changed(self, one: Held, *, is_same: bool) -> bool | Tensor:
        """Whether it is; a flag on its device, if its elements must be compared. ``is_same``: so its stamp says."""
        tensor, base = one.tensor, self._base.get(one.name)
        if is_same and (tensor is None or one.name not in self._looks):
            return False
        if is_same and tensor is not None and not one.is_buffer:
            then = self._words.get(one.name)
            return then is None or differ(words_of(tensor), then)
        return tensor is None or base is None or differ(tensor, base)

    def with_bad(self, named: Mapping[str, Tensor]) -> set[str]:
        """Those with elements that were finite at the beginning of the step, as far as known, and no longer are."""
        floats = {name: own for name, own in named.items() if own.is_floating_point() and own.itemsize > 1}
        finite = read_together([torch.isfinite(own).all() for own in floats.values()])
        odd = [name for name, is_finite in zip(floats, finite, strict=True) if not is_finite]
        return {name for name in odd if self._became_bad(name, floats[name])}

    def _became_bad(self, name: str, tensor: Tensor) -> bool:
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
