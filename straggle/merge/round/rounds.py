"""Each step's round: in which buffers, among whom, and what a gradient counts in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from straggle.backward.stages import StagePlan
from straggle.merge.late.sides import MergeSide, TrainingSide
from straggle.merge.options import Merge
from straggle.merge.round.buffers import StageBuffers, keep_freed_memory
from straggle.merge.round.gradients_in import Usage
from straggle.merge.round.round import Layout, Round, RoundTerms
from straggle.merge.rows.telemetry import OF_THE_CORE, Columns
from straggle.merge.wire.groups import ProcessGroups
from straggle.policies.network.merge_time import QUICK_S
from straggle.source.source import Slot

if TYPE_CHECKING:
    from straggle.merge.late.device_watch import DeviceWatch

_LOOKS_EVERY = 16  # steps: at the links
_SLOW_S = QUICK_S / 4  # a link's latency, with which a small message between two ranks is no longer quick


class Rounds:
    """Begins the rounds of one model, and keeps the buffers that are free; all with the coordinator's lock held.

    ``num_state``: numbers of the module's other state that go beside each merge. ``queued``: the host does not wait
    for the gradients' device. ``columns``: where rows have their numbers.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        plan: StagePlan,
        *,
        merge: Merge,
        all_or_nothing: bool,
        num_state: int,
        num_replicas: int,
        queued: bool = False,
        columns: Columns = OF_THE_CORE,
    ) -> None:
        self.groups: ProcessGroups | None = None  # `None`: there are none at present
        self.ranks = tuple(range(num_replicas))  # of these groups, by their rows
        self.generation = 0
        self._slots = slots
        self._merge = merge
        self._all_or_nothing = all_or_nothing
        self._num_state = num_state
        self._num_replicas, self._columns = num_replicas, columns
        self.are_queued, self._kind = queued, _queued_buffers() if queued else StageBuffers
        self.watch: DeviceWatch | None = None  # if the host does not wait for the device, what sees that it is stuck
        keep_freed_memory()
        self.begin_anew()
        self.learn(plan)

    def watch_device(self, watch: DeviceWatch) -> None:
        """This sees that the device is stuck; before the first round."""
        self.watch = watch

    def learn(self, plan: StagePlan) -> None:
        """Merge by this plan from here on; between two steps, on all ranks alike."""
        self.plan = plan
        self._layout = Layout(plan, self._slots, self._columns)
        self._held: StageBuffers | None = None  # whose views are p.grad
        self._spare: StageBuffers | None = None

    def replan(self, plan: StagePlan, num_state: int) -> None:
        """The parameters are others, and so are their numbers: merge them by this plan from here on."""
        self._num_state = num_state
        self.begin_anew()
        self.learn(plan)

    def begin_anew(self) -> None:
        """Between two steps: forget in which passes parameters had gradients, and how far this rank came."""
        self._usage = Usage()

    def merge_among(self, groups: ProcessGroups | None, ranks: tuple[int, ...], generation: int) -> None:
        """From here on rounds are merged among these ranks, by these groups, which are not the first ones."""
        self.groups, self.ranks, self.generation = groups, ranks, generation

    def merge_among_none(self) -> None:
        """Nothing is launched until `merge_among`."""
        self.groups = None

    # -- the step that is merged

    def begin(self, training: TrainingSide, merging: MergeSide) -> Round:
        """Begin the round of the step that is merged, with what is known of this rank's part in it."""
        buffers = self._spare or self.new_buffers()
        # it is the round's now: a second round in the same memory would overwrite what is on its way
        self._spare = None
        passes = training.passes_in(merging.step)
        current = Round(
            merging.step,
            self._layout,
            buffers,
            self._terms(),
            usage=self._usage,
            passes=passes,
            max_over=training.entry.max_over if passes is training.passes else None,  # it is in the step
            marks=None if self.watch is None else self.watch.begin(merging.step, self._layout.bucket_names),
        )
        # last: from here on the other thread uses it
        merging.begin(current)
        return current

    def empty(self, step: int) -> Round:
        """A round in which nothing is merged."""
        return Round(step, self._layout, self.new_buffers(), RoundTerms(None))

    def merged(self, current: Round) -> None:
        """What came of a step, alike on all ranks: if a link is slow by now, more messages are on their way."""
        groups = self.groups
        if current.step % _LOOKS_EVERY or groups is None or groups.wide is None:
            return
        if any(way.link.latency_s > _SLOW_S for way in current.table.ways()):  # quick when the groups were formed
            self.groups = replace(groups, data=groups.wide, wide=None)

    def _terms(self) -> RoundTerms:
        return RoundTerms(self.groups, self.generation, all_or_nothing=self._all_or_nothing)

    # -- the buffers

    def new_buffers(self) -> StageBuffers:
        """Buffers that nothing else has."""
        return self._kind(
            self.plan,
            self._slots,
            self._num_replicas,
            num_state=self._num_state,
            drop_nonfinite=self._merge.nonfinite == "drop",
            wire_dtype=self._merge.dtype_on_wire,
            columns=self._columns,
        )

    def make_spare(self) -> None:
        """Take the memory of the next round now, as a rank does for whose first round others will wait."""
        self._spare = self._spare or self.new_buffers()

    def hold(self, buffers: StageBuffers) -> None:
        """The parameters have their gradients in these, until `free_held`."""
        self._held = buffers

    def free_held(self) -> None:
        """The gradients of the step before are needed no more, or were copied, but for what the loop still has."""
        # with the lock: the stand-in may begin the next round at any time, and takes the spare
        if self._held is not None and self._spare is None:  # a second spare is memory that only a stuck rank needs
            # what the loop still has a reference to is not overwritten: it may read it at any time
            self._held.renew_held()
            self._spare = self._held
        self._held = None


def _queued_buffers() -> type[StageBuffers]:
    """Loaded where there is a device with a queue."""
    from straggle.merge.round.queued_buffers import QueuedBuffers

    return QueuedBuffers
