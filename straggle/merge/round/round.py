"""One step of one rank on its way through the merge: what is in its buffers, what is missing, what is on its way.

Nothing here is thread-safe: the coordinator's lock guards it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch.distributed as dist
from torch import Tensor

from straggle.backward.stages import Stage, StagePlan, mean_over
from straggle.merge.late.device_watch import QueuedStep
from straggle.merge.round.buffers import Share, StageBuffers
from straggle.merge.round.step_passes import EqualPasses, Passes
from straggle.merge.rows.step_record import StepRecord
from straggle.merge.rows.table import Table
from straggle.merge.rows.telemetry import Row
from straggle.merge.state.exchange import NOTHING_GIVEN
from straggle.merge.wire.channel import Channel
from straggle.merge.wire.groups import ProcessGroups, succeeded
from straggle.policies.estimators import FillIn
from straggle.report import Cause, Phase
from straggle.source.source import Slot

Finished = tuple[int, Tensor, float]  # a parameter, its gradient of one backward pass, and when it was finished


class Usage:
    """In which backward passes of a step, by their number, each parameter has ever had a gradient.

    So a head that belongs to the second loss of a step is not counted as missing, or as a zero, in the first.
    """

    def __init__(self) -> None:
        self._over = 0  # passes that were over in any step, as a set of bits
        self._all = 0  # those that gave every parameter a gradient
        self._some: dict[int, int] = {}  # for each of the others' parameters

    def add_all(self, number: int) -> None:
        """Pass ``number`` is over, and had a gradient for every parameter."""
        self._over |= 1 << number
        self._all |= 1 << number

    def add(self, indices: Iterable[int], number: int) -> None:
        """Pass ``number`` is over, and had gradients for these parameters and no others."""
        self._over |= 1 << number
        for index in indices:
            self._some[index] = self._some.get(index, 0) | 1 << number

    def by_hand(self, index: int) -> bool | None:
        """Whether a loop computes the gradient of parameter ``index`` by itself; ``None``: no pass was over so far."""
        return not (self._all or self._some.get(index)) if self._over else None

    def passes(self, index: int, num_passes: int) -> int:
        """The passes of a step in which parameter ``index`` may have a gradient, as a set of bits.

        One that was never over may have one, and all may if none ever had.
        """
        every, used = (1 << num_passes) - 1, self._all | self._some.get(index, 0)
        return (used | ~self._over) & every or every if used else every


class Layout:
    """A plan as the merge needs it: which bucket ends with which stage, and which parameter is in which."""

    def __init__(self, plan: StagePlan, slots: Sequence[Slot]) -> None:
        self.plan = plan
        self.buckets: list[tuple[Stage, ...]] = plan.buckets()
        self.bucket_names = [", ".join(stage.name for stage in bucket) for bucket in self.buckets]
        self.bucket_ends = [sum(len(bucket) for bucket in self.buckets[: b + 1]) for b in range(len(self.buckets))]
        self.stage_of = {index: number for number, stage in enumerate(plan.stages) for index in stage.parameters}
        self.numel = [slot.numel for slot in slots]

    def by_stage(self, shares: Sequence[float]) -> tuple[float, ...]:
        """The mean share over the elements of each stage, from a share for each parameter."""
        if (lowest := min(shares)) == max(shares):
            return (lowest,) * len(self.plan.stages)
        return tuple(mean_over([shares[i] for i in s.parameters], self._of(s)) for s in self.plan.stages)

    def _of(self, stage: Stage) -> list[int]:
        return [self.numel[index] for index in stage.parameters]


@dataclass(frozen=True)
class Contribution:
    """What a rank submits: for each parameter the share of the step's micro-batches, and the weights of estimates.

    ``late``: it was cut short. ``cause``: why something is missing, if anything is.
    """

    computed: Sequence[float]
    estimated: Mapping[int, float]
    late: bool = False
    cause: Cause | None = None


@dataclass(frozen=True)
class RoundTerms:
    """Among whom a step is merged, and what a gradient counts in it.

    ``groups``: ``None`` while there are none; ``generation``: how many there were before them. ``all_or_nothing``: all
    that the rank computes goes into the merge, or nothing does.
    """

    groups: ProcessGroups | None
    generation: int = 0
    all_or_nothing: bool = False


class Round:
    """One step; ``passes`` are this rank's."""

    def __init__(
        self,
        step: int,
        layout: Layout,
        buffers: StageBuffers,
        terms: RoundTerms,
        *,
        usage: Usage | None = None,
        passes: Passes | None = None,
    ) -> None:
        self.step = step
        self.passes = passes or EqualPasses()
        self.buffers = buffers
        self.closed = False  # all collectives are launched
        self.stood_in = False
        self.had_work: bool | None = None  # whether what was not computed is missing; `None`: nothing was
        self.joins_over: int | None = None  # if it was stood in for: as its row has it
        self.idle, self.entered = False, True  # whether its rank had no data for it, and had entered it
        self.stage_s = [math.nan] * len(layout.plan.stages)  # when each stage was complete
        self.layout = layout
        self.launched: list[list[dist.Work]] = []  # of each bucket whose merge has begun
        self.marks: QueuedStep | None = None  # if the host does not wait for the merge
        self.rows_sent: dist.Work | None = None  # the message of the rows, if they do not go with the last bucket
        self.abandoned = False  # the rank has given it up: it was put out, or goes on in another step
        self.row: Row | None = None  # its telemetry
        self.table: Table  # the rows of all ranks, if `is_read`
        self.record: StepRecord  # what happened in the step, once it is merged
        self.is_read = False
        self.given = NOTHING_GIVEN  # of the module's other state
        self.sent: Mapping[str, Tensor] | None = None  # what ranks have sent each other of it
        self.differing: tuple[str, ...] = ()  # the names of tensors that were seen to differ between ranks
        self.notes: object = None  # what the wing that completes rounds keeps with it
        self._last_shares: Mapping[int, Share] = {}  # of the buckets that were not launched when it was closed
        self.groups = terms.groups
        self.generation = terms.generation  # of the groups by which it is merged
        self.rows_tell_all = True  # no gradients are in it of a rank that has no row
        self._all_or_nothing = terms.all_or_nothing
        self._usage = usage or Usage()
        self.num_in = [0] * len(layout.numel)  # for each parameter, the gradients that are in, one for each pass
        self.last_in = [-1] * len(layout.numel)  # and the number of the last of these passes
        self._num_in_pass = 0  # parameters whose gradient of the running pass is in
        self._num_dropped = 0  # gradients that were in, and are dropped with the whole step
        self._unused: dict[int, int] = {}  # for some parameters, the passes that are over without a gradient: bits
        self.num_over = 0  # passes that are over
        self.max_over = sys.maxsize
        self._complete: set[int] = set()  # parameters of which all is in
        self.beside: dict[int, Tensor] = {}  # what the loop has added to some parameters' gradients by itself
        self._missing = [len(stage.parameters) for stage in layout.plan.stages]  # how many are not complete
        buffers.begin()

    def read_rows(self) -> Table:
        """Read the rows of all ranks, which are merged."""
        self.table, self.is_read = Table(self.buffers.copy_rows(), len(self.layout.plan.stages)), True
        return self.table

    @property
    def finished_ranks(self) -> list[int]:
        """Of a merged round, the ranks whose forward passes came to their end."""
        return self.table.finished_forward()

    @property
    def num_gradients(self) -> int:
        """Finished gradients that came in, over all micro-batches, also if a whole step was dropped with them."""
        return sum(self.num_in) + self._num_dropped

    def accumulate(self, finished: Sequence[Finished], number: int = 0) -> list[tuple[int, float]]:
        """Take these gradients of pass ``number``; the parameters that are complete with them, and since when."""
        num_in, last_in, buffers, complete = self.num_in, self.last_in, self.buffers, []
        weight, most = self.passes.weight_of(number), self.passes.most
        if together := len(finished) > 1 and buffers.by_few_kernels:
            self._accumulate_together(finished, weight)
        for index, gradient, at in finished:
            before = num_in[index]
            if not together:
                buffers.accumulate(index, gradient, add=before > 0, weight=weight, complete=before + 1 == most)
            last_in[index], num_in[index] = number, before + 1
            if before + 1 == most and index not in self.beside:
                complete.append((index, at))
        self._num_in_pass += len(finished)
        return complete

    def hold_beside(self, gradients: Mapping[int, Tensor]) -> None:
        """The loop has put these there before a pass: parts of the entire step's gradients, as that of a penalty.

        They are merged at the end, when it is known which share of the passes is in: so much of them counts.
        """
        for index, gradient in gradients.items():
            before = self.beside.get(index)
            self.beside[index] = gradient if before is None else before + gradient

    def add_beside(self, own: Contribution) -> list[int]:
        """Take the share of these that ``own`` has of the parameters; those that are complete with that."""
        for index, gradient in self.beside.items():
            if share := own.computed[index]:
                add, weight = self.num_in[index] > 0, self.passes.weight * share
                self.buffers.accumulate(index, gradient, add=add, weight=weight)
        return [index for index in self.beside if own.computed[index] == 1]

    def given_by_hand(self, index: int) -> bool | None:
        """Whether no pass gives parameter ``index`` its gradient; ``None``: that is not known so far."""
        return self._usage.by_hand(index)

    def place(self, gradients: Mapping[int, Tensor]) -> None:
        """Take these gradients, each the rank's own of the entire step: the loop computed them, no pass gave them."""
        weight, number = self.passes.weight, self.passes.number
        if together := self.buffers.by_few_kernels and bool(gradients):
            self._accumulate_together([(index, own, 0.0) for index, own in gradients.items()], weight)
        for index, gradient in gradients.items():
            if not together:
                self.buffers.accumulate(index, gradient, add=False, weight=weight, complete=True)
            self.num_in[index] = number

    def _accumulate_together(self, finished: Sequence[Finished], weight: float) -> None:
        """Put them into the buffers by few kernels, which a device needs; on the CPU that saves nothing."""
        alike: dict[bool, list[tuple[int, Tensor]]] = {}
        for index, gradient, _ in finished:
            alike.setdefault(self.num_in[index] > 0, []).append((index, gradient))
        for add, own in alike.items():
            self.buffers.accumulate_together(own, add=add, weight=weight)

    def end_pass(self, number: int) -> None:
        """Pass ``number`` is over: what it gave no gradient to is a computed zero."""
        num_in, self._num_in_pass = self._num_in_pass, 0
        if self.num_over >= self.max_over:
            return
        self.num_over += 1
        if num_in == len(self.last_in):
            self._usage.add_all(number)
            return
        self._usage.add((index for index, last in enumerate(self.last_in) if last == number), number)
        for index, last in enumerate(self.last_in):
            if last != number:
                self._unused[index] = self._unused.get(index, 0) | 1 << number

    def begin_pass(self) -> None:
        """A pass begins; the one before it may have failed."""
        self._num_in_pass = 0

    def read(self, index: int) -> Tensor:
        """A copy of this rank's own gradient of parameter ``index``, as far as it is in."""
        return self.buffers.read(index, self.passes.weight)

    def parameter_complete(self, index: int, after_s: float) -> bool:
        """Merge what is complete now; true if the parameter's stage is, ``after_s`` seconds into the step."""
        stage = self.layout.stage_of[index]
        self._complete.add(index)
        self._missing[stage] -= 1
        if self._missing[stage] > 0:
            return False
        self.stage_s[stage] = after_s
        self._launch_complete()
        return True

    def end_early(self) -> list[int]:
        """The rank's part is submitted, and no more passes come: parameters of which all is in after all."""
        self.passes = self.passes.as_submitted()
        most = self.passes.number
        others = self._complete.union(self.beside)
        return [index for index, count in enumerate(self.num_in) if count == most > 0 and index not in others]

    def finished_part(self, phase: Phase) -> Contribution:
        """What a rank computed that is stood in for in this phase."""
        computed = self._computed()
        late = min(computed) < 1
        return Contribution(computed, {}, late, phase if late else None)

    def own_part(self, phase: Phase, *, truncated: bool, failed: bool) -> Contribution:
        """What a rank computed that left its block in this phase; ``failed``: a backward pass did not come to its end.

        Where the graph did not use a parameter, its gradient is a computed zero.
        """
        if truncated:
            return Contribution(self._computed(), {}, True, phase)
        if failed and min(computed := self._computed()) < 1:
            return Contribution(computed, {}, False, "error")
        if not any(self.num_in):
            return Contribution([0.0] * len(self.num_in), {}, False, "skipped" if self.passes.number else None)
        if self.passes.are_owed and self.num_over < self.passes.number:
            return Contribution(self._computed(), {}, False, "skipped")
        return Contribution([1.0] * len(self.num_in), {})

    def _computed(self) -> list[float]:
        """For each parameter the share of its passes that are in, or over without a gradient for it."""
        if not any(self._missing) and any(self.num_in):
            return [1.0] * len(self.num_in)
        computed = [self._share(index, count) for index, count in enumerate(self.num_in)]
        if self._all_or_nothing and min(computed) < 1:
            self._num_dropped += sum(self.num_in)
            self.num_in = [0] * len(computed)
            computed = [0.0] * len(computed)
        return computed

    def _share(self, index: int, num_in: int) -> float:
        may = self._usage.passes(index, self.passes.number)
        zeros = self._unused.get(index, 0) & may
        return self.passes.share(num_in + zeros.bit_count(), may.bit_count())

    def estimate(self, own: Contribution, fill_in: FillIn, slots: Sequence[Slot]) -> Contribution:
        """Put the estimator's contributions in for what is not in ``own``."""
        weights = {}
        for index, share in enumerate(own.computed):
            if share == 1:
                continue
            if (estimate := fill_in.missing(slots[index].parameter)) is not None:
                weights[index] = estimate.weight * (1 - share)
                add, weight = self.num_in[index] > 0, self.passes.weight * weights[index]
                self.buffers.accumulate(index, estimate.gradient, add=add, weight=weight)
        return replace(own, estimated=weights)

    def weights(self, own: Contribution) -> Sequence[float]:
        """What this rank's contribution to each parameter counts, relative to the rank's own weight."""
        if not own.estimated:
            return own.computed
        return [share + own.estimated.get(index, 0.0) for index, share in enumerate(own.computed)]

    def close(self, own: Contribution, weights: Sequence[float]) -> None:
        """Merge what is left, with these `weights`; the telemetry is in the buffers."""
        weight, number = self.passes.weight, self.passes.number
        there = own.estimated.keys() | {index for index in self.beside if own.computed[index]}
        shares = {
            index: Share(weight * weights[index], self.num_in[index] > 0 or index in there)
            for index in range(len(weights))
            if self.num_in[index] != number or not number
        }
        self.closed, self._last_shares = True, shares
        self._launch_rest()

    def _launch_complete(self) -> None:
        """Launch the buckets that are complete; the last one waits for the end of the step.

        The telemetry goes with it. Of a step that may be dropped as a whole, all wait.
        """
        if self._all_or_nothing:
            return
        ends = self.layout.bucket_ends
        while len(self.launched) < len(ends) - 1 and not any(self._missing[: ends[len(self.launched)]]):
            if not self._launch_allreduce({}):
                break

    def _launch_rest(self) -> None:
        """Launch what is left of a closed round."""
        while len(self.launched) < len(self.layout.buckets):
            if not self._launch_allreduce(self._last_shares):
                return
        if self.groups is not None and self.buffers.is_queued:
            self.rows_sent = self.buffers.send_rows(self.groups.control)
            if self.marks is not None:
                self.marks.submitted()

    def _launch_allreduce(self, shares: Mapping[int, Share]) -> bool:
        """Begin the merge of the next bucket; false if there are no groups at present."""
        if self.groups is None:
            return False
        if self.marks is not None:
            self.marks.launches(len(self.launched))
        self.launched.append(self.buffers.all_reduce(len(self.launched), shares, self.groups, self.passes.weight))
        return True

    # -- its collectives

    @property
    def works(self) -> list[tuple[dist.Work, str]]:
        """What was launched and is to be waited for by the host, each with the names of its stages."""
        if self.rows_sent is not None:
            return [(self.rows_sent, "rows of all ranks")]
        names = self.layout.bucket_names
        return [(work, name) for works, name in zip(self.launched, names, strict=False) for work in works]

    def come_after(self, channel: Channel, where: str) -> None:
        """What the calling thread queues from here on comes after the merge of all buckets."""
        for works, name in zip(self.launched, self.layout.bucket_names, strict=True):
            for work in works:
                channel.come_after(work, self.step, f"{where}, stage {name}")
        if self.marks is not None:
            self.marks.comes_after()
        self.launched = []

    def merged_early(self) -> list[int]:
        """The first buckets whose merges are over while those of others are not; none if all are over."""
        if self.buffers.is_queued:
            return []
        over = 0
        while over < len(self.launched) and all(map(succeeded, self.launched[over])):
            over += 1
        return list(range(over)) if over < len(self.launched) else []

    def merged_weights(self) -> tuple[float, ...]:
        """For each stage, the weight of all that was merged."""
        return tuple(chain.from_iterable(map(self.buffers.weights_in, range(len(self.layout.buckets)))))

    def go_on_in(self, groups: ProcessGroups, launched: list[list[dist.Work]], generation: int) -> None:
        """Go on in other groups, in which these messages of the first buckets are on their way or over."""
        self.groups, self.launched, self.generation = groups, launched, generation
        if self.closed:
            self._launch_rest()
        else:
            self._launch_complete()
