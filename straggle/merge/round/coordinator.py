"""Merges the contributions of all ranks, one round per step, whichever thread submits for this rank.

Every rank launches the same collectives in the same order: the buckets of step 0, the buckets of step 1, and so on.
The training thread launches them as its gradients are finished. When it is stuck, its stand-in (`stand_in.py`) launches
what is left with weight 0, and the merged steps wait in a ring until the training thread comes to take them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from straggle.backward.passes import TWICE_IN_ONE_PASS
from straggle.backward.stages import StagePlan
from straggle.merge.late.sides import Entry
from straggle.merge.options import Merge
from straggle.merge.round.buffers import bytes_on_wire
from straggle.merge.round.merged_steps import MergedSteps
from straggle.merge.round.rank_parts import RankParts
from straggle.merge.round.round import Finished, Round
from straggle.merge.round.step_passes import AnyPasses, Passes
from straggle.merge.round.submission import Submission
from straggle.merge.rows.device_numbers import Counts
from straggle.merge.rows.table import Table
from straggle.merge.rows.telemetry import ScalarNames
from straggle.merge.state.exchange import NOTHING_GIVEN, Given
from straggle.merge.wing import Wings
from straggle.merge.wire.channel import PeerFailed
from straggle.policies.estimators import FillIn
from straggle.policies.history import History
from straggle.source.kept import UNDECIDED
from straggle.source.source import Slot

_log = logging.getLogger(__name__)


class Coordinator:
    """What a training thread asks of the merge of one wrapped model.

    ``rank`` has the two sides of this rank, and ``wings`` are its optional parts; ``deadline`` and ``stopwatch`` are
    asked directly. One lock, `MergeSide.lock`, guards all of this: methods take it, and what is called with the lock
    held says so. No thread waits for a peer or for the store while it holds it.
    ``waiting`` are gradients of the running pass that are in no round yet, each with its parameter and when it was
    finished. The training thread appends to it without the lock; who holds the lock merges what is there.
    ``slots`` may be others after a `replan`.
    """

    def __init__(
        self,
        rank: RankParts,
        slots: Sequence[Slot],
        *,
        fill_in: FillIn,
        merge: Merge,
        wings: Wings,
        submit_hooks: Mapping[int, Callable[[int], object]],
    ) -> None:
        self._rank, self._wings = rank, wings
        self.training, self.merging = rank.training, rank.merging
        self.stopwatch, self.deadline = rank.stopwatch, rank.deadline
        self._slots, self._fill_in = slots, fill_in
        self._channel, self._stand_in, self._rounds = rank.channel, rank.stand_in, rank.rounds
        self._lock = self.merging.lock
        self._wire_dtype = merge.dtype_on_wire
        self.num_bytes = bytes_on_wire(slots, self._wire_dtype)  # of gradients in a step
        self._submission = Submission(rank, wings, slots, fill_in)
        self.names = ScalarNames(rank.channel)  # of what users log
        self._merged_steps = MergedSteps(rank, wings, self.names)
        self._submit_hooks = submit_hooks  # the model's, which a user may add to
        self.waiting: deque[Finished] = deque()
        self._pass_number = 0
        self._device = rank.device
        self._queue: object = None  # that of the training thread, if its device has one

    # -- between two steps

    @property
    def lag(self) -> int:
        """Merged steps that the training thread has not yet taken; from any thread."""
        return self._rank.lag

    @property
    def is_planned(self) -> bool:
        """Whether the stages stay as they are, as on all ranks that are as far."""
        return self._stand_in.started

    @property
    def plan(self) -> StagePlan:
        """The stages as they are planned now."""
        return self._rounds.plan

    def learn(self, plan: StagePlan) -> None:
        """Use this plan from here on; between two steps, on all ranks alike, before `start`."""
        self._rounds.learn(plan)

    def announce(self, entry: Entry) -> Table | None:
        """Tell all ranks, by a merge to which this one gives nothing, that its parameters are others; between steps.

        Call `pause` before: no rank is stood in for. What all ranks say comes back, and the step is still to be made.
        ``None``: it was merged without this rank, whose peers have not announced the same.
        """
        with self._lock:
            # with the lock from entering to submitting: the stand-in must not see a step that nobody means to compute
            self.training.enter(entry, self.stopwatch.now(), self.merging)
            if (current := self._open_own_round()) is None:
                return None
            self.training.leave(merges=True)
            self._submission.own(current, truncated=False, scalars={}, given=NOTHING_GIVEN)
        # without the lock: no thread waits for a peer while it holds it
        self._merged_steps.complete(current)
        merged = self._take()
        with self._lock:
            # both sides at once: between them the stand-in would take this rank for one that is a step behind
            self.training.make_again(merged.step)
            self.merging.restore(merged.step)
            # the step is still to be made: peers must not take this rank for one that has it
            self._channel.merged(merged.step - 1)
        return merged.table

    def replan(self, plan: StagePlan, num_state: int) -> None:
        """The parameters are others: use this plan from here on; paused, on all ranks alike, before the next step."""
        with self._lock:
            self.num_bytes = bytes_on_wire(self._slots, self._wire_dtype)
            self._rounds.replan(plan, num_state)
        if self.is_planned:
            self._prepare()

    def _prepare(self) -> None:
        """Tell the deadline policy of the stages."""
        # code of a policy, which may take long: not with the lock, and only here, where no step is open
        self.deadline.prepare(self.plan, self._slots)
        with self._lock:
            self.deadline.watch(self.plan)

    @property
    def history(self) -> History:
        """What the deadline policy has seen, to be saved with a checkpoint."""
        with self._lock:  # the stand-in may be adding a step
            return self.deadline.history

    def restore(self, history: History) -> None:
        """Go on from the history of another run, with its step numbers; before the first step."""
        with self._lock:
            self.deadline.restore(history)
            self.training.restore(history.num_steps)
            self.merging.restore(history.num_steps)

    def work_is_dealt(self, *, evenly: bool = True, after: int = -1) -> None:
        """Tell the deadline policy that ranks have as much of each step as they have time for; on all ranks alike."""
        with self._lock:
            self.deadline.work_is_dealt(evenly=evenly, after=after)

    def start(self) -> None:
        """Start the stand-in: from now on this rank can be late, and its stages stay as they are."""
        self._prepare()
        self._stand_in.start(self._submit_for_stuck, self._merged_steps.complete)
        if self._rounds.watch is not None:
            self._rounds.watch.start(lambda: self._queue)

    def make_spare(self) -> None:
        """Before this rank asks to be let in: take the memory of its first round."""
        with self._lock:  # the stand-in may begin a round, and takes the spare
            self._rounds.make_spare()

    def pause(self) -> None:
        """Until `resume` the stand-in sleeps, and no step's time goes by."""
        with self._lock:
            self.training.pause(self.stopwatch.now())
            self._stand_in.pause()

    def resume(self) -> None:
        """The time of the next step begins now."""
        with self._lock:
            now = self.stopwatch.now()
            self.training.begin_now(now)
            self.merging.begin_now(now)
            if self._rank.device_clock is not None:
                self._rank.device_clock.begin_now()
            self._stand_in.resume()

    def close(self) -> None:
        """End the stand-in, and leave word for the peers."""
        # first of all: after it no other thread launches anything, or reads what is closed below
        self._stand_in.close()
        self.training.collectives.has_begun.forget()
        if not self._channel.has_failed:  # or its device may never come to them
            self._rank.device_numbers.close(self._channel.rank)
        if self._rounds.watch is not None:
            self._rounds.watch.close()
        self._channel.close()

    # -- the training thread, in its step

    def enter(self, entry: Entry) -> None:
        """The training thread enters its step."""
        self._rank.check_device()
        with self._lock:
            now, before = self.stopwatch.now(), self.training.passes.number
            # by the training thread, for the stand-in to queue behind: it cannot ask for the queue of another thread
            self._queue = self._device.queue()
            self.training.enter(entry, now, self.merging)
            # what a pass of the step before has left there belongs to no step any more
            self.waiting.clear()
            self._stand_in.entered(now)
            # it sleeps by the length of the step before, which was longer: it would wake too late
            if entry.num_microbatches < before:
                self._stand_in.wake()
            if entry.kept != UNDECIDED:
                self._rounds.free_held()

    def keep(self, kept: int) -> None:
        """It is decided which gradients of the step before are kept, as copies: the buffers they were in are free."""
        with self._lock:
            self.training.keep(kept)
            self._rounds.free_held()

    def begin_pass(self, number: int) -> None:
        """Backward pass ``number`` of the training thread's step begins."""
        with self._lock:
            # with the lock, as the stand-in merges what waits, by this number
            self._pass_number = number
            if (current := self._own_round()) is not None:
                current.gradients.begin_pass()

    def end_pass(self, number: int) -> None:
        """Backward pass ``number`` of the training thread's step is over."""
        with self._lock:
            if (current := self._own_round()) is not None:
                current.gradients.end_pass(number)

    def weigh(self, weight: float) -> None:
        """Give this rank's step a weight. Raises ``RuntimeError`` after the first gradient."""
        if (vote := self._rank.replica.vote) is not None:
            weight = vote.weigh(weight)
        with self._lock:
            if self._takes_part and (current := self.merging.round) is not None:
                # what is in the buffers is scaled by the old weight, and may be on its way
                if current.gradients.number:
                    raise RuntimeError("step.weight comes before the first backward pass: gradients are scaled by it")
                current.use(current.passes.weighed(weight))
            self.training.weigh(weight)

    def end_data(self, num_passes: int) -> None:
        """This rank has data for so many of its step's backward passes, and for no more of them."""
        if num_passes:
            self.change_passes(lambda passes: passes.with_data(num_passes))
            return
        with self._lock:
            self.training.end_data()

    def change_passes(self, changed: Callable[[Passes], AnyPasses]) -> AnyPasses:
        """The training thread's step has others from here on: ``changed(those that it has)``, with the lock held."""
        with self._lock:
            # `changed` under the lock: what it looks at must not be put back by the stand-in meanwhile
            self.training.use(passes := changed(self.training.passes))
            if (current := self._own_round()) is not None:
                current.use(passes)
        return passes

    def set_cost(self, cost: float) -> None:
        """This rank's step costs this much: its deadline is longer or shorter by that."""
        with self._lock:
            self.training.set_cost(cost)
            self._stand_in.wake()

    def merge_waiting(self) -> bool:
        """Take the gradients that wait; merge each bucket that is complete with them.

        True if they complete a stage. Gradients of a step that was merged without them are discarded.
        Raises ``RuntimeError`` for more backward passes than ``num_microbatches``, and for a second gradient of one.
        """
        with self._lock:
            return self._merge_waiting()

    def _merge_waiting(self) -> bool:
        """With the lock held."""
        # taken even if they are not merged: a gradient of a step that is over must not go into the next one
        if not (waiting := self._take_waiting()):
            return False
        self._rank.check_device()
        # the step was merged without this rank: what comes now is counted as missing already
        if (current := self._open_own_round()) is None:
            return False
        number, entered_at = self._pass_number, self.training.entered_at or 0.0
        gradients, most = current.gradients, current.passes.number
        for index, _, _ in waiting:
            if (twice := gradients.last[index] == number) or gradients.by_parameter[index] == most:
                raise RuntimeError(self._too_many(index, twice=twice))
        return self._complete(current, current.accumulate(waiting, number), entered_at)

    def _complete(self, current: Round, complete: Sequence[tuple[int, float]], entered_at: float) -> bool:
        """All of these parameters' gradients is in, since then; whether a stage is complete with them."""
        # before the buckets go: the merge writes over what this rank had
        if complete and self._fill_in.reads_own:
            for index, _ in complete:
                self._fill_in.computed(self._slots[index].parameter, current.read(index))
        stages = [current.parameter_complete(index, at - entered_at) for index, at in complete]
        return any(stages)

    def hold_beside(self, gradients: Mapping[int, Tensor]) -> list[int]:
        """The loop has put these there by itself before a pass: they count as much as the passes that are in.

        None of them if passes have given some of these parameters all of their gradients, which come back then.
        """
        with self._lock:
            if (current := self._open_own_round()) is None:
                return []
            # their buckets may be on their way: what is added to them now would come to some ranks and not to others
            if twice := [index for index in gradients if index in current.gradients.complete]:
                return twice
            current.hold_beside(gradients)
            return []

    def given_by_hand(self, index: int) -> bool | None:
        """Whether no backward pass gives parameter ``index`` its gradient; ``None``: that is not known so far."""
        with self._lock:
            current = self._open_own_round()
            return None if current is None else current.gradients.given_by_hand(index)

    def awaited_by_hand(self) -> list[int]:
        """Parameters to which the loop has yet to give gradients by itself, as it did in other steps."""
        with self._lock:
            current = self._open_own_round()
            return [] if current is None else current.gradients.awaited()

    def place(self, gradients: Mapping[int, Tensor]) -> list[int]:
        """Merge these gradients of the entire step, which the loop has computed by itself; all of them, or none.

        None if backward passes have given some of these parameters gradients, which come back then. Those of a step
        that was merged without them are discarded.
        """
        with self._lock:
            if (current := self._open_own_round()) is None:
                return []
            if twice := [index for index in gradients if current.gradients.by_parameter[index]]:
                return twice
            now, entered_at = self.stopwatch.now(), self.training.entered_at or 0.0
            self._complete(current, [(index, now) for index in current.place(gradients)], entered_at)
            return []

    def leaves_on_device(self, value: Tensor) -> bool:
        """Whether this number is to go into the row of a later step, because the host would wait for it."""
        return self._rounds.are_queued and value.device == self._slots[0].device

    def add_device_numbers(self, step: int, counts: Counts | None, scalars: Mapping[str, Tensor]) -> None:
        """Numbers on the device, of a step whose merge is queued: they go into the row of a later step."""
        with self._lock:
            self._rank.device_numbers.add(step, counts, scalars)

    def discard_waiting(self) -> None:
        """Take the gradients that wait, which are not to be merged with their step."""
        self.waiting.clear()

    def _take_waiting(self) -> list[Finished]:
        return [self.waiting.popleft() for _ in range(len(self.waiting))]

    def _too_many(self, index: int, *, twice: bool) -> str:
        stage = next(stage.name for stage in self.plan.stages if index in stage.parameters)
        where = f"rank {self._channel.name}, step {self.training.step}, stage {stage}"
        if twice:
            return f"{where}: a parameter {TWICE_IN_ONE_PASS}"
        return (
            f"{where}: a gradient came after "
            f"{self.training.passes.number} backward passes; for more of them, several losses included, write "
            "model.step(num_microbatches=<number of backward passes>)"
        )

    def finish(
        self,
        *,
        truncated: bool,
        failed: bool = False,
        scalars: Mapping[str, float],
        later: Iterable[str] = (),
        given: Given = NOTHING_GIVEN,
        abstain: bool = False,
        on_merged: Callable[[Round], None] | None = None,
    ) -> Round:
        """The training thread's work for its step is over: merge the rest, wait for the peers, and take the result.

        ``truncated``: it was cut short; ``failed``: a backward pass did not come to its end. ``later``: scalars that
        its device has yet to tell. ``given``: of the module's other state; ``abstain``: give what is finished and
        nothing else, as the stand-in does. ``on_merged(round)`` is called after each message that was merged, while
        this waits.
        Raises `PeerFailed` when a rank failed in this step or cannot be reached.
        """
        posts = False
        if self._rounds.are_queued:
            self._rank.check_device()
        with self._lock:
            # first: they may raise what ended the job, and then nothing is to be submitted
            for phase in self._wings.leave:
                phase()
            mine = (current := self._open_own_round()) is not None
            # before submitting: the row has its collectives, and the stand-in sees who merges the step
            self.training.leave(merges=mine, truncated=truncated)
            if current is not None:
                if abstain:
                    now = self._submission.finished(current)
                else:
                    now = self._submission.own(
                        current, truncated=truncated, failed=failed, scalars=scalars, later=later, given=given
                    )
                # decided here, done below: the store may take two seconds, and the lock is held
                posts = self._stand_in.work_done(now, truncated=truncated)
            self.stopwatch.enter("outside")
        if current is not None:
            if posts:
                # before hooks of the user's: peers that wait for a quorum should not wait for them
                self._channel.post_finished(current.step, self.training.collectives.number)
            for hook in tuple(self._submit_hooks.values()):
                hook(current.step)
            # without the lock, as any wait for a peer: the stand-in has to be able to see that this is long
            self._merged_steps.complete(current, on_merged=on_merged)
        return self._take()

    def fail(self, error: BaseException) -> None:
        """The user's code raised in this step: post it, and let the peers finish the step, so that none waits."""
        self._rank.check_device()  # peers know of that
        what = f"rank {self._channel.name} raised in step {self.training.step}, {self.stopwatch.phase}: {error!r}"
        # wings first: where peers go on without this rank, they are told why it leaves, and nothing else
        for phase in self._wings.failed:
            phase(what, error)
        if self._wings.go_on:  # its peers do, without it
            return
        with self._lock:
            # before the message: a row that the stand-in writes meanwhile says so, too
            self.training.fail()
        try:
            self._channel.post_failure(what)
            with self._lock:
                if (current := self._open_own_round()) is None:
                    return  # the stand-in says it with its next round
                # what is finished goes all the same: peers have launched this step, and would wait
                self._submission.finished(current)
            self._merged_steps.complete(current, give_up_s=5.0)
        except RuntimeError as problem:  # a peer is gone too, but the user's own error matters more
            _log.warning("could not report this failure to the peers: %s", problem)

    def lost_peer(self, error: PeerFailed) -> None:
        """This rank's replica cannot go on after a merged step."""
        for phase in self._wings.failed:
            phase(f"{self._rank.where(self.training.step - 1)}: {error!r}", error)

    def _take(self) -> Round:
        """Take the merged step, or raise what it says of a rank that failed."""
        merged = self._merged_steps.take()
        if (error := self._submission.error) is not None:
            if self._wings.go_on:
                self._submission.forget_error()  # it may take part again
            for phase in self._wings.failed:
                phase(f"{self._rank.where(merged.step)}: {error!r}", error)
            raise error
        if merged.table.is_usual:
            return merged
        if failed := [rank for rank in merged.table.failed_ranks() if rank != self._rank.replica.place]:
            raise PeerFailed(
                self._channel.explain(f"{self._rank.where(merged.step)}: ranks {self._channel.named(failed)} failed")
            )
        return merged

    # -- both threads, with the lock held

    def _own_round(self) -> Round | None:
        """The round of the training thread's step, if it is begun and still takes gradients."""
        current = self.merging.round
        return None if current is None or current.closed or not self._takes_part else current

    @property
    def _takes_part(self) -> bool:
        """Whether the training thread's step is not yet merged, and is one in which this rank takes part."""
        return self.merging.step <= self.training.step >= self.merging.takes_part_from

    def _open_own_round(self) -> Round | None:
        """The same, begun if it is not yet; `None` if it was submitted, in the training thread's place or by it."""
        if not self._takes_part:
            return None
        current = self.merging.round or self._rounds.begin(self.training, self.merging)
        return None if current.closed else current

    def _submit_for_stuck(self) -> Round:
        """For the stand-in: submit for a training thread that cannot."""
        if self._queue is not None:
            # what is in the buffers is copied there, and that of the step before is read, by that thread's queue
            self._device.after_queue(self._queue)
        elif self._takes_part:  # those that are finished and wait for their group
            self._merge_waiting()
        for phase in self._wings.stands_in:
            phase()
        current = self.merging.round or self._rounds.begin(self.training, self.merging)
        self._submission.finished(current)
        return current
