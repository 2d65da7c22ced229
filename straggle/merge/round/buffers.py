"""Flat buffers that hold one step's gradients, their weights and the telemetry, ready for allreduce.

A contribution is scaled by ``1 / world_size`` as it is copied in, as DDP does, so that after the allreduce
``merged = sum(w * g) / sum(w) = buffer * (world_size / sum(w))``, which is the buffer itself when no rank is late.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from straggle.backward.stages import STAGE_BYTES, StagePlan, mean_over
from straggle.merge.round.finite import FiniteGradients
from straggle.merge.round.memory import (
    ALIGN,
    BucketMemory,
    Flat,
    NumbersWithData,
    PlainNumbers,
    RowNumbers,
    between_parts,
    view_of,
)
from straggle.merge.rows.device_numbers import Counts
from straggle.merge.rows.telemetry import COLUMN, NONFINITE, OF_THE_CORE, Columns
from straggle.merge.wire.groups import Group, ProcessGroups
from straggle.source.source import Slot

_SENT_BYTES = COLUMN["sent_bytes"]
_FREED_BYTES = STAGE_BYTES  # DDP's first bucket has as many
_LARGE_BYTES = 2**18  # a gradient of this size has left the cache when the last one of its bucket is copied


@dataclass(frozen=True)
class Share:
    """What is in the buffer for one parameter: a weight, and whether a gradient or an estimate is there.

    After the merge, the sum over ranks. Weight without presence: the graph did not use the parameter, a zero gradient.
    """

    weight: float
    present: bool


def keep_freed_memory() -> None:
    """Let glibc's allocator keep up to 50 MB of what is freed, as it does under DDP.

    It learns from the largest block of up to 32 MB that was ever freed, and gives the rest back to the system: a large
    gradient may then come in fresh pages in every step. DDP's first buckets are such blocks, stages' buffers are often
    smaller. Nobody writes to this one, so it takes no memory.
    """
    torch.empty(_FREED_BYTES, dtype=torch.uint8, device="cpu")


class StageBuffers:
    """One step's gradients of all stages. Not thread-safe: the coordinator's lock guards it.

    ``views`` holds one gradient for each slot. With the last bucket go ``rows``, a row of telemetry for each rank,
    and ``state``, a message of ``num_state`` numbers of the module's other state (`state/averages.py`). After
    `use_telemetry` the rows go in a message of their own, after all buckets. ``drop_nonfinite``: gradients with
    elements that are not finite are left out. ``wire_dtype``: that in which float32 gradients travel.
    ``columns``: where rows have their numbers.
    ``by_few_kernels``: several gradients should come by one call, which a device needs; on the CPU that saves nothing.
    """

    is_queued = False  # the host waits for the merge, and reads what came of it
    usable: Tensor | None = None

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
        self._world_size = world_size
        self._slots = slots
        self._drop_nonfinite = drop_nonfinite
        self.by_few_kernels = self.is_queued or slots[0].tensor.is_cuda
        self.state = torch.zeros(num_state, dtype=torch.float64)
        self._memory_for = NumbersWithData(world_size, wire_dtype).place
        self._merged: dict[int, Share] = {}  # of the buckets that are normalized
        self._divisor = self._divides_by()
        self._scale = torch.tensor(1 / self._divisor)  # a tensor, because a number is made into one at each call
        self.views: list[Tensor] = [torch.empty(0)] * len(slots)
        self._finite = FiniteGradients(self.views)
        self._stages = plan.buckets()
        buckets = [[index for stage in bucket for index in stage.parameters] for bucket in self._stages]
        self._rows = RowNumbers(world_size, world_size * columns.row_length(len(plan.stages)))
        self._num_last = self._numbers_with_last()
        placed = [self._allocate(bucket, last=bucket is buckets[-1]) for bucket in buckets]
        self._buckets = [flats for flats, _ in placed]
        # before the rows are placed: what is set aside has no view of rows
        self._memory = [BucketMemory.new(flats, self.views, rows) for flats, rows in placed]
        self._rows.place(self._place_of_rows(placed[-1][1]))
        self._num_bytes = sum(map(self._bytes_of, range(len(buckets))))  # of all messages, sent once
        self._again_bytes = 0  # of those that are sent once more, in other groups
        self._set_aside: dict[int, BucketMemory] = {}  # of some buckets, because the loop had a gradient in it
        for memory in self._memory:
            memory.lent.begin_use()

    @property
    def rows(self) -> Tensor:
        """Those of all ranks, shape (ranks, columns)."""
        return self._rows.table

    @property
    def telemetry(self) -> Tensor:
        """The memory that the rows lie in, and what is sent with them."""
        return self._rows.numbers

    def _divides_by(self) -> int:
        """What gradients are divided by as they are put in."""
        return self._world_size

    def _numbers_with_last(self) -> int:
        """How many numbers the last bucket has beside its tail: the rows."""
        return self._rows.length

    def _place_of_rows(self, with_last: Tensor) -> Tensor:
        """Where the rows lie; ``with_last``: the numbers that the last bucket has beside its tail."""
        return with_last

    def _numbers_of(self, num_parameters: int) -> int:
        """How many numbers the tail of so many gradients has: weights, then presence flags."""
        return 2 * num_parameters

    def use_telemetry(self, numbers: Tensor) -> None:
        """Where ``rows`` lie, from here on to the end of the step."""
        self._rows.use(numbers)

    def begin(self) -> None:
        """A new step begins."""
        # all of it: the buffers are those of another step, and nothing of that may be counted in this one
        self._merged, self._again_bytes = {}, 0
        self._finite.begin()
        self._rows.begin()

    def renew_held(self) -> None:
        """Use other memory for each bucket of which the loop has a gradient still: that one stays as it is.

        Between two steps, when no ``p.grad`` is among them.
        """
        self._rows.use_usual()
        for number, memory in enumerate(self._memory):
            if not memory.lent.are_back:
                self._renew(number)
                self._memory[number].lent.begin_use()  # not in `_renew`, whose variables have a gradient
            elif self._set_aside:
                self._set_aside.pop(number, None)

    def _renew(self, number: int) -> None:
        """Fresh memory is slow, so if a loop keeps the gradients of its last step, two take turns."""
        old, other = self._memory[number], self._set_aside.get(number)
        self._set_aside[number] = old
        last = number == len(self._buckets) - 1
        if other is None or not other.lent.are_free:
            indices = [index for flat in old.flats for index in flat.parameters]
            flats, rows = self._allocate(indices, last=last)
            other = BucketMemory.new(flats, self.views, rows)
        self._memory[number], self._buckets[number] = other, other.flats
        order = (index for flat in other.flats for index in flat.parameters)
        for index, gradient in zip(order, other.lent.gradients, strict=True):
            self.views[index] = gradient
        if last:
            self._rows.place(self._place_of_rows(other.rows))

    def accumulate(
        self, index: int, gradient: Tensor, *, add: bool, weight: float = 1.0, complete: bool = False
    ) -> None:
        """Write ``weight * gradient`` of parameter ``index``, or add it; ``complete``: that is all of it."""
        # or autograd would follow the buffer, and keep the graph
        if gradient.requires_grad:  # backward(create_graph=True)
            gradient = gradient.detach()
        if add:
            self.views[index].add_(gradient, alpha=weight / self._divisor)
        else:
            torch.mul(gradient, self._scale if weight == 1.0 else weight / self._divisor, out=self.views[index])
        if index in self._finite.large:
            self._finite.added(index, complete=complete)

    def accumulate_together(self, own: Sequence[tuple[int, Tensor]], *, add: bool, weight: float = 1.0) -> None:
        """The same for several parameters and their gradients, by few kernels; the bits are the same too."""
        views = [self.views[index] for index, _ in own]
        gradients = [gradient.detach() if gradient.requires_grad else gradient for _, gradient in own]
        if add:
            torch._foreach_add_(views, gradients, alpha=weight / self._divisor)
            return
        torch._foreach_copy_(views, gradients)
        if (scale := self._scale.item() if weight == 1.0 else weight / self._divisor) != 1.0:
            torch._foreach_mul_(views, scale)

    def read(self, index: int, weight: float = 1.0) -> Tensor:
        """A copy of this rank's gradient of parameter ``index`` as it was put in with ``weight``."""
        return self.views[index] * (self._divisor / weight)

    def write_state(self, given: Tensor | None) -> None:
        """What this rank gives of the module's other state, before the last bucket goes."""
        if len(self.state):
            self.state.zero_() if given is None else self.state.copy_(given)

    def write_telemetry(self, rank: int, row: array[float]) -> None:
        """This rank's telemetry, before the last bucket goes."""
        apart_bytes = self.telemetry.nbytes if self._rows.are_apart else 0
        row[_SENT_BYTES] = self._num_bytes + self._again_bytes + apart_bytes
        self._rows.write(rank, row)

    def copy_rows(self) -> array[float]:
        """The merged rows, one after the other, for who goes on when these buffers are used again."""
        return self._rows.copy()

    def all_reduce(
        self, bucket: int, shares: Mapping[int, Share], groups: ProcessGroups, weight: float = 1.0
    ) -> list[dist.Work]:
        """Start the merge of a bucket; a parameter not in ``shares`` has its full gradient in it, with ``weight``."""
        works = []
        for flat in self._buckets[bucket]:
            if shares.keys().isdisjoint(flat.parameters):
                self._write_full(flat, weight)
            else:
                full = Share(weight, True)
                self._write_shares(flat, [shares.get(index, full) for index in flat.parameters])
            # after the weights are written: what is left out sets its own to 0
            if self._drop_nonfinite:
                self._leave_out_nonfinite(flat)
            # the rows go with this bucket, the last one: all others were looked at before
            if (self._finite.has_left_out or self.is_queued) and flat is self._buckets[-1][-1]:
                self._count_nonfinite()
            # last before it goes: what travels is what is left after all that
            if flat.wire is not None:
                flat.wire.copy_(flat.gradients)
            works += flat.all_reduce(groups)
        return works

    def send_rows(self, group: Group) -> dist.Work:
        """Start the merge of the rows, after that of all buckets, if the buffers are queued."""
        raise NotImplementedError

    def _write_full(self, flat: Flat, weight: float) -> None:
        """All gradients of the bucket are in it, with this weight."""
        flat.plain_tail.fill(1.0)
        if weight != 1.0:
            flat.tail[: len(flat.parameters)] = weight

    def _write_shares(self, flat: Flat, own: Sequence[Share]) -> None:
        """This is in the bucket for each of its parameters."""
        tail = [share.weight for share in own] + [float(share.present) for share in own]
        flat.tail.copy_(torch.tensor(tail, dtype=flat.tail.dtype), non_blocking=True)
        self._clear_absent(flat, own)

    def _clear_absent(self, flat: Flat, own: Sequence[Share]) -> None:
        for index, share in zip(flat.parameters, own, strict=True):
            if not share.present:
                self.views[index].zero_()

    def counts(self) -> Counts | None:
        """What only the device knows of the merge; ``None``: nothing."""
        return None

    def merge_telemetry(self, group: Group) -> dist.Work:
        """Start the merge of the rows apart from the last bucket, if `use_telemetry` has made them so."""
        self._count_nonfinite()
        return group.all_reduce(self.telemetry)

    def _count_nonfinite(self) -> None:
        if self._finite.has_left_out and self._rows.rank >= 0:  # otherwise the row has 0 already
            self.rows[self._rows.rank, NONFINITE] = self._finite.num_left_out()

    def num_messages(self, bucket: int) -> int:
        """How many messages a bucket goes in."""
        return sum(len(flat.messages) for flat in self._buckets[bucket])

    def _bytes_of(self, bucket: int) -> int:
        return sum(message.nbytes for flat in self._buckets[bucket] for message in flat.messages)

    def resend(self, bucket: int, groups: ProcessGroups) -> list[dist.Work]:
        """Start the merge of a bucket with what is in it now."""
        self._again_bytes += self._bytes_of(bucket)
        return [work for flat in self._buckets[bucket] for work in flat.all_reduce(groups)]

    def broadcast(self, bucket: int, groups: ProcessGroups, source: int) -> list[dist.Work]:
        """Start to give a bucket that is merged to all; ``source``: the place of the rank that has it."""
        return [work for flat in self._buckets[bucket] for work in flat.broadcast(groups, source)]

    def take_over(self, other: StageBuffers, lost: Collection[int], kept: Mapping[int, Sequence[Tensor]]) -> None:
        """Copy what another has, but for the ``lost`` buckets, into these, which are zeros.

        ``kept``: by their buckets, the messages that it does not have any more as they were.
        """
        self._again_bytes = other._again_bytes
        self._finite.take_over(other._finite)
        for number, (mine, theirs) in enumerate(zip(self._buckets, other._buckets, strict=True)):
            if number in lost:
                continue
            was = kept.get(number) or [message for its in theirs for message in its.messages]
            for message, old in zip([message for flat in mine for message in flat.messages], was, strict=True):
                message.copy_(old)
            for flat, its in zip(mine, theirs, strict=True):
                if flat.wire is not None:  # of a bucket that was not launched, the messages have nothing yet
                    flat.gradients.copy_(its.gradients)

    def _leave_out_nonfinite(self, flat: Flat) -> None:
        """Make zeros with weight 0 of gradients of a bucket that have elements which are not finite."""
        self._finite.leave_out(flat)

    def weights_in(self, bucket: int) -> tuple[float, ...]:
        """For each stage of a bucket, the mean weight over its elements of what is in it now."""
        weights: dict[int, float] = {}
        for flat in self._buckets[bucket]:
            weights |= zip(flat.parameters, flat.plain_tail.tolist(), strict=False)  # then their presence
        return tuple(
            mean_over([weights[i] for i in stage.parameters], [self.views[i].numel() for i in stage.parameters])
            for stage in self._stages[bucket]
        )

    def normalize(self) -> list[Share]:
        """After all merges: scale each gradient to the weighted mean, in place, and say what is in it."""
        self._normalize([flat for bucket in self._buckets for flat in bucket])
        return [self._merged[index] for index in range(len(self.views))]

    def weight_of(self, index: int) -> float:
        """What of all ranks is in a parameter's gradient, once it is normalized; 0 if it is not."""
        return self._merged[index].weight if index in self._merged else 0.0

    def normalize_bucket(self, bucket: int) -> dict[int, Share]:
        """The same for the parameters of one bucket, after its merge; it may be asked again."""
        self._normalize(self._buckets[bucket])
        return {index: self._merged[index] for flat in self._buckets[bucket] for index in flat.parameters}

    def _normalize(self, flats: Sequence[Flat]) -> None:
        of_all = Share(float(self._world_size), True)
        new = [flat for flat in flats if flat.parameters[0] not in self._merged]
        for flat, tail in zip(new, _tails(new), strict=True):
            if flat.wire is not None:
                flat.gradients.copy_(flat.wire)
            count = len(flat.parameters)
            # as it is, without a kernel: of what all ranks have given in full there is nothing to scale
            if tail.count(self._world_size) == len(tail):  # of all ranks, as in nearly every step
                self._merged |= dict.fromkeys(flat.parameters, of_all)
                continue
            for index, weight, present in zip(flat.parameters, tail[:count], tail[count:], strict=True):
                if weight == self._world_size and present:
                    self._merged[index] = of_all
                else:
                    self._merged[index] = Share(weight, present > 0)
                    if weight > 0:
                        self.views[index].mul_(self._world_size / weight)

    def _is_large(self, slot: Slot) -> bool:
        return self._drop_nonfinite and not self.by_few_kernels and slot.nbytes >= _LARGE_BYTES

    def _allocate(self, indices: Sequence[int], *, last: bool) -> tuple[list[Flat], Tensor]:
        """Memory for the parameters of one bucket; for the last one, also for the numbers that only this has."""
        slots = self._slots
        alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index in indices:
            alike.setdefault((slots[index].dtype, slots[index].device), []).append(index)
        flats, beside = list[Flat](), torch.empty(0)
        for position, ((dtype, device), own) in enumerate(alike.items()):
            starts, end = [], 0
            for index in own:
                starts.append(end)
                end += -(-slots[index].numel // ALIGN) * ALIGN
            num_tail, is_last = self._numbers_of(len(own)), last and position == len(alike) - 1
            placed = self._memory_for(end, num_tail + (self._num_last if is_last else 0), dtype, device)
            data, messages, tail = placed.gradients, placed.messages, placed.numbers[:num_tail]
            for index, start in zip(own, starts, strict=True):
                self.views[index] = view_of(data, start, slots[index].tensor)
            if is_last and len(self.state):
                self.state = self.state.to(device)
                messages = (*messages, self.state)
            ends = {i: (start, start + slots[i].numel) for i, start in zip(own, starts, strict=True)}
            large = tuple(i for i in own if self._is_large(slots[i]))
            self._finite.sum_up(large)
            between, both = between_parts(data, [ends[i] for i in large]), placed.with_numbers(num_tail)
            plain = PlainNumbers(tail)
            flats.append(Flat(tuple(own), data, tail, messages, placed.wire, plain, large, between, both))
            if is_last:
                beside = placed.numbers[num_tail:]
        return flats, beside


def _tails(flats: Sequence[Flat]) -> list[list[float]]:
    """The tail of each of these; those on a device come by one copy, because each is waited for."""
    if flats and flats[0].tail.is_cuda and len({flat.tail.device for flat in flats}) == 1:
        numbers = torch.cat([flat.tail for flat in flats]).tolist()
        ends = list(accumulate(len(flat.tail) for flat in flats))
        return [numbers[end - len(flat.tail) : end] for flat, end in zip(flats, ends, strict=True)]
    return [flat.plain_tail.tolist() for flat in flats]


def bytes_on_wire(slots: Iterable[Slot], wire_dtype: torch.dtype | None) -> int:
    """Bytes of all gradients as they travel: those of float32 in ``wire_dtype``, if that is given."""
    return sum(
        own.numel * wire_dtype.itemsize if wire_dtype and own.dtype is torch.float32 else own.nbytes for own in slots
    )
