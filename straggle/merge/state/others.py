"""What a module holds and is not averaged with the gradients: seen if it changes, and set as another rank has it.

Booleans, complex numbers, float8, large buffers, those that take their shape in the first forward pass, and frozen
parameters that change in the forward pass, as a momentum encoder's do.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from straggle.merge.fingerprint import digest
from straggle.merge.state.held import Held
from straggle.merge.tensor_bytes import bytes_of

_Stamp = tuple[int, int]  # of a tensor: how often it was written, and where it lies


class _Watched:
    """One tensor: what it was at the beginning of the step.

    A buffer's ``base`` is a copy. A frozen parameter has none, because most never change and all are large: a digest
    says whether it is another one, if its stamp does not, as after a write to ``parameter.data``.
    """

    def __init__(self, held: Held) -> None:
        self.held = held
        self.base: Tensor | None = None
        self._object: Tensor | None = None
        self._stamp: _Stamp | None = None
        self._digest: int | None = None
        self._looks = False  # at the elements in this step
        self._by_content = False  # they were once seen to change without the stamp

    def begin(self, *, by_content: bool) -> None:
        """A step begins; ``by_content``: look at the elements, too."""
        tensor, is_same = self.held.tensor, self._is_same()
        self._object, self._stamp = self.held.object, _stamp(tensor)
        self._looks = by_content or self._by_content
        if not self.held.is_buffer:
            self._digest = digest(tensor) if self._looks and tensor is not None else None
        elif self._looks or not is_same:
            self.base = None if tensor is None else tensor.clone()

    def changed(self) -> bool:
        """Whether the elements are others now."""
        tensor = self.held.tensor
        if not self._is_same():
            return tensor is None or self.base is None or not _equal(tensor, self.base)
        if tensor is None or not self._looks:
            return False
        if self.held.is_buffer:
            differs = self.base is not None and not _equal(tensor, self.base)
        else:
            differs = digest(tensor) != self._digest
        self._by_content = self._by_content or differs
        return differs

    def restore(self) -> bool:
        """Set it back to what it was; false if that is not known."""
        if not self.held.is_buffer:
            return False
        if self.base is None:
            self.held.owner._buffers[self.held.key] = None
        else:
            self.held.put(self.base.clone())
        return True

    def _is_same(self) -> bool:
        """Whether it is the tensor that it was, in its place, and not written since."""
        return self.held.object is self._object and _stamp(self._object) == self._stamp


class Others:
    """Those of one module; on the training thread."""

    def __init__(self, held: Iterable[Held]) -> None:
        self._all = {one.name: _Watched(one) for one in held}

    def add(self, held: Held) -> None:
        """This one is watched from here on."""
        self._all[held.name] = _Watched(held)

    def begin(self, *, by_content: bool) -> None:
        """What they hold now is what they change from; ``by_content``: see changes that leave no other trace."""
        for watched in self._all.values():
            watched.begin(by_content=by_content)

    def changed(self) -> list[str]:
        """The names of those that are not what they were at the beginning."""
        return [name for name, watched in self._all.items() if watched.changed()]

    def has_bad(self, name: str, tensor: Tensor) -> bool:
        """Whether elements are not finite that were finite at the beginning of the step, as far as that is known."""
        if not tensor.is_floating_point() or tensor.itemsize == 1 or torch.isfinite(tensor).all():
            return False
        base = self._all[name].base if name in self._all else None
        known = base is not None and base.shape == tensor.shape and base.dtype is tensor.dtype
        return not (known and bool((torch.isfinite(tensor) | ~torch.isfinite(base)).all()))  # type: ignore[arg-type]

    def restore(self, name: str) -> bool:
        """Set one back to what it was at the beginning; false if that is not known."""
        return self._all[name].restore()


def _stamp(tensor: Tensor | None) -> _Stamp | None:
    return None if tensor is None else (tensor._version, tensor.data_ptr())


def _equal(tensor: Tensor, other: Tensor) -> bool:
    if tensor.shape != other.shape or tensor.dtype is not other.dtype:
        return False
    return torch.equal(bytes_of(tensor), bytes_of(other))
