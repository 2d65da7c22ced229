"""What happens between entering and leaving ``with model.step()``, and where a late rank is stopped.

The hooks report each gradient to `OpenStep`, which hands it to the coordinator and asks a stop rule whether to go on.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from straggle.backward.compiled import come_at_once, not_compiled
from straggle.backward.hooks import DeadlineReached, HasGradient, release_graph, take_gradient, tensors_in
from straggle.backward.passes import PassWatcher, current_run
from straggle.backward.stages import PlanLearner, StagePlan
from straggle.loop.by_hand import ByHand, check_dense
from straggle.loop.in_step import NO_RUN, ByClock, EarlySteps, InStep, LeftStep, NoData
from straggle.loop.placing import Placing
from straggle.loop.uneven import Joins
from straggle.merge.checks import check_passes_to_come
from straggle.merge.late.sides import Entry
from straggle.merge.round.coordinator import Coordinator
from straggle.merge.round.rank_parts import RankParts
from straggle.merge.round.round import Round
from straggle.merge.round.step_passes import AnyPasses, Passes, StopRule
from straggle.merge.rows.telemetry import NO_FINGERPRINT
from straggle.merge.state.exchange import Given
from straggle.merge.state.module_state import ModuleState
from straggle.merge.wire.channel import PeerFailed, ToRepeat
from straggle.policies.estimators import FillIn
from straggle.report import Phase
from straggle.source.chunks import GradientChunks
from straggle.source.kept import NONE, UNDECIDED
from straggle.source.source import GradientSource
from straggle.step import Step

_log = logging.getLogger(__name__)
_STRIDED = torch.strided
_OF_ANOTHER = (
    ". It is another model's step that is open, and this model has a gradient for {0}: freeze this one during that "
    "pass, by requires_grad_(False) and afterwards (True), or open both steps, `with first.step(), second.step():`"
)


class _OnThread(threading.local):
    """The steps of all models that one thread trains: a pass may go through several, which know of none other."""

    def __init__(self) -> None:
        self.steps: weakref.WeakSet[OpenStep] = weakref.WeakSet()


_on_thread = _OnThread()


class OpenStep(PassWatcher):
    """The step that a model's training thread is in; all on that thread.

    There is one for each wrapped model, because the hooks of its parameters are bound to it. `enter` makes it that of a
    new `Step`; ``step`` is ``None`` between two. ``source`` has other slots in another step if parameters are others.
    ``fills``: what no rank has computed is zeros until an optimizer looks at it (`Unreached`).
    """

    def __init__(
        self,
        source: GradientSource,
        *,
        coordinator: Coordinator,
        state: ModuleState,
        fill_in: FillIn,
        learner: PlanLearner,
        rank: RankParts,
        fills: bool,
    ) -> None:
        self.step: Step | None = None
        self._source, self._slots = source, source.slots
        self._by_hand = ByHand(source)
        self._coordinator, self._training = coordinator, coordinator.training
        self._by_clock = ByClock(coordinator.training)
        self.last = LeftStep(coordinator.training.passes)
        self.stopwatch = coordinator.stopwatch
        self._state = state
        self._fill_in = fill_in
        self._learner = learner
        self._rank, self._vote = rank, rank.replica.vote
        self._between_units = self.ends_late = source.between_units
        # a backward pass that was begun is not stopped
        self._complete_microbatches = coordinator.deadline.late_handling.granularity == "microbatch"
        self._device_clock = rank.device_clock
        self._last_kept: tuple[int, tuple[int, ...]] = (NONE, ())  # as the peers, and as this rank, decided last
        self._usual_forward = 1, 1  # forward passes in the last step that was not cut, and its backward passes
        self.groups = GradientChunks(self._slots)
        self._waiting = coordinator.waiting
        self._on_thread = _on_thread.steps
        self._on_thread.add(self)
        self._now = InStep(coordinator.training.entry, self._by_clock)  # the step that it is in, or was in last
        self._again: Callable[[Round], bool] = lambda _merged: False  # whether a merged step is to be made again
        self._placing = Placing(source, state=state, fill_in=fill_in, rank=rank, fills=fills)
        self.unreached = self._placing.unreached

    # -- the two ends of the block

    def enter(self, step: Step, entry: Entry, *, checked: bool) -> None:
        """Begin; the entry lacks what is known of kept gradients.

        ``checked``: the ranks compare what they hold in this step.
        """
        self._watch_step()
        if self._on_thread is not _on_thread.steps:  # kept, since hooks may be called on a device's thread
            self._on_thread = _on_thread.steps
            self._on_thread.add(self)
        if self._vote is not None:
            self._vote.begin(self._training.step, stood_in=self.last.stood_in)
        if self.unreached.there:
            self.unreached.clear()
        rule = entry.rule or self._by_clock
        idle = entry.idle and not rule.stops_idle
        self._now = InStep(
            entry,
            NoData(self._training) if idle else rule,
            kept=self._source.keep(self.last.views),
            idle=idle,
            left=step.num_microbatches * len(self._slots),
            most=max(1, 3 * len(self._slots) // 4),
            early=None if step.optimizer is None else EarlySteps(step.optimizer),
        )
        self._by_hand.enter(checked=checked)
        self._learner.step_begins()
        self.stopwatch.enter("data")
        if (kept := self._now.kept.mark) != entry.kept:
            entry = entry._replace(kept=kept)
        self._state.begin(checked=checked)
        if self._device_clock is not None:
            self._device_clock.entered()
        # the coordinator first: a gradient is refused while `step` is None, and needs its round after that
        self._coordinator.enter(entry)
        self.step = step

    def follow_loops(self, loops: Joins) -> None:
        """These are the loops over `StagedDataParallel.join`, of which the ranks of a replica tell each other."""
        self._placing.follow_loops(loops)

    def replanned(self, plan: StagePlan | None) -> None:
        """Between two steps: parameters are others, with these stages (``None``: they are still to be learned)."""
        self._last_kept = (NONE, ())
        if plan is not None:
            self.groups.follow(plan)

    def give_kept(self) -> dict[str, Any]:
        """Between two steps: the gradients that may be kept, and those that were, for a rank that comes back."""
        self.unreached.clear()  # as on entering: these zeros are nobody's gradients
        decision, own = self._last_kept
        return {"there": self._source.keep(self.last.views).of_last_step(), "decision": decision, "own": list(own)}

    def take_kept(self, state: Mapping[str, Any]) -> None:
        """A peer's, in the place of this rank's own: the next step knows them as those of the step before."""
        self.unreached.clear()
        there = {index: torch.empty_like(self._slots[index].tensor).copy_(own) for index, own in state["there"].items()}
        self.last = replace(self.last, given=self._source.keep(self.last.views).exchange(there))
        self._last_kept = state["decision"], tuple(state["own"])

    # -- what others see of the step that it is in, or was in last

    @property
    def idle(self) -> bool:
        """Whether this rank has no data for the step."""
        return self._now.idle

    @property
    def rule(self) -> StopRule:
        """What ends the rank's part."""
        return self._now.rule

    @property
    def stopped(self) -> bool:
        """Whether the rule has stopped it."""
        return self._now.stopped

    @property
    def at_once(self) -> bool:
        """Whether backward has all gradients when it has one, as in a compiled model."""
        return self._now.at_once

    @property
    def num_fruitless(self) -> int:
        """Passes that came through the model's output and gave no parameter a gradient."""
        return self._now.num_fruitless

    # -- while it is open

    def use(self, made: Callable[[Passes], AnyPasses]) -> AnyPasses:
        """The step has the passes that ``made(those that it has)`` gives, which is called with the lock held."""
        assert self.step is not None
        passes = self._coordinator.change_passes(made)
        self.step.has_passes(number := max(1, passes.number))
        self._now.expect(sys.maxsize if passes.is_open else number * len(self._slots))
        return passes

    def call_on_backward(self, call: Callable[[], None]) -> None:
        """Call this in the open step, whenever a backward pass is over for the most part."""
        self._now.call_on_backward(call)

    def make_again_if(self, again: Callable[[Round], bool]) -> None:
        """A merged step for which this is true is no step of the loop's: all ranks make it again in the same block."""
        self._again = again

    def stay(self) -> None:
        """If this rank is late, its pass is not cut: its loop may be needed, for the step may have to be made again."""
        self._now.stay()

    @property
    def stays(self) -> bool:
        """Whether it does."""
        return self._now.stays

    def merge_inside(self) -> bool:
        """Merge the step, which has no more passes, in its block; whether it is to be made again, and has begun anew.

        This rank is not late in that: what it would lose then could be lost each time.
        """
        self.settle()
        if self.step is None or self.stopped or self.idle or self.failed or not self.rule.by_clock:
            return False
        merged = self._merge(self.step, truncated=self._training.stops.has(self._training.step))
        if not self._again(merged):
            self._now.merged_inside(merged)
            self.step.merged()
            return False
        self._pause_stand_in(paused=True)
        self._begin_again(merged, idle=False)
        return True

    def _is_made_again(self, merged: Round) -> bool:
        try:
            return self._again(merged)
        except PeerFailed as error:  # a rank of its replica is gone
            self._coordinator.lost_peer(error)
            raise

    def _without_part(self, step: Step, merged: Round) -> Round:
        """The step of this merge is made again, by others: this rank has left its passes."""
        self._begin_again(merged, idle=True)
        return self._finish(step, truncated=True, failed=False)

    def _begin_again(self, merged: Round, *, idle: bool) -> None:
        _log.info("%s: micro-batches were lost, and the step is made again", self._rank.where(merged.step))
        if merged.buffers.is_queued:
            merged.come_after(self._rank.channel, self._rank.where(merged.step))
        # each attempt counts in it: ranks have run other parts of the one that is discarded
        self._placing.apply_state(merged)
        if self._vote is not None:
            # as after any merged step: a rank that has not taken part lacks what the others have
            self._vote.agree((), merged.table.column("inside_wait_s"), (), {})
            self._vote.begin(self._training.step, stood_in=merged.stood_in)
        self._watch_step()
        kept, most = self._now.kept, self._now.most
        entry = self._now.entry._replace(
            idle=idle, kept=kept.mark, fingerprint=NO_FINGERPRINT, tensors=None, stepped=0.0
        )
        again_s = self._now.again_s + merged.record.seconds
        self._now = InStep(entry, self._by_clock, kept=kept, idle=idle, most=most, stays=True, again_s=again_s)
        self._learner.step_begins()
        self._state.begin(checked=False)
        self.stopwatch.enter("data")
        if self._device_clock is not None:
            self._device_clock.entered()
        self._coordinator.enter(entry)

    def _pause_stand_in(self, *, paused: bool) -> None:
        with self._rank.merging.lock:
            self._rank.stand_in.pause() if paused else self._rank.stand_in.resume()

    def out_of_data(self) -> None:
        """The loop has no more data, and its batches for the rest of the open step are not computed."""
        if self.step is not None and not (self._now.idle or self._now.stopped):
            self.settle()
            self.end_data(self.num_over)

    def end_data(self, num_passes: int) -> None:
        """This rank has data for so many passes of the step: these count, and the block ends where another begins."""
        assert self.step is not None
        most = min(self.step.num_microbatches, self._now.passes_with_data)
        if num_passes >= most or not self._training.passes.follow_loop:
            return
        self._now.has_data_for(num_passes, num_passes * len(self._slots))
        self._coordinator.end_data(num_passes)
        if num_passes == 0:
            self._now.has_no_data()
            self._end_without_data()

    def _end_without_data(self) -> None:
        """Nothing more of the step is begun, if the rank has no data for it."""
        if self.num_over >= self._now.passes_with_data:
            self._now.end_by(NoData(self._training))

    def expect(self, number: int) -> None:
        """The step has this many backward passes. Raises if that comes too late (`Step.num_microbatches`)."""
        assert self.step is not None
        if self._now.passes_with_data < sys.maxsize or not self._training.passes.follow_loop:
            return
        self.settle()
        check_passes_to_come(number, self.num_over, self.step.num_microbatches)
        self._coordinator.change_passes(lambda passes: passes.of_number(number))
        self._now.expect(number * len(self._slots))

    def leave(self, error: BaseException | None) -> Round | None:
        """Merge, and put the merged gradients in place; ``None`` if the user's code failed, which peers then know.

        Raises what the merge does.
        """
        step, only_late = self.step, isinstance(error, DeadlineReached)
        assert step is not None
        # a loop that swallows even a BaseException comes here without one, and has not computed everything all the same
        cut = only_late or self._now.stopped or self._now.cut_in is not None
        truncated = cut and (self._now.idle or self.num_over < self._now.passes_with_data)
        if truncated and not self._now.stopped and self._now.cut_in is not None:
            truncated = self._now.num_taken < self._now.left  # the other model's pass had given this one all
            self.stopwatch.enter(self._now.cut_in)
        # before anything is taken: only now it is known which pass came to its end
        self.settle()
        truncated = truncated or (cut and self._lacks_by_hand())
        try:
            if error is not None and not (only_late or isinstance(error, ToRepeat)):
                # the source first: what it holds of a pass that was left is not to outlive the step
                self._source.step_over(left=True)
                self._coordinator.fail(error)
                return None
            if (merged := self._now.merged) is None:
                merged = self._merge(step, truncated=truncated)
                while self._is_made_again(merged):
                    merged = self._without_part(step, merged)
            if self._now.again_s:  # nobody else is told of those attempts
                merged.correct(replace(merged.record, again_s=self._now.again_s))
        finally:
            if self._rank.stand_in.is_paused:
                self._pause_stand_in(paused=False)
            left_at, passes = self._now.num_checks if self._now.stopped else None, self._training.passes
            self.last = replace(self.last, passes=passes, num_announced=step.num_microbatches, left_at=left_at)
            self.step = None
            self._now.take_no_more()
            if isinstance(error, DeadlineReached):
                release_graph(error, self._now.outputs)
        self.last = replace(self.last, stood_in=merged.stood_in)
        if self._vote is not None and not merged.stood_in:
            self._vote.forget_waits()
        # before placing: what is kept is added to the merged gradients
        self._keep_as_peers_did(merged)
        try:
            self.last = replace(self.last, buffers=weakref.ref(merged.buffers), usable=None, given=None)
            self._placing.put_in_place(self._now, merged)
        except PeerFailed as error:  # a rank of its replica is gone
            self._coordinator.lost_peer(error)
            raise
        if merged.buffers.is_queued:
            self._note_device_numbers(merged, step.on_device)
        if self._device_clock is not None:
            self._device_clock.placed()
        if self._now.early is not None:
            self.stopwatch.enter("optimizer")
            # after all are in place: it steps those that were not stepped while others travelled
            self._now.early.parts.finish()
            self.stopwatch.stepped()
        self._now.let_go()
        return merged

    def _merge(self, step: Step, *, truncated: bool) -> Round:
        failed = self.failed
        if not (truncated or failed) and self._vote is None:  # a replica's ranks reduce behind the last gradient
            # a step ends with its last gradient: what follows is the loop's own, or a wait for peers
            self.stopwatch.pass_over()
        # before the submission, which launches what is complete: these may complete a bucket
        self._take_by_hand(is_cut=truncated or failed)
        return self._finish(step, truncated=truncated, failed=failed)

    def _finish(self, step: Step, *, truncated: bool, failed: bool) -> Round:
        if self._device_clock is not None:
            # behind the last kernel of its own, in front of those of the merge
            self._device_clock.left()
        return self._coordinator.finish(
            truncated=truncated,
            failed=failed,
            scalars=step.scalars,
            later=step.on_device,
            given=self._give_state(truncated=truncated),
            abstain=self._now.rule.abstains,
            on_merged=None if self._now.early is None else partial(self._placing.step_early, self._now),
        )

    def release(self, error: DeadlineReached) -> None:
        """A pass was left late, and the step goes on: free what the pass holds."""
        self.settle()
        self._source.step_over(left=True)
        release_graph(error, self._now.outputs)
        self._now.outputs.clear()

    @property
    def optimizing(self) -> bool:
        """Whether an optimizer is being stepped by this step, and not by the loop."""
        return self._now.early is not None and self._now.early.parts.running

    def passes_came_short(self, merged: Round) -> bool:
        """Whether passes may be missing by mistake, and not for want of time or data, or by a rule without a clock."""
        now = self._now
        explained = self.failed or now.stopped or now.cut_in is not None or merged.stood_in or now.idle
        return not explained and now.rule.by_clock and self._training.passes.follow_loop

    # -- forward

    @not_compiled
    def forward_begins(self) -> bool:
        """The model's forward pass begins; false if it is a checkpoint's, which computes again."""
        if self.in_pass:
            self._joins_if_new()
            return False
        assert self.step is not None
        if self.step.between:  # an evaluation between two micro-batches
            return False
        self.settle()
        if self._now.stopped:  # in an earlier micro-batch, whose phase is the cause
            self._leave_pass()
        self.stopwatch.enter("forward")
        if self._now.num_timed < self.num_over:  # its first forward pass ends the micro-batch before it
            self._now.microbatch_noted()
            self._training.microbatch_finished()
        self._end_without_data()
        self.check()
        self._now.forward_begins()
        return True

    @not_compiled
    def forward_over(self, output: Any) -> None:
        """It came to its end."""
        trained = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        self._now.forward_over(at_once=come_at_once(trained))
        for tensor in trained:
            tensor.register_hook(partial(self._at_output, weakref.ref(tensor)))  # type: ignore[no-untyped-call]
        if self._device_clock is not None:
            self._device_clock.forward_over()

    # -- backward: what the hooks call

    @not_compiled
    def _at_output(self, output: weakref.ref[Tensor], _gradient: Tensor) -> None:
        """A backward pass has come to an output of the model."""
        if self.step is not None:
            self._joins_if_new()
            self._now.outputs.append(output)

    @not_compiled
    def backward_begins(self) -> None:
        """A backward pass has come to the model: by a method or a part of it, it does not come to its output."""
        if self.step is not None:
            self._joins_if_new()

    @not_compiled
    def gradient_ready(self, index: int, parameter: HasGradient) -> None:
        """A parameter has its gradient: take it, and stop if this rank is late; the merge waits for the group.

        That costs ten times as much as what is done here for each gradient, so that it is known which are finished.
        """
        gradient, now = parameter.grad, self._now
        if gradient is None:
            return
        grouped = current_run() == now.grouped_run
        if not grouped:
            if not self._may_take(index, parameter):
                return
            parameter.grad = None  # the pass may begin here: this one is none that the loop has put there before it
            # before the gradient is counted: it is of this pass, and the pass may begin by it
            self._joins_if_new()
            if self._gives_parts:
                parameter.grad = gradient
                self._hold(index, parameter)
                return
        parameter.grad = None  # the copy in the buffer is the one that counts; freeing this one at once is fastest
        if gradient.layout is not _STRIDED:
            check_dense(self._slots[index].name, gradient)
        if not grouped:
            grouped = self._groups()
        # counted when it is taken, not when its group is merged: the pass may be over between them
        self._num_in_pass += 1
        if self._num_in_pass == now.most and now.on_backward is not None:
            now.on_backward()
        at = self.stopwatch.gradient()
        # without the lock, which costs more than all else here; one append, so the stand-in sees it whole or not at all
        self._waiting.append((index, gradient, at))
        now.took()
        if not grouped or index in self.groups.ends:
            self._merge_waiting()
        if self._device_clock is not None and index in self.groups.stage_ends and not now.at_once:
            self._device_clock.stage_over()
        if now.num_taken < now.left and not self._between_units:
            self.check()

    def _groups(self) -> bool:
        """A gradient comes from a run that has no groups so far; whether it has from here on.

        There are none if the merge must know of each gradient at once: in a nested run, in a pass too many, by a
        rule without a clock, for an estimator that reads it, and while the plan is learned.
        """
        self._merge_waiting()
        assert self.step is not None
        if self._by_hand.beside:
            self._hold_beside(self._by_hand.hand_on())
        if learning := self._learner.times is not None:
            self.groups.note_stream()
        now = self._now
        plain = now.rule.by_clock and not now.idle and not self._fill_in.reads_own and not learning
        alone = self._runs == {self._own} and self.pass_number < min(self.step.num_microbatches, now.passes_with_data)
        grouped = plain and alone and bool(self.groups.ends)
        now.group(current_run() if grouped else NO_RUN)
        return grouped

    def _merge_waiting(self) -> None:
        """Give the gradients that wait for their group to the merge."""
        if not self._waiting:
            return
        if self._learner.times is not None:
            self._learner.times.finished(self._waiting[0][0])
        if self._now.rule.accepts(self._now.num_taken - 1):
            self._coordinator.merge_waiting()
        else:  # it comes too late by the rule
            self._coordinator.discard_waiting()

    def check(self, at: int = 0) -> None:
        """Leave the step if its rule stops it; in a replica of several ranks, if their vote does."""
        if (step := self.step) is None or step.between:
            return
        if (self._complete_microbatches or self._now.at_once) and self.in_pass:
            return
        stays = self._now.stays
        if stays and self._vote is None and self._training.stops.asked_step < self._training.step:
            return
        stops = self._now.rule.stops(self._now.num_checks) and (self._now.idle or self.may_stop)
        if self._vote is not None:
            # stopped: in an earlier micro-batch, with all of its replica; if it stays, between two of them
            stops = self._now.stopped or (self._vote(stops, at) and not stays)
        if not stops:
            self._now.checked()
            return
        self._merge_waiting()  # they are finished
        self._now.stop()
        self._leave_pass()

    def _leave_pass(self) -> NoReturn:
        """Leave it, and with it what the loop does for other models in their open steps."""
        # before the exception: it leaves their blocks too, and they are asked why then
        for other in self._others():
            other.cut_by_another(self.stopwatch.phase)
        raise DeadlineReached

    def _others(self) -> list[OpenStep]:
        """The steps of other models that are open on this thread."""
        return [other for other in self._on_thread if other is not self and other.step is not None]

    def cut_by_another(self, phase: Phase) -> None:
        """Another model's deadline was over in this phase: what this step lacks at its end is missing because of it."""
        self._now.cut_by_another(phase)

    def _may_take(self, index: int, parameter: HasGradient) -> bool:
        """Whether a gradient belongs to an open step, if that is not plain; raises if it cannot."""
        if self.step is None:
            take_gradient(parameter)
            raise RuntimeError(
                "backward outside of a step: write `with model.step():` around the forward and backward pass"
                + (_OF_ANOTHER.format(self._slots[index].name) if self._others() else "")
            )
        if self.num_over >= self._now.passes_with_data or self._now.idle:
            self._end_without_data()
            if not self._between_units:  # or its replica leaves at the next unit
                self.check()
            take_gradient(parameter)
            return False
        if not self._now.kept.decided:
            if not self._now.kept.decide(index):
                return False
            self._coordinator.keep(self._now.kept.mark)
        return True

    def _pass_begins(self, first: int) -> None:  # noqa: ARG002
        self.stopwatch.enter("backward")
        self._coordinator.begin_pass(self.pass_number)
        self._now.kept.set_aside()
        self._by_hand.take_beside(self._now.kept, self._training.passes)
        if self._learner.times is not None:
            self._learner.times.begin()

    def _pass_over(self, number: int | None) -> None:
        if self.step is None:
            return
        if number is None:
            self._now.fruitless()
            self._now.kept.put_back(self._by_hand.hand_on())
        else:
            self._merge_waiting()
            self._coordinator.end_pass(number)
            if self._device_clock is not None:
                self._device_clock.pass_over()

    @not_compiled
    def _over(self) -> None:
        # the source first: it may give gradients at the end of a run, as FSDP's does
        self._source.pass_over()
        if self._held:
            self._give_held()
        super()._over()

    def _pass_failed(self) -> None:
        self._merge_waiting()  # they were finished before it did
        for parameter in self._held.values():  # a part of it counts as nothing
            take_gradient(parameter)
        self._held.clear()

    # -- gradients that come in parts

    def _hold(self, index: int, parameter: HasGradient) -> None:
        """Leave it in ``p.grad``, to which other runs of the pass add; it is lost if the rank stops before the end."""
        assert parameter.grad is not None
        check_dense(self._slots[index].name, parameter.grad)
        # in the order in which they came: a stop after this one leaves what is whole merged
        self._merge_waiting()  # what came before is whole
        self._now.group(NO_RUN)
        if self._learner.times is not None:
            self._learner.times.finished(index)
        super()._hold(index, parameter)
        if self._num_in_pass == self._now.most and self._now.on_backward is not None:
            self._now.on_backward()
        self.stopwatch.gradient()
        if not self._between_units:
            self.check()

    def _give_held(self) -> None:
        """The pass is over: what it has added up is whole."""
        for index, parameter in self._held.items():
            if (gradient := take_gradient(parameter)) is not None:
                self._waiting.append((index, gradient, self.stopwatch.last_gradient_at))
                self._now.took()
                self._merge_waiting()

    # -- what is merged beside the gradients

    def _give_state(self, *, truncated: bool) -> Given:
        """What this rank gives of the module's other state: its forward passes may have come to their end."""
        assert self.step is not None
        num_forward, most = self._now.num_forward, self._training.passes.num_submitted  # fewer if some were given back
        if num_forward and self.num_over and not (truncated or self.failed):
            self._usual_forward = num_forward, self.num_over
        of_whole_step, num_passes = self._usual_forward
        all_ran = num_forward * num_passes >= most * of_whole_step or self.pass_number + 1 >= most
        finished = not self._now.in_forward and (all_ran or not truncated)
        return self._state.give(finished=finished, forward_ran=num_forward > 0)

    def _take_by_hand(self, *, is_cut: bool) -> None:
        """Take gradients that the loop has put in place; peers learn of what is refused."""
        try:
            self._source.step_over(left=is_cut or self._now.stopped)
            self._by_hand.check_parameters()
            self._place(is_cut=is_cut)
        except (RuntimeError, ValueError) as error:
            self._coordinator.fail(error)
            raise

    def _place(self, *, is_cut: bool) -> None:
        """Merge the gradients that the loop has put into ``p.grad`` itself.

        Of a rank that was late, or failed, some may be only a part, as that of a penalty: these count as much as the
        passes that are in.
        """
        if not (gradients := self._now.kept.put_by_loop(self._is_whole if is_cut else None)):
            return
        parts = {index: own for index, own in gradients.items() if is_cut and not self._is_whole(index)}
        gradients = {index: own for index, own in gradients.items() if index not in parts}
        self._by_hand.check_gradients(parts, {})
        self._by_hand.check_gradients(gradients, self._now.kept.gradients)
        if self._now.kept.decided:
            self._coordinator.keep(self._now.kept.mark)
        self._training.passes.check_none_by_hand()
        if self._now.idle or not self._now.rule.accepts(self._now.num_taken):
            return
        self._hold_beside(parts)
        if twice := self._coordinator.place(gradients):
            self._by_hand.refuse_twice(twice)

    def _hold_beside(self, gradients: Mapping[int, Tensor]) -> None:
        if twice := self._coordinator.hold_beside(gradients):
            self._by_hand.refuse_twice(twice)

    def _lacks_by_hand(self) -> bool:
        """Whether the loop was cut between its passes and the gradient that it gives a parameter by itself."""
        return any(self._slots[index].parameter.grad is None for index in self._coordinator.awaited_by_hand())

    def _is_whole(self, index: int) -> bool:
        """Whether what the loop has put there in a step that was cut is all of the parameter's gradient.

        Of one of several micro-batches it is not known how many are in it. A pass would have added to it if passes
        gave that parameter gradients before. If none was over so far, it is whole if it may come from the model's
        output, and no pass was cut.
        """
        assert self.step is not None
        if self.step.num_microbatches > 1:
            return False
        known = self._coordinator.given_by_hand(index)
        return self._now.num_forward > 0 and not self.failed if known is None else known

    def _keep_as_peers_did(self, merged: Round) -> None:
        """A rank whose row was sent before it had decided what it keeps does as its peers.

        If no row tells it, all do as they did last, those too that have decided since: others cannot know of it.
        """
        kept, decision = self._now.kept, NONE if merged.table.is_usual else merged.table.kept()
        if decision == UNDECIDED:
            decision = self._last_kept[0]
            if decision == NONE:
                kept.drop_decided()
        if not kept.decided and not kept.follow(decision, self._last_kept[1]):
            _log.warning(
                "%s: this rank was late before its first backward pass, and its peers kept gradients of "
                "other parameters than it has: replicas may differ from here on; zero_grad() before the block",
                self._rank.where(merged.step),
            )
        if kept.was_open:
            self._last_kept = decision, tuple(kept.gradients)

    def _note_device_numbers(self, merged: Round, scalars: Mapping[str, Tensor]) -> None:
        """What only the device knows of the step goes into the row of a later one."""
        counts = merged.buffers.counts()
        self._coordinator.add_device_numbers(merged.step, counts, scalars)
        self.last = replace(self.last, usable=merged.buffers.usable)


class KeptState:
    """Gradients that the loop keeps over several steps, as an object with a state; used between two steps.

    A rank that comes back gets those of its peers.
    """

    def __init__(self, opened: OpenStep) -> None:
        self._opened = opened

    def state_dict(self) -> dict[str, Any]:
        """Without copies."""
        return self._opened.give_kept()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """That of a peer."""
        self._opened.take_kept(state)
