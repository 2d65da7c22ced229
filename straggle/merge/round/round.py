"""One step of one rank on its way through the merge: what is in its buffers, what is missing, what is on its way.

Nothing here is thread-safe: the coordinator's lock guards it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from straggle.backward.stages import Stage, StagePlan, mean_over
from straggle.merge.round.buffers import Share, StageBuffers
from straggle.merge.round.gradients_in import GradientsIn, Usage
from straggle.merge.round.step_passes import EqualPasses, Passes
from straggle.merge.rows.step_record import StepRecord
from straggle.merge.rows.table import Table
from straggle.merge.rows.telemetry import OF_THE_CORE, Columns, Row, absent_row
from straggle.merge.state.exchange import Given
from straggle.merge.wire.channel import Channel
from straggle.merge.wire.groups import ProcessGroups, succeeded
from straggle.policies.estimators import FillIn
from straggle.report import Cause, Phase
from straggle.source.source import Slot

if TYPE_CHECKING:
    from straggle.merge.late.device_watch import QueuedStep

Finished = tuple[int, Tensor, float]  # a parameter, its gradient of one backward pass, and when it was finished


class Layout:
    """A plan as the merge needs it: which bucket ends with which stage, and which parameter is in which.

    ``columns``: where rows have their numbers.
    """

    def __init__(self, plan: StagePlan, slots: Sequence[Slot], columns: Columns = OF_THE_CORE) -> None:
        self.plan, self.columns = plan, columns
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

    def absent_row(self) -> Tensor:
        """The row of a rank that takes no part."""
        return absent_row(len(self.plan.stages), self.columns)

    def table(self, rows: Tensor | array[float], *, probed: bool = False) -> Table:
        """These rows of all ranks."""
        return Table(rows, len(self.plan.stages), self.columns, probed=probed)

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
    that the rank computes goes into the merge, or nothing does. ``rows_tell_all``: no gradients are in it of a rank
    that has no row.
    """

    groups: ProcessGroups | None
    generation: int = 0
    all_or_nothing: bool = False
    rows_tell_all: bool = True


@dataclass(frozen=True)
class Submitted:
    """What this rank has said of its part in a step, whichever thread said it.

    ``row``: its telemetry; ``given``: of the module's other state. ``idle``: it had no data for the step; ``entered``:
    it had entered it. ``had_work``: whether what was not computed is missing; ``None``: nothing was. ``joins_over``: as
    the row has it, if the rank was stood in for.
    """

    row: Row
    given: Given
    idle: bool = False
    entered: bool = True
    had_work: bool | None = None
    joins_over: int | None = None


class Round:
    """One step; ``passes`` are this rank's.

    It is written by its methods only. Until it is closed it belongs to whoever submits, and then to whoever completes
    it; the coordinator's lock is held for both, but while messages are waited for.
    """

    def __init__(
        self,
        step: int,
        layout: Layout,
        buffers: StageBuffers,
        terms: RoundTerms,
        *,
        usage: Usage | None = None,
        passes: Passes | None = None,
        max_over: int | None = None,
        marks: QueuedStep | None = None,
    ) -> None:
        self.step, self.layout, self.buffers = step, layout, buffers
        self.terms = terms
        self.passes = passes or EqualPasses()
        num_in_stage = [len(stage.parameters) for stage in layout.plan.stages]
        self.gradients = GradientsIn(len(layout.numel), num_in_stage, usage or Usage(), max_over)
        self.beside: dict[int, Tensor] = {}  # what the loop has added to some parameters' gradients by itself
        # what this rank submits
        self.closed = False  # all collectives are launched
        self.stood_in = False
        self.submitted: Submitted | None = None
        self.abandoned = False  # the rank has given it up: it was put out, or goes on in another step
        # its messages
        self.launched: list[list[dist.Work]] = []  # of each bucket whose merge has begun
        self.marks = marks  # if the host does not wait for the merge
        self.rows_sent: dist.Work | None = None  # the message of the rows, if they do not go with the last bucket
        self._last_shares: Mapping[int, Share] = {}  # of the buckets that were not launched when it was closed
        # what came of it
        self.table: Table  # the rows of all ranks, if `is_read`
        self.record: StepRecord  # what happened in the step, once it is merged
        self.is_read = False
        self.sent: Mapping[str, Tensor] | None = None  # what ranks have sent each other of the modules' other state
        self.differing: tuple[str, ...] = ()  # the names of tensors that were seen to differ between ranks
        buffers.begin()

    @property
    def groups(self) -> ProcessGroups | None:
        """Those by which it is merged; ``None``: there are none at present."""
        return self.terms.groups

    @property
    def generation(self) -> int:
        """How many groups there were before these."""
        return self.terms.generation

    # -- what has happened to it

    def use(self, passes: Passes) -> None:
        """This rank's passes are these from here on."""
        self.passes = passes

    def stand_in(self) -> None:
        """It is submitted in the training thread's place."""
        self.stood_in = True

    def give_up(self) -> None:
        """The rank does not go on with it: it was put out, or goes on in another step."""
        self.abandoned = True

    def exchanged(self, differing: Sequence[str], sent: Mapping[str, Tensor]) -> None:
        """Ranks have ``sent`` each other what their modules hold beside gradients; these tensors differed."""
        self.differing, self.sent = tuple(differing), sent

    def recorded(self, record: StepRecord, sent: Mapping[str, Tensor] | None) -> None:
        """It is merged; ``sent`` of other state: ``None``: it was not, though it was asked for."""
        self.record, self.sent = record, sent

    def correct(self, record: StepRecord) -> None:
        """More is known of the step than the rows have, or than this rank knew when it was merged."""
        self.record = record

    def taken(self) -> None:
        """The training thread has it: nothing is waited for any more, unless its messages are queued on a device.

        Works keep memory of their own.
        """
        if not self.buffers.is_queued:
            self.launched = []

    def merged_without(self, *, probed: bool) -> Table:
        """It is that of a rank that takes part in none."""
        self.buffers.rows[:] = self.layout.absent_row()
        self.stood_in, self.sent = True, {}
        self.terms = replace(self.terms, generation=max(1, self.generation))  # other ranks merge than at first
        self.table = self.layout.table(self.buffers.rows.clone(), probed=probed)
        return self.table

    def read_rows(self) -> Table:
        """Read the rows of all ranks, which are merged."""
        self.table, self.is_read = self.layout.table(self.buffers.copy_rows()), True
        return self.table

    def rows_changed(self) -> None:
        """The rows in the buffers are to be read again."""
        self.is_read = False

    @property
    def finished_ranks(self) -> list[int]:
        """Of a merged round, the ranks whose forward passes came to their end."""
        return self.table.finished_forward()

    # -- this rank's gradients

    def accumulate(self, finished: Sequence[Finished], number: int = 0) -> list[tuple[int, float]]:
        """Take these gradients of pass ``number``; the parameters that are complete with them, and since when."""
        num_in, last_in, buffers, complete = self.gradients.by_parameter, self.gradients.last, self.buffers, []
        weight, most = self.passes.weight_of(number), self.passes.most
        if together := len(finished) > 1 and buffers.by_few_kernels:
            self._accumulate_together(finished, weight)
        for index, gradient, at in finished:
            before = num_in[index]
            if not together:
                buffers.accumulate(index, gradient, add=before > 0, weight=weight, complete=before + 1 == most)
            last_in[index], num_in[index] = number, before + 1
            # what the loop has put there itself comes at the end, so it is not complete before that
            if before + 1 == most and index not in self.beside:
                complete.append((index, at))
        self.gradients.taken(len(finished))
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
                add, weight = self.gradients.by_parameter[index] > 0, self.passes.weight * share
                self.buffers.accumulate(index, gradient, add=add, weight=weight)
        return [index for index in self.beside if own.computed[index] == 1]

    def place(self, gradients: Mapping[int, Tensor]) -> list[int]:
        """Take these gradients, each the rank's own of the entire step: the loop computed them, no pass gave them.

        Those that are complete with them come back: not those to which something `beside` is still to be added.
        """
        weight, number = self.passes.weight, self.passes.number
        if together := self.buffers.by_few_kernels and bool(gradients):
            self._accumulate_together([(index, own, 0.0) for index, own in gradients.items()], weight)
        for index, gradient in gradients.items():
            if not together:
                complete = index not in self.beside
                self.buffers.accumulate(index, gradient, add=False, weight=weight, complete=complete)
            self.gradients.by_parameter[index] = number
        self.gradients.placed(gradients)
        return [index for index in gradients if index not in self.beside]

    def _accumulate_together(self, finished: Sequence[Finished], weight: float) -> None:
        """Put them into the buffers by few kernels, which a device needs; on the CPU that saves nothing."""
        alike: dict[bool, list[tuple[int, Tensor]]] = {}
        for index, gradient, _ in finished:
            alike.setdefault(self.gradients.by_parameter[index] > 0, []).append((index, gradient))
        for add, own in alike.items():
            self.buffers.accumulate_together(own, add=add, weight=weight)

    def read(self, index: int) -> Tensor:
        """A copy of this rank's own gradient of parameter ``index``, as far as it is in."""
        return self.buffers.read(index, self.passes.weight)

    def parameter_complete(self, index: int, after_s: float) -> bool:
        """Merge what is complete now; true if the parameter's stage is, ``after_s`` seconds into the step."""
        if not self.gradients.parameter_complete(index, self.layout.stage_of[index], after_s):
            return False
        self._launch_complete()
        return True

    def end_early(self) -> list[int]:
        """The rank's part is submitted, and no more passes come: parameters of which all is in after all."""
        self.passes = self.passes.as_submitted()
        most = self.passes.number
        others = self.gradients.complete.union(self.beside)
        return [
            index
            for index, count in enumerate(self.gradients.by_parameter)
            if count == most > 0 and index not in others
        ]

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
        num_in = self.gradients.by_parameter
        if not any(num_in):
            return Contribution([0.0] * len(num_in), {}, False, "skipped" if self.passes.number else None)
        if self.passes.are_owed and self.gradients.num_over < self.passes.number:
            return Contribution(self._computed(), {}, False, "skipped")
        return Contribution([1.0] * len(num_in), {})

    def _computed(self) -> list[float]:
        return self.gradients.shares(self.passes, all_or_nothing=self.terms.all_or_nothing)

    def estimate(self, own: Contribution, fill_in: FillIn, slots: Sequence[Slot]) -> Contribution:
        """Put the estimator's contributions in for what is not in ``own``, but for frozen parameters."""
        weights = {}
        for index, share in enumerate(own.computed):
            # a frozen parameter has no gradient on any rank, and an optimizer steps whatever has one
            if share == 1 or not slots[index].parameter.requires_grad:
                continue
            if (estimate := fill_in.missing(slots[index].parameter)) is not None:
                weights[index] = estimate.weight * (1 - share)
                add = self.gradients.by_parameter[index] > 0 or (index in self.beside and share > 0)
                self.buffers.accumulate(index, estimate.gradient, add=add, weight=self.passes.weight * weights[index])
        return replace(own, estimated=weights)

    def weights(self, own: Contribution) -> Sequence[float]:
        """What this rank's contribution to each parameter counts, relative to the rank's own weight."""
        if not own.estimated:
            return own.computed
        return [share + own.estimated.get(index, 0.0) for index, share in enumerate(own.computed)]

    def close(self, own: Contribution, weights: Sequence[float], submitted: Submitted | None = None) -> None:
        """Merge what is left, with these `weights`; the telemetry is in the buffers."""
        weight, number, num_in = self.passes.weight, self.passes.number, self.gradients.by_parameter
        there = own.estimated.keys() | {index for index in self.beside if own.computed[index]}
        shares = {
            index: Share(weight * weights[index], num_in[index] > 0 or index in there)
            for index in range(len(weights))
            if num_in[index] != number or not number
        }
        # closed before anything is launched: with groups that are gone, `go_on_in` launches the rest
        self.closed, self.submitted, self._last_shares = True, submitted, shares
        self._launch_rest()

    def _launch_complete(self) -> None:
        """Launch the buckets that are complete; the last one waits for the end of the step.

        The telemetry goes with it. Of a step that may be dropped as a whole, all wait.
        """
        if self.terms.all_or_nothing:
            return
        ends = self.layout.bucket_ends
        while len(self.launched) < len(ends) - 1 and self.gradients.is_complete(ends[len(self.launched)]):
            if not self._launch_allreduce({}):
                break

    def _launch_rest(self) -> None:
        """Launch what is left of a closed round."""
        while len(self.launched) < len(self.layout.buckets):
            if not self._launch_allreduce(self._last_shares):
                return
        if (groups := self.groups) is not None and self.buffers.is_queued:
            self.rows_sent = self.buffers.send_rows(groups.control)
            if self.marks is not None:
                self.marks.submitted()

    def _launch_allreduce(self, shares: Mapping[int, Share]) -> bool:
        """Begin the merge of the next bucket; false if there are no groups at present."""
        if (groups := self.groups) is None:
            return False
        # before the collective: a device that hangs in it has made the mark
        if self.marks is not None:
            self.marks.launches(len(self.launched))
        # in the order of the buckets, as on all ranks: a collective has no name but its number
        self.launched.append(self.buffers.all_reduce(len(self.launched), shares, groups, self.passes.weight))
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

    # -- its groups change

    def hold_back(self) -> None:
        """Launch nothing until `go_on_in`."""
        self.terms = replace(self.terms, groups=None)

    def let_go(self) -> None:
        """Launch nothing, and keep nothing of its groups: whoever still has it would hold their connections."""
        self.hold_back()
        self.launched = []

    def move(self, buffers: StageBuffers, lost: frozenset[int], kept: Mapping[int, Sequence[Tensor]]) -> None:
        """Go on in these buffers with what is in its own, but for the ``lost`` buckets; messages that are ``kept``."""
        old, self.buffers = self.buffers, buffers
        buffers.take_over(old, lost, kept)

    def go_on_in(
        self, groups: ProcessGroups, launched: list[list[dist.Work]], generation: int, *, rows_tell_all: bool
    ) -> None:
        """Go on in other groups, in which these messages of the first buckets are on their way or over."""
        self.terms = replace(self.terms, groups=groups, generation=generation, rows_tell_all=rows_tell_all)
        # before anything is launched here: how many there are is the number of the next bucket
        self.launched = launched
        if self.closed:
            self._launch_rest()
        else:
            self._launch_complete()
