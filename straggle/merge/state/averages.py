"""Small buffers of numbers, such as BatchNorm's statistics: averaged over ranks, in one message beside the gradients.

``merged = base + sum(change) / (number of ranks that give one)``, with the base that all ranks held when they entered
the step. Changes travel as float64, so those of float32 and of integers arrive exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from straggle.merge.state.held import Held, overlaps

MAX_NUMEL = 2**16  # a larger buffer travels only in a step in which it changes
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NEED_REST = (torch.float16, torch.bfloat16)  # and integers: what rounding took from a step goes into the next one
_SMALL = (torch.int8, torch.uint8)  # codes and flags, if they fall
_INTEGERS = (*_SMALL, torch.int16, torch.int32, torch.int64)
_HALF = 2**32


def is_averaged(tensor: Tensor | None) -> bool:
    """Whether a buffer is small enough, and of numbers whose mean is one of them."""
    if tensor is None or tensor.numel() > MAX_NUMEL or overlaps(tensor):
        return False
    return tensor.dtype in (*_FLOATS, *_INTEGERS) and not tensor.is_conj() and not tensor.is_neg()


@dataclass
class _Alike:
    """Buffers of one dtype, and their elements one after another.

    ``base`` are those that the ranks entered the step with, ``rest`` what rounding took from them so far (float64),
    and ``expected`` what this rank set last: the rest belongs to these elements only.
    """

    dtype: torch.dtype
    numbers: list[int]  # of the buffers, in the order of `Averages.held`
    sizes: list[int]
    shapes: list[torch.Size]
    base: Tensor
    rest: Tensor | None = None
    expected: Tensor | None = None

    @property
    def lanes(self) -> int:
        """Numbers for each element: integers of 64 bits travel in two halves."""
        return 2 if self.dtype is torch.int64 else 1

    @property
    def numel(self) -> int:
        return len(self.base)

    def change(self, now: Tensor) -> Tensor:
        """By how much the elements changed, as float64 of shape (lanes * numel,); NaN: not finite, as before."""
        if self.dtype is torch.int64:
            old = self.base
            return torch.cat([(now >> 32) - (old >> 32), now % _HALF - old % _HALF]).double()
        if self.dtype in _INTEGERS:
            return (now.to(torch.int64) - self.base.to(torch.int64)).double()
        change = now.double() - self.base.double()
        if torch.isfinite(change).all():
            return change
        # an element that was not finite before travels as its value, once it is finite
        finite = torch.isfinite(self.base)
        return torch.where(finite, change, torch.where(torch.isfinite(now), now.double(), torch.nan))

    def moved(self, total: Tensor, count: Tensor) -> Tensor:
        """The elements after this sum of changes of so many ranks, one number for each element; 0: nobody's."""
        base = self.base
        if self.dtype is torch.int64:
            high, low = total.view(2, -1).to(torch.int64)
            return self._moved_long(high, low, count.to(torch.int64))
        mean = torch.where(count > 0, total / count, 0.0)
        if self.dtype in _INTEGERS:
            exact = base.double() + mean + (0.0 if self.rest is None else self.rest)
            return self._rounded(exact, exact.round().to(torch.int64).to(self.dtype))
        start, finite = base.double(), torch.isfinite(base)
        if not finite.all():
            known = finite | (torch.isfinite(mean) & (count > 0))
            start = torch.where(finite, start, 0.0)
            mean = torch.where(known, mean, 0.0)
            return torch.where(known, (start + mean).to(self.dtype), base)
        exact = start + mean if self.rest is None else start + mean + self.rest
        new = exact.to(self.dtype)
        return self._rounded(exact, new) if self.dtype in _NEED_REST else new

    def _moved_long(self, high: Tensor, low: Tensor, count: Tensor) -> Tensor:
        given = count > 0
        count = torch.where(given, count, 1)
        whole = torch.div(high, count, rounding_mode="floor")
        below = (high - whole * count) * _HALF + low
        part = torch.div(below, count, rounding_mode="floor")
        fraction = (below - part * count).double() / count + (0.0 if self.rest is None else self.rest)
        step = whole * _HALF + part + fraction.round().to(torch.int64)
        self._keep_rest(fraction - fraction.round())
        return self.base + step

    def _rounded(self, exact: Tensor, new: Tensor) -> Tensor:
        self._keep_rest(exact - new.double())
        return new

    def _keep_rest(self, rest: Tensor) -> None:
        rest = torch.where(torch.isfinite(rest), rest, 0.0)
        self.rest = rest if bool(rest.any()) else None


class Averages:
    """The elements of these buffers at the beginning and at the end of a step; on the training thread.

    ``numel``: numbers in the message: the changes, and at their end a count for each buffer.
    """

    def __init__(self, held: Sequence[Held], device: torch.device) -> None:
        self.held = held
        self._device = device
        self._kinds = self._alike(held)
        self.numel = sum(kind.lanes * kind.numel for kind in self._kinds) + len(held)
        self._now: list[Tensor] = []
        self.retired: set[int] = set()  # numbers of buffers that are of another shape for good: they are set elsewhere

    def _alike(self, held: Sequence[Held]) -> list[_Alike]:
        found: dict[torch.dtype, list[int]] = {}
        tensors = [one.tensor for one in held]
        for number, tensor in enumerate(tensors):
            assert tensor is not None
            found.setdefault(tensor.dtype, []).append(number)
        kinds = []
        for dtype, numbers in found.items():
            own = [tensor for number in numbers if (tensor := tensors[number]) is not None]
            base = torch.cat([tensor.reshape(-1).to(self._device) for tensor in own])
            kinds.append(_Alike(dtype, numbers, [t.numel() for t in own], [t.shape for t in own], base))
        return kinds

    def begin(self) -> set[int]:
        """What the buffers hold now is what they change from; the numbers of those that have another shape or dtype.

        They are averaged no more.
        """
        new = {number for kind in self._kinds for number in self._reshaped(kind)} - self.retired
        self.retired |= new
        for kind in self._kinds:
            kind.base = self._elements(kind)
            if kind.rest is not None and kind.expected is not None:
                kind.rest = torch.where(torch.eq(kind.base, kind.expected), kind.rest, 0.0)
        return new

    def end(self) -> frozenset[int]:
        """Look at the buffers after the forward passes; the numbers of those that cannot be averaged in this step.

        They have another shape or dtype now or, if they may be codes, they fell.
        """
        self._now = [self._elements(kind) for kind in self._kinds]
        odd = {number for kind in self._kinds for number in self._reshaped(kind)}
        for kind, now in zip(self._kinds, self._now, strict=True):
            if kind.dtype in _SMALL and bool((fell := now.to(torch.int64) < kind.base.to(torch.int64)).any()):
                parts = zip(kind.numbers, torch.split(fell, kind.sizes), strict=True)
                odd |= {number for number, part in parts if bool(part.any())}
        return frozenset(odd - self.retired)

    def changed(self) -> frozenset[int]:
        """The numbers of the buffers whose elements `end` found to be others than in the beginning."""
        found = set()
        for kind, now in zip(self._kinds, self._now, strict=True):
            if not torch.equal(now, kind.base):
                differ = (now != kind.base) & ~((now != now) & (kind.base != kind.base))
                parts = zip(kind.numbers, torch.split(differ, kind.sizes), strict=True)
                found |= {number for number, part in parts if bool(part.any())}
        return frozenset(found - self.retired)

    def message(self, gives: frozenset[int]) -> tuple[Tensor, frozenset[int]]:
        """The changes and counts of the buffers that this rank ``gives``; and those left out because of bad numbers."""
        counts = torch.zeros(len(self.held), dtype=torch.float64, device=self._device)
        changes, bad = [], set[int]()
        for kind, now in zip(self._kinds, self._now, strict=True):
            change = kind.change(now)
            if not set(kind.numbers) <= gives or not torch.isfinite(change).all():
                bad |= self._leave_out(kind, change, gives)
            changes.append(change)
        counts[sorted(gives - bad)] = 1.0
        return torch.cat([*changes, counts]), frozenset(bad)

    def _leave_out(self, kind: _Alike, change: Tensor, gives: frozenset[int]) -> set[int]:
        """Make zeros of what is not given; the buffers that are not because they have new bad numbers."""
        bad, of_lanes = set(), change.view(kind.lanes, -1)
        parts = zip(
            kind.numbers,
            torch.split(of_lanes, kind.sizes, 1),
            torch.split(torch.isfinite(kind.base), kind.sizes) if kind.dtype in _FLOATS else [None] * len(kind.sizes),
            strict=True,
        )
        for number, part, finite in parts:
            if finite is not None and not bool((torch.isfinite(part) | ~finite).all()):
                bad.add(number)
            if number not in gives or number in bad:
                part.zero_()
        return bad & gives

    def apply(self, merged: Tensor, kept: Collection[int]) -> frozenset[int]:
        """Set the buffers from the sum of the messages, but for those ``kept``; the numbers that no rank gave."""
        counts = merged[len(merged) - len(self.held) :]
        given: list[float] = counts.tolist()
        start = 0
        for kind in self._kinds:
            end = start + kind.lanes * kind.numel
            count = counts[kind.numbers]
            alike = len({given[number] for number in kind.numbers}) == 1
            count = count[:1] if alike else count.repeat_interleave(torch.tensor(kind.sizes, device=count.device))
            self._set(kind, kind.moved(merged[start:end], count), {*kept, *self.retired})
            start = end
        return frozenset(number for number, count in enumerate(given) if count == 0)

    def _set(self, kind: _Alike, new: Tensor, kept: set[int]) -> None:
        kind.expected = new if kind.rest is not None else None
        parts = [part.view(shape) for part, shape in zip(torch.split(new, kind.sizes), kind.shapes, strict=True)]
        owners = [self.held[number] for number in kind.numbers]
        tensors = [one.tensor for one in owners]
        if kept.isdisjoint(kind.numbers) and all(map(_fits, tensors, kind.shapes, [kind.dtype] * len(parts))):
            with torch.no_grad():
                torch._foreach_copy_(tensors, parts)  # type: ignore[arg-type]
            return
        for number, one, part in zip(kind.numbers, owners, parts, strict=True):
            if number not in kept:
                one.put(part.clone())

    def _elements(self, kind: _Alike) -> Tensor:
        tensors = [self.held[number].tensor for number in kind.numbers]
        if any(tensor is None or tensor.device != self._device for tensor in tensors) or self._reshaped(kind):
            own = torch.split(kind.base, kind.sizes)
            fit = map(_fits, tensors, kind.shapes, [kind.dtype] * len(tensors))
            tensors = [
                tensor.to(self._device) if fits and tensor is not None else part
                for tensor, part, fits in zip(tensors, own, fit, strict=True)
            ]
        return torch.cat([tensor.reshape(-1) for tensor in tensors if tensor is not None])

    def _reshaped(self, kind: _Alike) -> list[int]:
        """The numbers of the buffers that have another shape or dtype than when the model was wrapped."""
        tensors = [self.held[number].tensor for number in kind.numbers]
        fit = map(_fits, tensors, kind.shapes, [kind.dtype] * len(tensors))
        return [number for number, fits in zip(kind.numbers, fit, strict=True) if not fits]

    # -- what a rank that comes back must know

    def state_dict(self) -> dict[str, Tensor]:
        """What rounding took from the buffers so far, by their dtype, and the elements that it belongs to."""
        state = {}
        for kind in self._kinds:
            if kind.rest is not None and kind.expected is not None:
                state[f"{kind.dtype}.rest"], state[f"{kind.dtype}.of"] = kind.rest, kind.expected
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave on another rank."""
        for kind in self._kinds:
            kind.rest, kind.expected = state.get(f"{kind.dtype}.rest"), state.get(f"{kind.dtype}.of")


def _fits(tensor: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> bool:
    return tensor is not None and tensor.shape == shape and tensor.dtype is dtype
