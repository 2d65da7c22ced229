"""Buffers on a device whose queue the host does not wait for: who knows what of a merge, and how it is normalized.

Hosts tell each other what they have put in (weights, presence, rows) over control, in one message at the end of a
rank's part. Only devices know which gradients are not finite: beside the last bucket goes the weight of each parameter
once more, on the device, which is 0 if its gradient was left out there. By these weights all is normalized on the
device, and nothing is read back. Each operation costs the host about 12 us, so there are few for each bucket.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from straggle.backward.stages import StagePlan
from straggle.merge.round.buffers import Share, StageBuffers
from straggle.merge.round.memory import Flat, PlainNumbers
from straggle.merge.rows.device_numbers import Counts
from straggle.merge.rows.telemetry import OF_THE_CORE, Columns
from straggle.merge.wire.groups import Group
from straggle.source.source import Slot

_LOOKED_AT_IN_ONE_PASS = (torch.float32, torch.float64, torch.float16)


class QueuedBuffers(StageBuffers):
    """`StageBuffers` of which the host waits for `send_rows` only, and the device's queue for all else.

    A bucket with a gradient that is not finite is left out as a whole: to mask each by itself takes a kernel for each.
    ``usable``: after `normalize`, on the device, whether any rank had gradients that were all finite; if not, all
    merged gradients are zeros. ``None``: hosts know it.
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
        columns: Columns = OF_THE_CORE,
    ) -> None:
        self.usable: Tensor | None = None
        # of all parameters, in the order of the buckets: weights, then presence, as this rank has put them in
        self._known = array("f", bytes(8 * len(slots)))
        self._control = torch.empty(0)
        super().__init__(
            plan,
            slots,
            world_size,
            num_state=num_state,
            drop_nonfinite=drop_nonfinite,
            wire_dtype=wire_dtype,
            columns=columns,
        )
        self._plain_known = PlainNumbers(self._control[self._rows.length :])
        self._num_bytes += self._control.nbytes
        self._note_flats([flat for bucket in self._buckets for flat in bucket])

    def _note_flats(self, flats: Sequence[Flat]) -> None:
        self._order = [index for flat in flats for index in flat.parameters]
        self._sizes = [len(flat.parameters) for flat in flats]
        self._firsts = [flat.parameters[0] for flat in flats]  # flats are made again, and these stay
        ends = [sum(self._sizes[: number + 1]) for number in range(len(flats))]
        self._starts = dict(
            zip(self._firsts, (end - size for end, size in zip(ends, self._sizes, strict=True)), strict=True)
        )
        self._device = device = flats[-1].gradients.device  # on which the numbers of all are
        self._found_on = {own: torch.zeros(len(flats), device=own) for own in {flat.gradients.device for flat in flats}}
        each = {own: torch.split(found, 1) for own, found in self._found_on.items()}
        self._found = {
            flat.parameters[0]: each[flat.gradients.device][number] for number, flat in enumerate(flats)
        }  # 1 if a bucket has a gradient that is not finite
        self._scale_on = {own: torch.tensor(1 / self._world_size, device=own) for own in self._found_on}
        flat_of = [number for number, size in enumerate(self._sizes) for _ in range(size)]
        self._flat_of = torch.tensor(flat_of, device=device)  # for each parameter
        self._first_of = torch.tensor([self._starts[first] for first in self._firsts], device=device)  # for each bucket
        self._world = torch.tensor(float(self._world_size), device=device)

    # -- where the numbers lie

    def _divides_by(self) -> int:
        return 1 if self._drop_nonfinite else self._world_size  # or in the pass that looks at all elements anyway

    def _numbers_of(self, num_parameters: int) -> int:  # noqa: ARG002
        return 0

    def _numbers_with_last(self) -> int:
        return len(self._slots) + 1 if self._drop_nonfinite else 0

    def _place_of_rows(self, with_last: Tensor) -> Tensor:
        self._numbers = with_last  # of each parameter its weight; and how many ranks had nothing usable
        if not len(self._control):
            self._control = torch.zeros(self._rows.length + len(self._known))
        return self._control

    def begin(self) -> None:
        super().begin()
        self.usable = None
        if self._drop_nonfinite:
            for found in self._found_on.values():
                found.zero_()

    # -- what this rank gives

    def _write_full(self, flat: Flat, weight: float) -> None:
        self._note(flat, array("f", [weight]) * len(flat.parameters), array("f", [1.0]) * len(flat.parameters))

    def _write_shares(self, flat: Flat, own: Sequence[Share]) -> None:
        weights = array("f", [share.weight for share in own])
        self._note(flat, weights, array("f", [float(share.present) for share in own]))
        self._clear_absent(flat, own)

    def _note(self, flat: Flat, weights: array[float], presence: array[float]) -> None:
        start, count = self._starts[flat.parameters[0]], len(weights)
        # on the host: they go with the rows, over gloo, and no kernel waits for them
        self._known[start : start + count] = weights
        start += len(self._slots)
        self._known[start : start + count] = presence

    def _leave_out_nonfinite(self, flat: Flat) -> None:
        """Divide by the number of ranks, and make zeros of all gradients of a bucket if one is not finite."""
        if not len(flat.gradients):
            return
        # all of this is queued behind the bucket's gradients: whether one is not finite nobody on the host knows
        found, scale = self._found[flat.parameters[0]], self._scale_on[flat.gradients.device]
        data = torch.view_as_real(flat.gradients) if flat.gradients.is_complex() else flat.gradients
        if data.dtype in _LOOKED_AT_IN_ONE_PASS:
            torch._amp_foreach_non_finite_check_and_unscale_([data], found, scale)
        else:
            data.mul_(scale)
            found.copy_(~(torch.linalg.vector_norm(data, torch.inf) < torch.inf))  # NaN is not less either
        # also where nothing was found: to ask first would be to wait for the device
        flat.gradients.masked_fill_(found.bool(), 0.0)

    def _count_nonfinite(self) -> None:
        """Write the weights on the device, before the last bucket goes: the buckets were all looked at."""
        if not self._drop_nonfinite:
            return
        count = len(self._slots)
        weights, unusable = self._numbers[:count], self._numbers[count:]
        found = self._all_found()
        # the device's own weights, 0 where a bucket was left out: the host's say what it gave, not what was in it
        weights.copy_((1 - found)[self._flat_of])
        known = self._known[:count]
        if known.count(known[0]) < count:
            weights.mul_(torch.tensor(known, dtype=weights.dtype).to(weights.device, non_blocking=True))
        elif known[0] != 1.0:
            weights.mul_(known[0])
        if any(known):
            unusable.copy_(found.amax())
        else:
            unusable.fill_(1.0)

    def _all_found(self) -> Tensor:
        """`_found` of all buckets, on the device of the numbers."""
        found = self._found_on[self._device]
        for device, others in self._found_on.items():
            if device != self._device:
                found = found + others.to(self._device, non_blocking=True)
        return found

    def send_rows(self, group: Group) -> dist.Work:
        # after all buckets: a weight may be written until the last one is launched
        self._plain_known.write(self._known)
        return group.all_reduce(self._control)

    # -- what came of it

    def _normalize(self, flats: Sequence[Flat]) -> None:
        new = [flat for flat in flats if flat.parameters[0] not in self._merged]
        for flat in new:
            if flat.wire is not None:
                flat.gradients.copy_(flat.wire)
        known, count = self._plain_known.copy(2 * len(self._slots)), len(self._slots)
        weights, presence = known[:count], known[count:]
        if weights.count(self._world_size) == presence.count(self._world_size) == count:  # as in nearly every step
            self._merged = dict.fromkeys(self._order, Share(float(self._world_size), True))
        else:
            self._merged = dict(zip(self._order, map(Share, weights, map(bool, presence)), strict=True))
        if not self._drop_nonfinite:
            self._scale_by_host(new, weights)
        elif any(weights):
            self._scale_on_device(new, weights)

    def _scale_by_host(self, flats: Sequence[Flat], weights: Sequence[float]) -> None:
        for flat in flats:
            start = self._starts[flat.parameters[0]]
            own = weights[start : start + len(flat.parameters)]
            if own.count(own[0]) == len(own):
                if own[0] not in (0.0, self._world_size):
                    flat.gradients.mul_(self._world_size / own[0])
                continue
            for index, weight in zip(flat.parameters, own, strict=True):
                if weight > 0:
                    self.views[index].mul_(self._world_size / weight)

    def _scale_on_device(self, flats: Sequence[Flat], weights: Sequence[float]) -> None:
        """By 1.0 exactly if all ranks gave all, and by 0 if none did: the weights are then those of the hosts, or 0."""
        # read by a fused optimizer on the device, so that a step without anything usable changes nothing
        self.usable = self._numbers[-1] < self._world
        places: Sequence[int]
        if len(flats) == len(self._firsts) and weights.count(weights[0]) == len(weights):  # as in nearly every step
            sums = self._numbers.index_select(0, self._first_of)  # one for each bucket
            scaled, places = [flat.gradients for flat in flats], range(len(flats))
        else:
            sums = self._numbers[:-1]
            scaled, places = self._scaled_apart(flats, weights)
        scales = torch.div(self._world, sums).nan_to_num_(posinf=0.0).mul_(self.usable).unbind()
        own = [self._to(scales[place], data.device) for place, data in zip(places, scaled, strict=True)]
        torch._foreach_mul_(scaled, own)

    def _scaled_apart(self, flats: Sequence[Flat], weights: Sequence[float]) -> tuple[list[Tensor], Sequence[int]]:
        """What is scaled by itself, because its weight is another, and the place of the weight."""
        scaled, places = list[Tensor](), list[int]()
        for flat in flats:
            start = self._starts[flat.parameters[0]]
            own = weights[start : start + len(flat.parameters)]
            if own.count(own[0]) == len(own):
                if own[0] > 0:
                    scaled.append(flat.gradients)
                    places.append(start)
            else:
                there = [place for place, weight in enumerate(own) if weight > 0]
                scaled += [self.views[flat.parameters[place]] for place in there]
                places += [start + place for place in there]
        return scaled, places

    @staticmethod
    def _to(numbers: Tensor, device: torch.device) -> Tensor:
        return numbers if numbers.device == device else numbers.to(device, non_blocking=True)

    def counts(self) -> Counts | None:
        if self.usable is None:
            return None
        numbers = torch.cat([self._all_found(), self._numbers[-1:]])
        return Counts(self._to(numbers, self._slots[0].device), self._sizes, self._world_size)  # whose marks are asked
