"""Averages of buffers on a device that is a queue: kernels decide, and the host reads nothing back in a usual step.

The means are those of `averages.py` to rounding, and the same on all ranks bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from straggle.backward.device import device_of
from straggle.merge.state.averages import SMALL, Alike, Averages, is_averaged
from straggle.merge.state.held import Held

_MAX_MASKS = 16  # of which modules ran: nearly always the same few


class _Queued(Alike):
    """The same arithmetic, without a look at whether it is needed."""

    def _change(self) -> Tensor:
        if not self.is_float:
            return super()._change()
        return self._or_value(self.now.double() - self.base)

    def moved(self, mean: Tensor) -> Tensor:
        if not self.is_float:
            return super().moved(mean)
        new, rest = self._moved_to_finite(mean if self.rest is None else mean + self.rest)
        if not self.is_exact:
            self._keep_rest(torch.where(torch.isfinite(rest), rest, 0.0))
        return new

    def _keep_rest(self, rest: Tensor) -> None:
        self.rest = rest


class QueuedAverages(Averages):
    """Those of a device that is a queue.

    What the host would have to wait for is decided otherwise: small integers are not averaged, as their values may be
    codes; an ``int64`` that jumps too far for an exact sum is noticed only in a step that ``looks``; and what a rank
    left out because it was not finite is known when the device has come that far.
    """

    _alike_of = _Queued

    def __init__(self, held: Sequence[Held], device: torch.device) -> None:
        super().__init__(held, device)
        sizes = torch.tensor([size for kind in self._kinds for size in kind.sizes], device="cpu")
        ends = sizes.cumsum(0)
        self._bounds = torch.stack([ends - sizes, ends]).to(device)  # of each buffer, among all elements
        self._buffer_of = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes).to(device)  # each element
        self._masks: dict[frozenset[int], Tensor] = {}
        self._left_out = torch.zeros(len(held), dtype=torch.bool, device=device)
        self._queue = device_of(device)
        self._copy: tuple[Tensor, Any] | None = None  # of what was left out, for the host, and a mark behind it

    @classmethod
    def take(cls, tensor: Tensor | None, device: torch.device) -> bool:
        """Not small integers, which may be codes, nor one on the CPU, which each step would wait to be copied."""
        if tensor is None or tensor.dtype in SMALL or tensor.device.type != device.type:
            return False
        return is_averaged(tensor)

    def end(self, *, looks: bool) -> frozenset[int]:
        """As that of `Averages`."""
        if looks:
            return super().end(looks=True)
        odd = set[int]()
        for kind in self._kinds:
            kind.end()
            odd.update(kind.reshaped())
        return frozenset(odd - self.retired)

    def message(self, gives: frozenset[int], if_changed: frozenset[int]) -> tuple[Tensor, frozenset[int]]:
        """As that of `Averages`; `left_out_before` has what was not finite."""
        given = self._mask(gives)
        if if_changed:
            changed = self._any([kind.differing() for kind in self._kinds])
            given = torch.where(changed, self._mask(gives | if_changed), given)
        base, change = (torch.cat([one.double() for one in own]) for own in self._base_and_change())
        bad = self._any([~torch.isfinite(change) & torch.isfinite(base)])
        self._note(bad & (given > 0))
        counts = torch.where(bad, 0.0, given)
        return torch.cat([torch.where(self._each(counts) > 0, change, 0.0), counts]), frozenset()

    def _base_and_change(self) -> tuple[list[Tensor], list[Tensor]]:
        return [kind.base for kind in self._kinds], [kind.change for kind in self._kinds]

    def apply(self, merged: Tensor, kept: Collection[int]) -> frozenset[int]:
        """As that of `Averages`."""
        total, counts = merged[: -len(self.held)], merged[-len(self.held) :]
        count = self._each(counts)
        self._move(torch.where(count > 0, total / count, 0.0), kept)
        return frozenset(self._order)

    def _each(self, counts: Tensor) -> Tensor:
        return counts.index_select(0, self._buffer_of)

    def _any(self, elements: list[Tensor]) -> Tensor:
        """For each buffer, in the order of the message, whether this is so of one of its elements."""
        before = pad(torch.cat(elements).cumsum(0, dtype=torch.int32), (1, 0))  # exact, in any order
        starts, ends = (before.index_select(0, bound) for bound in self._bounds)
        return ends > starts

    def _mask(self, numbers: frozenset[int]) -> Tensor:
        """1 for each of these buffers, in the order of the message."""
        if len(numbers) == len(self.held):
            return self._ones
        if (mask := self._masks.get(numbers)) is None:
            if len(self._masks) > _MAX_MASKS:
                self._masks.clear()
            own = torch.tensor([float(number in numbers) for number in self._order], dtype=torch.float64, device="cpu")
            self._masks[numbers] = mask = own.to(self._ones.device, non_blocking=True)
        return mask

    # -- what was left out, some time later

    def _note(self, left_out: Tensor) -> None:
        self._left_out |= left_out
        if self._copy is None:
            self._copy = self._queue.copy_to_host(self._left_out), self._queue.mark()
            self._left_out.zero_()

    def left_out_before(self) -> frozenset[int]:
        """Those of the last step, or of the step that the device has come to."""
        if self._copy is None or not self._queue.ready(self._copy[1]):
            return frozenset()
        flags, self._copy = self._copy[0].tolist(), None
        return frozenset(number for number, flag in zip(self._order, flags, strict=True) if flag)
