"""Buffers on a device whose queue the host does not wait for: who knows what of a merge, and how it is normalized.

Hosts tell each other what they have put in (weights, presence, rows) over control, in one message at the end of a
rank's part. Only devices know which gradients are not finite: each bucket has the weights once more, on the device,
where those of such gradients are zeros. By these it is normalized there, and nothing is read back.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from straggle.backward.stages import StagePlan
from straggle.merge.buffers import Flat, Share, StageBuffers
from straggle.merge.groups import Group
from straggle.merge.numbers import PlainNumbers
from straggle.source.source import Slot

_LOOKED_AT_IN_ONE_PASS = (torch.float32, torch.float64, torch.float16)


class QueuedBuffers(StageBuffers):
    """`StageBuffers` of which the host waits for `send_rows` only, and the device's queue for all else.

    The tail of a bucket is a weight for each of its parameters. If gradients that are not finite are kept, hosts know
    all weights, and there is none. A bucket with a gradient that is not finite is left out as a whole: to mask each by
    itself takes a kernel for each. ``skip``: after `normalize`, a number on the device, 1 if no rank had a gradient
    that could be applied; all merged gradients are zeros then. ``None``: hosts know that there is no such step.
    """

    is_queued = True

    def __init__(
        self,
        plan: StagePlan,
        slots: Sequence[Slot],
        world_size: int,
        *,
        num_state: int = 0,
        drop_nonfinite: bool = False,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.skip: Tensor | None = None
        # of all parameters, in the order of the buckets: two numbers each, as this rank put them in
        self._known = array("f", bytes(8 * len(slots)))
        self._control = torch.empty(0)
        super().__init__(
            plan, slots, world_size, num_state=num_state, drop_nonfinite=drop_nonfinite, wire_dtype=wire_dtype
        )
        self._plain_known = PlainNumbers(self._control[self._length :])
        self._num_bytes += self._control.nbytes
        self._at: dict[int, int] = {}  # where `_known` begins with a bucket, by its first parameter
        self._found: dict[int, Tensor] = {}  # whether it has a gradient that is not finite: 1, or 0
        self._found_on: dict[torch.device, Tensor] = {}  # the same for all buckets on a device
        self._counts_on: dict[torch.device, Tensor] = {}  # how many gradients each of these has
        self._scale_on: dict[torch.device, Tensor] = {}  # one over the number of ranks
        self._note_flats()

    def _note_flats(self) -> None:
        at, counts = 0, dict[torch.device, list[tuple[int, int]]]()
        for flat in chain.from_iterable(self._buckets):
            self._at[flat.parameters[0]] = at
            at += 2 * len(flat.parameters)
            counts.setdefault(flat.gradients.device, []).append((flat.parameters[0], len(flat.parameters)))
        for device, own in counts.items():
            self._found_on[device] = found = torch.zeros(len(own), device=device)
            self._found |= zip((first for first, _ in own), torch.split(found, 1), strict=True)
            self._counts_on[device] = torch.tensor([float(count) for _, count in own], device=device)
            self._scale_on[device] = torch.tensor(1 / self._world_size, device=device)

    # -- where the numbers lie

    def _divides_by(self) -> int:
        return 1 if self._drop_nonfinite else self._world_size  # or in the pass that looks at all elements anyway

    def _numbers_of(self, num_parameters: int) -> int:
        return num_parameters if self._drop_nonfinite else 0

    def _numbers_with_last(self) -> int:
        return 1 if self._drop_nonfinite else 0

    def _place_of_rows(self, with_last: Tensor) -> Tensor:
        self._unusable = with_last  # how many ranks have nothing that could be applied
        if not len(self._control):
            self._control = torch.zeros(self._length + len(self._known))
        return self._control

    def begin(self) -> None:
        super().begin()
        self.skip = None
        for found in self._found_on.values() if self._drop_nonfinite else ():
            found.zero_()

    # -- what this rank gives

    def _write_full(self, flat: Flat, weight: float) -> None:
        count = len(flat.parameters)
        self._note(flat, array("f", [weight]) * count + array("f", [1.0]) * count)
        if self._drop_nonfinite:
            flat.tail.fill_(weight)

    def _write_shares(self, flat: Flat, own: Sequence[Share]) -> None:
        weights = array("f", [share.weight for share in own])
        self._note(flat, weights + array("f", [float(share.present) for share in own]))
        if self._drop_nonfinite:
            flat.tail.copy_(torch.tensor(weights, dtype=flat.tail.dtype), non_blocking=True)
        self._clear_absent(flat, own)

    def _note(self, flat: Flat, numbers: array[float]) -> None:
        at = self._at[flat.parameters[0]]
        self._known[at : at + len(numbers)] = numbers

    def _leave_out_nonfinite(self, flat: Flat) -> None:
        """Divide by the number of ranks, and make zeros with weight 0 of all gradients of a bucket if one is bad."""
        found, scale = self._found[flat.parameters[0]], self._scale_on[flat.gradients.device]
        data = torch.view_as_real(flat.gradients) if flat.gradients.is_complex() else flat.gradients
        if data.dtype in _LOOKED_AT_IN_ONE_PASS:
            torch._amp_foreach_non_finite_check_and_unscale_([data], found, scale)
        else:
            data.mul_(scale)
            found.copy_(~(torch.linalg.vector_norm(data, torch.inf) < torch.inf))  # NaN is not less either
        bad = found.bool()
        for own in flat.both:
            own.masked_fill_(bad, 0.0)

    def _count_nonfinite(self) -> None:
        if not self._drop_nonfinite:
            return
        if not any(self._known):
            self._unusable.fill_(1.0)
            return
        first, *others = [found.amax() for found in self._found_on.values()]
        for other in others:
            first = torch.maximum(first, other.to(first.device, non_blocking=True))
        self._unusable.copy_(first, non_blocking=True)

    def send_rows(self, group: Group) -> dist.Work | None:
        self._plain_known.write(self._known)
        return group.all_reduce(self._control)

    # -- what came of it

    def _normalize(self, flats: Sequence[Flat]) -> None:
        new = [flat for flat in flats if flat.parameters[0] not in self._merged]
        for flat in new:
            if flat.wire is not None:
                flat.gradients.copy_(flat.wire)
        known = self._plain_known.tolist()
        if self._drop_nonfinite and any(known):
            self.skip = (self._unusable[0] >= self._world_size).float()
        alike = list[tuple[Flat, float]]()  # buckets with one weight for all, and this
        for flat in new:
            at, count = self._at[flat.parameters[0]], len(flat.parameters)
            weights, presence = known[at : at + count], known[at + count : at + 2 * count]
            self._merged |= zip(
                flat.parameters, map(Share, weights, map(bool, presence)), strict=True
            )  # as hosts know it
            if weights.count(weights[0]) == count:
                alike.append((flat, weights[0]))
            else:
                self._scale_each(flat, weights)
        if self._drop_nonfinite:
            self._scale_alike([flat for flat, weight in alike if weight > 0])
        else:
            for flat, weight in alike:
                if weight not in (0.0, self._world_size):
                    flat.gradients.mul_(self._world_size / weight)

    def _scale_alike(self, flats: Sequence[Flat]) -> None:
        """Normalize buckets that have one weight for all parameters each."""
        kinds: dict[tuple[torch.device, torch.dtype], list[Flat]] = {}
        for flat in flats:
            kinds.setdefault((flat.tail.device, flat.tail.dtype), []).append(flat)
        for own in kinds.values():
            scales = self._scales(torch.cat([flat.tail[:1] for flat in own]))
            torch._foreach_mul_([flat.gradients for flat in own], list(scales.unbind()))

    def _scale_each(self, flat: Flat, weights: Sequence[float]) -> None:
        """Normalize a bucket in which parameters have different weights."""
        scales: Sequence[Tensor | float]
        if self._drop_nonfinite:
            scales = self._scales(flat.tail).unbind()
        else:
            scales = [self._world_size / weight if weight > 0 else 0.0 for weight in weights]
        for index, weight, scale in zip(flat.parameters, weights, scales, strict=True):
            if weight > 0:
                self.views[index].mul_(scale)

    def _scales(self, weights: Tensor) -> Tensor:
        """What brings sums with these weights to the mean; 1.0 exactly if all ranks gave all, 0 if none did."""
        scales = torch.where(weights > 0, self._world_size / weights, 0.0)
        return scales if self.skip is None else scales * (1 - self.skip.to(scales.device, non_blocking=True))

    def counts(self) -> tuple[Tensor, Tensor] | None:
        """How many gradients of this rank were left out, and `skip`, on the device; ``None``: hosts know them."""
        if self.skip is None:
            return None
        each = [torch.dot(self._found_on[device], counts) for device, counts in self._counts_on.items()]
        return sum(each[1:], start=each[0]), self.skip
