"""Small buffers of numbers, such as BatchNorm's statistics: averaged over ranks, in one message beside the gradients.

``merged = base + sum(change) / (number of ranks that give one)``, with the base that all ranks held when they entered
the step. Changes are sent as float64, so those of float32 and of integers are exact.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from straggle.merge.state.held import Held, overlaps

MAX_NUMEL = 2**16  # a larger buffer is sent only in a step in which it changes
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SMALL = (torch.int8, torch.uint8)  # taken for codes and flags if their values fall
_INTEGERS = (*SMALL, torch.int16, torch.int32, torch.int64)
_MAX_CHANGE = 2.0**45  # largest change of an integer: the sum over 200 ranks is exact in float64


def is_averaged(tensor: Tensor | None) -> bool:
    """Whether a buffer is small enough, and of a dtype that has a mean."""
    if tensor is None or tensor.numel() > MAX_NUMEL or overlaps(tensor):
        return False
    return tensor.dtype in (*_FLOATS, *_INTEGERS) and not tensor.is_neg()


@dataclass
class Alike:
    """Buffers of one dtype, with their elements one after another.

    ``numbers``: their places in `Averages.held`. ``base``: the elements with which the ranks entered the step; ``now``:
    those that the forward passes left; ``change``: the difference. ``expected``: the elements that this rank set last;
    ``rest``: what rounding has taken from them so far, because small changes add up.
    """

    dtype: torch.dtype
    device: torch.device
    numbers: list[int]
    held: list[Held]
    shapes: list[torch.Size]
    base: Tensor
    now: Tensor
    change: Tensor
    rest: Tensor | None = None
    expected: Tensor | None = None
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = [shape.numel() for shape in self.shapes]
        self.is_float = self.dtype in _FLOATS
        self.is_exact = self.dtype in (torch.float32, torch.float64)  # rounding is negligible
        self.is_finite = True  # whether the change is

    def tensors(self) -> list[Tensor | None]:
        """The present buffers' tensors."""
        return [one.object for one in self.held]

    def reshaped(self) -> list[int]:
        """The numbers of the buffers that have another shape or dtype than when the model was wrapped, or are gone."""
        tensors = zip(self.numbers, self.tensors(), self.shapes, strict=True)
        return [number for number, tensor, shape in tensors if not self._fits(tensor, shape)]

    def elements(self) -> Tensor:
        """All elements; for a buffer with another shape now, its elements before that."""
        tensors = self.tensors()
        if not all(map(self._fits, tensors, self.shapes)):
            before = torch.split(self.base, self.sizes)
            tensors = [
                tensor if self._fits(tensor, shape) else part
                for tensor, shape, part in zip(tensors, self.shapes, before, strict=True)
            ]
        flat = [tensor.reshape(-1).detach() for tensor in tensors if tensor is not None]
        if any(tensor.device != self.device for tensor in flat):
            flat = [tensor.to(self.device) for tensor in flat]
        return torch.cat(flat)

    def begin(self) -> None:
        """A step begins with the present elements."""
        self.base = self.elements()
        if self.rest is not None and self.expected is not None:
            self.rest = torch.where(torch.eq(self.base, self.expected), self.rest, 0.0)

    def end(self) -> None:
        """Compute the change: the forward passes are over."""
        self.now = self.elements()
        self.change = self._change()

    def _change(self) -> Tensor:
        """The change of each element, as float64; NaN if it is not finite, and was not before."""
        if not self.is_float:
            return (self.now.to(torch.int64) - self.base.to(torch.int64)).double()
        change = self.now.double() - self.base
        self.is_finite = _all_finite(change)
        return change if self.is_finite else self._or_value(change)

    def _or_value(self, change: Tensor) -> Tensor:
        """An element that was not finite before is sent as its value, once it is finite."""
        value = torch.where(torch.isfinite(self.now), self.now.double(), torch.nan)
        return torch.where(torch.isfinite(self.base), change, value)

    def fell(self) -> list[int]:
        """The numbers of the buffers with an element that became smaller, if their dtype is one of codes and flags."""
        if self.dtype not in SMALL or torch.equal(self.now, self.base):
            return []
        return self._where(self.now < self.base)

    def jumped(self) -> list[int]:
        """The numbers of the integer buffers that changed by more than can be summed exactly."""
        return self._where(self.change.abs() > _MAX_CHANGE) if self.dtype is torch.int64 else []

    def changed(self) -> list[int]:
        """The numbers of the buffers with a changed element."""
        return [] if torch.equal(self.now, self.base) else self._where(self.differing())

    def differing(self) -> Tensor:
        """Which elements changed; NaN is equal to NaN."""
        return (self.now != self.base) & ~((self.now != self.now) & (self.base != self.base))

    def with_bad_numbers(self) -> list[int]:
        """The numbers of the buffers with elements that were finite before and are not now."""
        return [] if self.is_finite else self._where(~torch.isfinite(self.change) & torch.isfinite(self.base))

    def moved(self, mean: Tensor) -> Tensor:
        """The elements after this mean change (float64; NaN if unknown)."""
        if not self.is_float:
            exact = mean if self.rest is None else mean + self.rest
            whole = exact.round()
            self._keep_rest(exact - whole)
            return (self.base.to(torch.int64) + whole.to(torch.int64)).to(self.dtype)
        exact = mean + self.base
        if not _all_finite(exact):
            return self._moved_to_finite(mean)[0]
        if self.is_exact:
            return exact.to(self.dtype)
        exact = exact if self.rest is None else exact + self.rest
        new = exact.to(self.dtype)
        self._keep_rest(exact - new)
        return new

    def _moved_to_finite(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Like `moved`, for a base that is not all finite: there the change is the value, if all ranks had one.

        Also what rounding took from each element.
        """
        start = torch.where(torch.isfinite(self.base), self.base, 0.0)
        known = torch.isfinite(mean) & (torch.isfinite(self.base) | (mean != 0))  # a mean of 0: no rank gave a value
        exact = start + mean
        new = torch.where(known, exact.to(self.dtype), self.base)
        return new, exact - new

    def restore(self, rest: Tensor | None, expected: Tensor | None) -> None:
        """Go on with what rounding has taken on another rank, from these elements."""
        self.rest = None if rest is None else rest.to(self.device)
        self.expected = None if expected is None else expected.to(self.device)

    def _keep_rest(self, rest: Tensor) -> None:
        self.rest = rest if bool(rest.any()) else None

    def put(self, new: Tensor, kept: Collection[int]) -> None:
        """Set the buffers to these elements, except those ``kept``."""
        self.expected = new if self.rest is not None else None
        parts = [
            part if len(shape) == 1 else part.view(shape)
            for part, shape in zip(torch.split(new, self.sizes), self.shapes, strict=True)
        ]
        tensors = self.tensors()
        if kept or not all(map(self._fits, tensors, self.shapes)):
            for number, one, part in zip(self.numbers, self.held, parts, strict=True):
                if number not in kept:
                    one.put(part.clone())
            return
        with torch.no_grad():
            torch._foreach_copy_(tensors, parts)  # type: ignore[arg-type]

    def _where(self, elements: Tensor) -> list[int]:
        if not bool(elements.any()):
            return []
        parts = zip(self.numbers, torch.split(elements, self.sizes), strict=True)
        return [number for number, part in parts if bool(part.any())]

    def _fits(self, tensor: Tensor | None, shape: torch.Size) -> bool:
        return tensor is not None and tensor.shape == shape and tensor.dtype is self.dtype


def _all_finite(numbers: Tensor) -> bool:
    """Whether all numbers are finite, by one pass; false also if their sum overflows."""
    return math.isfinite(numbers.sum().item())


class Averages:
    """The elements of these buffers at the beginning and at the end of a step; on the training thread.

    ``numel``: numbers in the message: the changes, followed by a count for each buffer. ``retired``: the numbers of
    buffers that have had another shape since; they are no longer averaged.
    """

    _alike_of: type[Alike] = Alike

    def __init__(self, held: Sequence[Held], device: torch.device) -> None:
        self.held = held
        self.retired: set[int] = set()
        found: dict[torch.dtype, list[int]] = {}
        for number, one in enumerate(held):
            assert one.object is not None
            found.setdefault(one.object.dtype, []).append(number)
        self._kinds = [self._alike(dtype, numbers, device) for dtype, numbers in found.items()]
        self._sizes = [len(kind.base) for kind in self._kinds]
        self._order = [number for kind in self._kinds for number in kind.numbers]
        self._ones = torch.ones(len(held), dtype=torch.float64, device=device)
        self.numel = sum(self._sizes) + len(held)

    def _alike(self, dtype: torch.dtype, numbers: list[int], device: torch.device) -> Alike:
        own = [self.held[number] for number in numbers]
        tensors = [tensor for one in own if (tensor := one.tensor) is not None]
        base = torch.cat([tensor.reshape(-1).to(device) for tensor in tensors])
        return self._alike_of(dtype, device, numbers, own, [tensor.shape for tensor in tensors], base, base, base)

    def begin(self) -> set[int]:
        """Note the elements before the forward passes; returns the numbers of buffers that are no longer averaged."""
        new = {number for kind in self._kinds for number in kind.reshaped()} - self.retired
        self.retired |= new
        for kind in self._kinds:
            kind.begin()
        return new

    @classmethod
    def take(cls, tensor: Tensor | None, device: torch.device) -> bool:  # noqa: ARG003
        """Whether a buffer is averaged, in a model whose gradients are on ``device``."""
        return is_averaged(tensor)

    def end(self, *, looks: bool) -> frozenset[int]:  # noqa: ARG002
        """Compare the buffers after the forward passes; returns the numbers of those without a mean in this step.

        They have another shape or dtype now, they fell though they may be codes, or they jumped too far. ``looks``:
        whether to look at elements of which the host must wait for the device.
        """
        odd = set[int]()
        for kind in self._kinds:
            kind.end()
            odd.update(kind.reshaped(), kind.fell(), kind.jumped())
        return frozenset(odd - self.retired)

    def left_out_before(self) -> frozenset[int]:
        """The numbers of buffers with elements that were not finite in an earlier step, if that was not known in it."""
        return frozenset()

    def changed(self) -> frozenset[int]:
        """The numbers of the buffers whose elements `end` found changed."""
        return frozenset(number for kind in self._kinds for number in kind.changed()) - self.retired

    def message(self, gives: frozenset[int], if_changed: frozenset[int]) -> tuple[Tensor, frozenset[int]]:
        """The changes and counts of the buffers that this rank ``gives``, and the numbers left out as not finite.

        It also gives those of ``if_changed`` that changed.
        """
        if if_changed:
            gives |= if_changed & self.changed()
        changes = [kind.change for kind in self._kinds]
        bad = {number for kind in self._kinds for number in kind.with_bad_numbers()}
        given = gives - bad
        if len(given) == len(self.held):
            return torch.cat([*changes, self._ones]), frozenset()
        counts = torch.tensor([float(number in given) for number in self._order], dtype=torch.float64)
        counts = counts.to(self._ones.device)
        all_changes = torch.cat(changes)
        return torch.cat([torch.where(self._each(counts) > 0, all_changes, 0.0), counts]), frozenset(bad & gives)

    def apply(self, merged: Tensor, kept: Collection[int]) -> frozenset[int]:
        """Set the buffers, except those ``kept``, from the messages' sum; returns the numbers that no rank gave.

        If the host does not know these, all of them.
        """
        total, counts = merged[: -len(self.held)], merged[-len(self.held) :]
        given: list[float] = counts.tolist()
        if min(given) == max(given) > 0:
            mean = total / given[0]
        else:
            count = self._each(counts)
            mean = torch.where(count > 0, total / count, 0.0)
        self._move(mean, kept)
        return frozenset(number for number, count in zip(self._order, given, strict=True) if count == 0)

    def _move(self, mean: Tensor, kept: Collection[int]) -> None:
        kept = {*kept, *self.retired}
        for kind, part in zip(self._kinds, torch.split(mean, self._sizes), strict=True):
            kind.put(kind.moved(part), kept)

    def _each(self, counts: Tensor) -> Tensor:
        """The count of its buffer for each element."""
        sizes = torch.tensor([size for kind in self._kinds for size in kind.sizes], device=counts.device)
        return counts.repeat_interleave(sizes)

    # -- state for a rank that comes back

    def state_dict(self) -> dict[str, Tensor]:
        """By dtype, what rounding has taken from the buffers so far, and the elements to which it belongs."""
        state = {}
        for kind in self._kinds:
            if kind.rest is not None and kind.expected is not None:
                state[f"{kind.dtype}.rest"], state[f"{kind.dtype}.of"] = kind.rest, kind.expected
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from another rank's `state_dict`."""
        for kind in self._kinds:
            rest, of = state.get(f"{kind.dtype}.rest"), state.get(f"{kind.dtype}.of")
            kind.restore(rest, of)
