"""Merges the contributions of all ranks, one round per step, whichever thread submits for this rank.

Every rank launches the same collectives in the same order: the buckets of step 0, the buckets of step 1, and so on.
The training thread launches them as its gradients are finished. When it is stuck, its stand-in (`stand_in.py`) launches
what is left with weight 0, and the merged steps wait in a ring until the training thread comes to take them.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from straggle.backward.clocks import Stopwatch
from straggle.backward.kept import UNDECIDED
from straggle.backward.passes import TWICE_IN_ONE_PASS
from straggle.backward.stages import StagePlan
from straggle.merge.buffers import StageBuffers
from straggle.merge.channel import Channel, PeerFailed
from straggle.merge.current_deadline import CurrentDeadline
from straggle.merge.draws import Drawn
from straggle.merge.groups import Groups
from straggle.merge.membership import MembersChanged, Membership
from straggle.merge.options import Merge, ReachedShares
from straggle.merge.provenance import NO_CHANGE, Provenance
from straggle.merge.rank_state import Entry, MergeSide, TrainingSide
from straggle.merge.recorded_groups import RecordedGroups
from straggle.merge.replay import Decision
from straggle.merge.round import Contribution, Layout, MergedStep, Round, Usage
from straggle.merge.row import row_of
from straggle.merge.stand_in import StandIn
from straggle.merge.telemetry import Table, absent_row
from straggle.merge.view import MergeProgress, Repair, View
from straggle.policies.cost import check_cost
from straggle.policies.fill_in import FillIn
from straggle.policies.history import History

_SHRINKS = 0.9  # of the merged steps that waited for a healed rank are left when it has taken as many
_NEWCOMERS_LAG = 64  # steps that are merged before a rank which was let in counts as stuck
_log = logging.getLogger(__name__)


class Recorder(Protocol):
    """What is recorded before it is known to the peers, because this process may be killed right after it.

    Called by several threads.
    """

    def partial(self, decision: Decision) -> None:
        """This rank is about to submit less than all of its step."""

    def regrouped(self, generation: int, ranks: Sequence[int]) -> None:
        """From here on these ranks are the members."""

    def healed(self, step: int, *, started: bool) -> None:
        """This rank enters ``step`` with the state of a peer; ``started``: it is the first step of its process."""


class Coordinator:
    """The rounds, the collectives and the ring of one wrapped model.

    ``training`` and ``merging`` are this rank's two sides, ``plan`` its stages as they are planned now; ``deadline``,
    ``reached`` (of each stage) and ``stopwatch`` are asked directly. One lock guards all of this, the ring included.
    ``num_changes``: numbers of the module's own buffers that ride along with each merge.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        plan: StagePlan,
        channel: Channel,
        *,
        deadline: CurrentDeadline,
        fill_in: FillIn,
        merge: Merge,
        num_changes: int,
        membership: Membership | None = None,
    ) -> None:
        self.training, self.merging = TrainingSide(stopwatch := Stopwatch()), MergeSide(stopwatch)
        self.stopwatch = stopwatch
        self.deadline = deadline
        self.reached = ReachedShares(merge.probability_window)
        self._parameters = parameters
        self._channel = channel
        self._fill_in = fill_in
        self._merge = merge
        self._num_changes = num_changes
        self._usage = Usage()
        self._lock = self.merging.lock
        self._membership = membership
        self._apart = membership is not None  # telemetry travels after the gradients
        self._groups = channel.formed  # `None` while members change
        self._ranks = tuple(range(channel.world_size))  # that are members
        self._generation = 0  # of these
        self._lost: dict[int, dict[int, set[int]]] = {}  # by step and rank, buckets that a change of members took
        self._recorded: RecordedGroups | None = None
        self.recorder: Recorder | None = None
        self.submit_hooks: Mapping[int, Callable[[int], object]] = {}  # the model's
        self._absent_until = 0  # the step from which on this rank takes part
        self.fell_behind = False  # a member that needs a state, because more steps were merged than may wait for it
        self.is_back = False  # the training thread has been between two steps since; it alone sets it
        self.awaits_state = False  # it does nothing else; by that thread
        self._last_taken_at = 0  # the step that was being merged when it took one last
        self._catch_up: tuple[int, int] | None = None  # a healed rank: the step that it is to come to, and from how far
        self._healing: frozenset[int] = frozenset()  # members that wait for their state
        self._last_telemetry = torch.empty(0)  # of the step that was merged last, for a member that lacks it
        self._tables: list[tuple[int, Table]] = []  # of the steps that were merged while this rank waits for its state
        self._gives_at = -1  # the step at whose beginning this rank's state is another's
        self._ring: dict[int, MergedStep] = {}
        self._policy_error: Exception | None = None  # of the estimator, while a step was submitted
        self._last_copy = torch.cuda.Event() if parameters[0].is_cuda else None  # type: ignore[no-untyped-call]
        self._stand_in = StandIn(
            self.training,
            self.merging,
            deadline,
            channel,
            device=parameters[0].device,
            heals=membership is not None,
        )
        self.learn(plan)

    # -- between two steps

    @property
    def lag(self) -> int:
        """Merged steps that the training thread has not yet taken; from any thread."""
        return max(0, self.merging.step - self.training.step)

    @property
    def is_planned(self) -> bool:
        """Whether the stages stay as they are, as on all members that are as far."""
        return self._stand_in.started

    def learn(self, plan: StagePlan) -> None:
        """Use this plan from here on; between two steps, on all ranks alike, before `start`."""
        self.plan = plan
        self._layout = Layout(plan, self._parameters)
        self._num_buckets = len(self._layout.buckets)
        self._held: StageBuffers | None = None  # whose views are p.grad
        self._spare: StageBuffers | None = None

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

    def start(self) -> None:
        """Start the stand-in: from now on this rank can be late, and its stages stay as they are."""
        self.deadline.prepare(self.plan, self._parameters)
        with self._lock:
            self.deadline.watch(self.plan)
        self._stand_in.start(self._submit_for_stuck, self._complete)

    def record(self, recorder: Recorder) -> None:
        """Tell this one from here on; before the first step."""
        with self._lock:
            self.recorder = recorder
            if self._generation:
                recorder.regrouped(self._generation, self._ranks)

    def replay_members(self, groups: RecordedGroups) -> None:
        """Merge each step among those that were members then; before the first step, on all ranks alike."""
        self._recorded, self._apart = groups, True

    def begin_anew(self) -> None:
        """Between two steps: forget what a process that is started again does not know."""
        with self._lock:
            self._usage, self.reached = Usage(), ReachedShares(self._merge.probability_window)

    def pause(self) -> None:
        """Until `resume` the stand-in sleeps, and no step's time goes by."""
        with self._lock:
            self._stand_in.pause()

    def resume(self) -> None:
        """The time of the next step begins now."""
        with self._lock:
            now = self.stopwatch.now()
            self.training.begin_now(now)
            self.merging.begin_now(now)
            self._stand_in.resume()

    def close(self) -> None:
        """End the stand-in, and leave word for the peers."""
        self._stand_in.close()
        self._channel.close()

    # -- the training thread, in its step

    def enter(self, entry: Entry) -> None:
        """The training thread enters its step."""
        with self._lock:
            now = self.stopwatch.now()
            self.training.enter(entry, now, self.merging)
            self._stand_in.entered(now)
            if entry.kept != UNDECIDED:
                self._free_held()

    def keep(self, kept: int) -> None:
        """It is decided which gradients of the step before are kept, as copies: the buffers they were in are free."""
        with self._lock:
            self.training.keep(kept)
            self._free_held()

    def _free_held(self) -> None:
        if self._held is not None:
            self._spare = self._spare or self._held  # a second spare is memory that only a stuck rank needs
            self._held = None

    def begin_pass(self) -> None:
        """A backward pass of the training thread begins."""
        with self._lock:
            if (current := self._own_round()) is not None:
                current.begin_pass()

    def end_pass(self, number: int) -> None:
        """Backward pass ``number`` of the training thread's step is over."""
        with self._lock:
            if (current := self._own_round()) is not None:
                current.end_pass(number)

    def weigh(self, weight: float) -> None:
        """Give this rank's step a weight. Raises ``ValueError`` and, after the first gradient, ``RuntimeError``."""
        if not 0 < weight < math.inf:
            raise ValueError(f"weight={weight}: must be a positive number, such as the samples of this rank's step")
        with self._lock:
            if self._takes_part and (current := self.merging.round) is not None:
                if current.num_gradients:
                    raise RuntimeError("step.weight comes before the first backward pass: gradients are scaled by it")
                current.weight = weight
            self.training.weigh(weight)

    def takes(self, cost: float) -> None:
        """This rank's step costs this much: its deadline is longer or shorter by that."""
        check_cost(cost)
        with self._lock:
            self.training.takes(cost)
            self._stand_in.deadline_changed()

    def draw(self, drawn: Drawn) -> None:
        """This rank has this of its step's pool; before it begins a pass that it has not drawn before."""
        with self._lock:
            self.training.draw(drawn)
            if (current := self._own_round()) is not None:
                current.draw(drawn)

    def gradients_ready(self, indices: Sequence[int], gradients: Sequence[Tensor], number: int = 0) -> bool:
        """Take these parameters' gradients of backward pass ``number``; merge each bucket that is complete with them.

        True where they complete a stage. Gradients of a step that was merged without them are shown to an estimator
        that finishes late, and discarded.
        Raises ``RuntimeError`` for more backward passes than ``num_microbatches``, and for a second gradient of one.
        """
        with self._lock:
            current, training = self.merging.round, self.training
            if current is None and self._takes_part:
                current = self._begin_round()
            if current is None or current.closed or not self._takes_part:
                for index, gradient in zip(indices, gradients, strict=True):
                    self._observe_late(index, gradient)
                return False
            last_in, num_in, most = current.last_in, current.num_in, current.num_microbatches
            for index in indices:
                if (twice := last_in[index] == number) or num_in[index] == most:
                    raise RuntimeError(self._too_many(index, twice=twice))
            complete = current.accumulate(indices, gradients, number)
            if complete and self._fill_in.reads_own:
                for index in complete:
                    current.add(index, self._fill_in.computed(self._parameters[index], current.read(index)))
            if self._last_copy is not None:
                self._last_copy.record()
            after_s = self.stopwatch.now() - (training.entered_at or 0.0)
            stages = [current.parameter_complete(index, after_s) for index in complete]
            return any(stages)

    def gradient_ready_late(self, index: int, gradient: Tensor) -> None:
        """Take a gradient that is not to be merged with its step."""
        with self._lock:
            self._observe_late(index, gradient)

    def _observe_late(self, index: int, gradient: Tensor) -> None:
        self._fill_in.came_late(self._parameters[index], gradient, 1 / self.training.entry.num_microbatches)

    def _too_many(self, index: int, *, twice: bool) -> str:
        stage = next(stage.name for stage in self.plan.stages if index in stage.parameters)
        where = f"rank {self._channel.rank}, step {self.training.step}, stage {stage}"
        if twice:
            return f"{where}: a parameter {TWICE_IN_ONE_PASS}"
        return (
            f"{where}: a gradient came after "
            f"{self.training.entry.num_microbatches} backward passes; for more of them, several losses included, write "
            "model.step(num_microbatches=<number of backward passes>)"
        )

    def submit_partial(self, scalars: Mapping[str, float], changes: Tensor | None, *, left_at: int) -> bool:
        """The training thread is late in its backward pass: submit what it has, while it goes on.

        The stand-in waits for the merge. False where the pass has to end instead.
        """
        with self._lock:
            if not self._fill_in.finishes_late or not self._stand_in.started:
                return False
            if (current := self._open_own_round()) is not None:
                current.left_at = left_at
                self._submit_own(current, truncated=True, scalars=scalars, changes=changes)
                self._stand_in.submitted_partial(current)
            return True

    def finish(
        self,
        *,
        truncated: bool,
        failed: bool = False,
        scalars: Mapping[str, float],
        changes: Tensor | None = None,
        abstain: bool = False,
        left_at: int | None = None,
        on_merged: Callable[[Round], None] | None = None,
    ) -> MergedStep:
        """The training thread's work for its step is over: merge the rest, wait for the peers, and take the result.

        ``truncated``: it was cut short; ``failed``: a backward pass did not come to its end. ``changes`` of the
        module's buffers, where the rank finished its forward pass; ``abstain``: give what is finished and nothing else,
        as the stand-in does. ``left_at``: as a `Decision` has it. ``on_merged(round)`` is called while this waits,
        after each message that was merged.
        Raises `PeerFailed` when a rank failed in this step or cannot be reached.
        """
        posts = False
        with self._lock:
            if self._membership is not None:
                self.check_ended()
            mine = (current := self._open_own_round()) is not None
            self.training.leave(merges=mine, ran_past_merge=self._fill_in.finishes_late and not mine)
            if current is not None:
                current.left_at = left_at
                if abstain:
                    now = self._submit_finished(current)
                else:
                    now = self._submit_own(
                        current, truncated=truncated, failed=failed, scalars=scalars, changes=changes
                    )
                posts = self._stand_in.work_done(now, truncated=truncated)
            self.stopwatch.enter("outside")
        if current is not None:
            if posts:
                self._channel.post_finished(current.step)
            for hook in tuple(self.submit_hooks.values()):
                hook(current.step)
            self._complete(current, on_merged=on_merged)
        return self._take()

    def fail(self, error: BaseException) -> None:
        """The user's code raised in this step: post it, and let the peers finish the step, so that none waits."""
        what = f"rank {self._channel.rank} raised in step {self.training.step}, {self.stopwatch.phase}: {error!r}"
        if self._membership is not None:  # its peers go on without it
            self._membership.leave_with_an_error(what)
            if not self._membership.is_member:
                self.put_out()  # now, or its next step would go on with this one before the other thread has seen it
            return
        with self._lock:
            self.training.fail()
        try:
            self._channel.post_failure(what)
            with self._lock:
                if (current := self._open_own_round()) is None:
                    return  # the stand-in says it with its next round
                self._submit_finished(current)
            self._complete(current, give_up_s=5.0)
        except RuntimeError as problem:  # a peer is gone too, but the user's own error matters more
            _log.warning("could not report this failure to the peers: %s", problem)

    def _take(self) -> MergedStep:
        """Wait until the training thread's step is merged; the training thread goes on to the next."""
        with self._lock:
            training = self.training
            while (merged := self._ring.pop(training.step, None)) is None:
                if self._stand_in.error is not None:
                    raise self._stand_in.error
                if training.step < self._absent_until:
                    merged = self._nothing()
                    break
                self.merging.step_merged.wait()
            training.take(merged, self.stopwatch.now())
            self._last_taken_at = self.merging.step
            self._end_healing_if_caught_up()
            self._held = merged.buffers
            if merged.stood_in or self.merging.step > training.step:
                self._stand_in.applied()
        if self._policy_error is not None:
            error = self._policy_error
            if self._membership is not None:
                self._policy_error = None  # it may be let in again
                self._membership.leave_with_an_error(f"rank {self._channel.rank}, step {merged.step}: {error!r}")
            raise error
        if failed := [rank for rank in merged.table.failed_ranks() if rank != self._channel.rank]:
            raise PeerFailed(
                self._channel.explain(f"rank {self._channel.rank}, step {merged.step}: ranks {failed} failed")
            )
        return merged

    # -- both threads, with the lock held

    def _own_round(self) -> Round | None:
        """The round of the training thread's step, if it is begun and still takes gradients."""
        current = self.merging.round
        return None if current is None or current.closed or not self._takes_part else current

    @property
    def _takes_part(self) -> bool:
        """Whether the training thread's step is not yet merged, and is one in which this rank is a member."""
        return self.merging.step <= self.training.step >= self._absent_until

    def _open_own_round(self) -> Round | None:
        """The same, begun if it is not yet; `None` where it was submitted, in the training thread's place or by it."""
        if not self._takes_part:
            return None
        current = self.merging.round or self._begin_round()
        return None if current.closed else current

    def _begin_round(self) -> Round:
        training, merging, merge = self.training, self.merging, self._merge
        buffers = self._spare or self._new_buffers()
        self._spare = None
        factors = None
        if merge.weighting == "inverse_probability":
            factors = self.reached.factors(len(self.plan.stages), merge.max_weight)
        current = Round(
            merging.step,
            self._layout,
            buffers,
            None if self._groups is None else self._groups.gradients,
            factors=factors,
            all_or_nothing=self.deadline.late_handling.granularity == "step",
            usage=self._usage,
            generation=self._generation,
            recorded=None if self._recorded is None else self._recorded.of_step(merging.step, self._num_buckets),
        )
        current.told = self._generation, self._ranks
        current.weight = training.weight  # of a rank that has not entered: its last step's
        if training.step == merging.step and training.entered_at is not None:
            current.num_microbatches = training.entry.num_microbatches
            if training.entry.max_over is not None:
                current.max_over = training.entry.max_over
            if training.drawn is not None:
                current.draw(training.drawn)
        merging.begin(current)
        return current

    def _submit_own(
        self,
        current: Round,
        *,
        truncated: bool,
        failed: bool = False,
        scalars: Mapping[str, float],
        changes: Tensor | None,
    ) -> float:
        """Submit the training thread's own step; when that was."""
        own = current.own_part(self.stopwatch.phase, truncated=truncated, failed=failed)
        if not truncated:
            self.training.microbatch_finished()
        if min(own.computed) < 1 and not self.training.entry.idle:
            own = self._estimate(current, own)
        return self._submit(current, own, scalars, changes)

    def _estimate(self, current: Round, own: Contribution) -> Contribution:
        """Let the estimator fill in. Where it fails, the peers learn of it, and the rank ends with this step."""
        try:
            return current.estimate(own, self._fill_in, self._parameters)
        except Exception as error:
            self._policy_error = error
            if self._membership is None:
                self.training.fail()
                self._channel.post_failure(f"rank {self._channel.rank}, step {current.step}: {error!r}")
            return own

    def _submit_for_stuck(self) -> Round:
        """For the stand-in: submit for a training thread that cannot."""
        if self._last_copy is not None:  # the gradients that go into the merge are copied in by another stream
            self._last_copy.wait()
        if self._membership is not None and self._ring_is_full():
            self._fall_behind()
        current = self.merging.round or self._begin_round()
        self._submit_finished(current)
        return current

    def _ring_is_full(self) -> bool:
        """Whether no more merged steps may wait for the training thread.

        One that was let in has as many as it needs to come as far, but not if it is stuck.
        """
        max_lag = self.deadline.late_handling.max_lag
        if self._stand_in.healing:
            stuck = self.merging.step - self._last_taken_at >= max(max_lag, _NEWCOMERS_LAG)
            return stuck and not (self.awaits_state or self.fell_behind)
        return len(self._ring) - int(self.training.taking) >= max_lag

    def _fall_behind(self) -> None:
        """Drop the ring: the training thread takes a state when it is back, and its peers do not wait for it."""
        _log.warning(
            "rank %d has been in %s of step %d while %d steps were merged (max_lag=%d): it takes the state of a peer "
            "when it is back",
            self._channel.rank,
            self.stopwatch.phase,
            self.training.step,
            self.lag,
            self.deadline.late_handling.max_lag,
        )
        self.fell_behind, self.is_back, self._absent_until = True, False, sys.maxsize
        self._ring.clear()
        self._tables, self._catch_up = [], None
        self.training.stop_up_to(sys.maxsize)
        self._stand_in.heal(True)

    def _end_healing_if_caught_up(self) -> None:
        """A rank that has its state again gives nothing, and is not waited for, until it has taken what was merged.

        While it takes that, more is merged. One whose loop is not faster than its peers' steps would never come to the
        end of it, so it goes on as any rank when the rest has hardly become less.
        """
        if self._catch_up is None or self.training.step < self._catch_up[0]:
            return
        far, lag = self._catch_up[1], self.lag
        if 0 < lag <= _SHRINKS * far:
            self._catch_up = self.merging.step, lag
        else:
            self._end_healing()

    def _end_healing(self) -> None:
        self._catch_up = None
        self._stand_in.heal(False)

    def _submit_finished(self, current: Round) -> float:
        """Submit what the training thread finished, and nothing for the rest; when that was."""
        current.stood_in = True
        own = current.finished_part(self.stopwatch.phase)
        if not self.training.entry.idle:
            current.abstain(own, self._fill_in, self._parameters)
        now = self._submit(current, own, {}, None)
        self.training.stop_up_to(current.step)
        return now

    def _submit(self, current: Round, own: Contribution, scalars: Mapping[str, float], changes: Tensor | None) -> float:
        """Launch all collectives that are left, the last with the telemetry; when that was."""
        weights = current.weights(own)
        without_store = not self._channel.store.reachable
        row = row_of(self.training, self.merging, current, own, weights, scalars, without_store=without_store)
        if not self._apart:
            current.buffers.write_telemetry(self._channel.rank, row.encode(), changes)
        current.row, current.changes = row, changes
        current.idle, current.entered = self.training.entry.idle, self.training.is_in(current.step)
        if self.recorder is not None and (current.stood_in or current.left_at is not None):
            taken, left_at, over = current.num_gradients, current.left_at, current.num_over
            state = current.idle, current.entered
            self.recorder.partial(Decision(current.step, taken, left_at, current.stood_in, over, *state))
        current.close(own, weights)
        if self._merge.weighting == "inverse_probability" and not self.training.entry.idle:
            self.reached.append(row.computed)
        now = self.stopwatch.now()
        self.merging.submit(now)
        return now

    # -- both threads, without it

    def _complete(
        self, current: Round, give_up_s: float | None = None, on_merged: Callable[[Round], None] | None = None
    ) -> None:
        """Wait for the merge of a closed round and publish it."""
        while not current.abandoned:
            try:
                epoch = self._wait_merged(current, give_up_s, on_merged)
            except MembersChanged:
                self._wait_regrouped(current)
            else:
                if self._publish(current, epoch):
                    break

    def _wait_merged(self, current: Round, give_up_s: float | None, on_merged: Callable[[Round], None] | None) -> int:
        """Wait for all collectives of a closed round; the epoch that they were launched in."""
        where = f"rank {self._channel.rank}, step {current.step}"
        with self._lock:
            epoch, works = self._channel.epoch, current.works
            if current.complete:
                return epoch
            if self._groups is None:
                raise MembersChanged
        for work, name in works:
            self._channel.wait(work, current.step, f"{where}, stage {name}", give_up_s, epoch)
            if on_merged is not None:
                on_merged(current)
        if self._apart:
            with self._lock:
                if epoch != self._channel.epoch:
                    raise MembersChanged
                work = current.telemetry or self._launch_telemetry(current)
            self._channel.wait(work, current.step, f"{where}, telemetry", give_up_s, epoch)
        return epoch

    def _launch_telemetry(self, current: Round) -> dist.Work:
        """All of this rank's gradients are merged: tell the others how it came through the step.

        Who has every rank's telemetry knows that all have all gradients. So if members leave, either none has given the
        merged gradients to its training thread, or all can do so.
        """
        assert current.row is not None
        assert self._groups is not None
        current.buffers.use_telemetry(torch.zeros_like(current.buffers.telemetry))
        wanted = self._membership is not None and bool(self._membership.wanted)
        # asked only now: while the members change, a step may be submitted that others are let in before
        # who is stood in for could not give its state; before the stages are planned nobody can merge with newcomers
        admits = wanted and self.is_planned and not current.stood_in
        row = replace(current.lost_in(current.row), admits=admits)
        current.buffers.write_telemetry(self._channel.rank, row.encode(), current.changes)
        group = self._groups.control if current.recorded is None else current.recorded.telemetry
        current.told = self._generation, self._ranks if current.recorded is None else current.recorded.told
        current.telemetry = current.buffers.merge_telemetry(group)
        return current.telemetry

    def _publish(self, current: Round, epoch: int) -> bool:
        """Give a merged step to the training thread; false where members have left meanwhile."""
        with self._lock:
            if epoch != self._channel.epoch or current.abandoned:
                return False
            if self._apart:
                self._note_telemetry(current)
            # of a device it is a copy already
            table = Table(current.buffers.rows.cpu().clone(), len(self.plan.stages))
            now, deadline = self.stopwatch.now(), self.deadline
            self._ring[current.step] = MergedStep(
                step=current.step,
                plan=self.plan,
                buffers=current.buffers,
                table=table,
                seconds=now - self.merging.merged_at,
                deadline_s=deadline.seconds,
                shadow_s=deadline.shadow_s,
                merged_at=now,
                stood_in=current.stood_in,
                num_gradients=current.num_gradients,
                num_over=current.num_over,
                idle=current.idle,
                entered=current.entered,
                among=None if self.recorder is None else current.merged_among(self._lost.get(current.step, {})),
            )
            self._lost.pop(current.step, None)
            if self.fell_behind:
                self._ring.clear()
            before_s = deadline.seconds
            self._channel.merged(current.step)
            try:
                deadline.decide(table)
            except Exception as error:  # a policy may be the user's
                self._channel.post_failure(f"rank {self._channel.rank}, step {current.step}: {error!r}")
                raise
            finally:
                self.merging.merged(now, any_late=table.any_late())
                self.training.stop_up_to(current.step)  # where it still is in this step, it comes to take it
                self._stand_in.merged(before_s=before_s)
                if self._membership is not None:
                    self._merged_among(self._membership, current.step, table, given=current.complete)
        return True

    # -- members come and go; called by `elastic.py`, and with the lock held where the name begins with an underscore

    def freeze(self) -> MergeProgress:
        """The members change: launch nothing before `regroup`. How far this rank has come."""
        with self._lock:
            return self._freeze()

    def _freeze(self) -> MergeProgress:
        self._channel.epoch += 1
        self._groups = None
        if self._absent_until == sys.maxsize and not self.fell_behind:
            return MergeProgress(-1)
        current = self.merging.round
        return MergeProgress(self.merging.step) if current is None else current.freeze()

    def telemetry_of(self, step: int) -> Tensor:
        """The merged telemetry of ``step``, to be given to who lacks it; zeros where this rank has none."""
        with self._lock:
            current = self.merging.round
            if current is not None and current.step == step:
                return current.buffers.telemetry.clone()
            if self.merging.step == step + 1 and len(self._last_telemetry):
                return self._last_telemetry.clone()
            return torch.zeros_like(self._new_buffers().telemetry)

    def regroup(
        self, groups: Groups, view: View, repair: Repair, telemetry: Tensor, provenance: Provenance = NO_CHANGE
    ) -> None:
        """Go on among the members of ``view``; ``telemetry`` of the step that is complete on some of them."""
        place_of = {rank: place for place, rank in enumerate(view.ranks)}
        with self._lock:
            if self.recorder is not None:
                self.recorder.regrouped(view.generation, view.ranks)
            self._groups, self._ranks, self._generation = groups, view.ranks, view.generation
            self._note_lost(repair.step, provenance)
            self._healing = (self._healing | view.joined) & set(view.ranks)
            if self._membership is not None:
                self._membership.healing = self._healing
            self.deadline.members(len(view.ranks))
            new = self._channel.rank in view.joined and self._absent_until == sys.maxsize
            if new:
                self._absent_until, self._tables, self._catch_up = view.step, [], None
                self.merging.restore(repair.step)
                self._last_taken_at = repair.step
                self.merging.begin_now(self.stopwatch.now())
                self.training.stop_up_to(view.step - 1)
                if repair.num_launched:
                    self._begin_round()
                self._stand_in.heal(True)
            current = self.merging.round
            if current is not None and current.step == repair.completed:
                current.buffers.use_telemetry(telemetry)
                current.complete = True
            elif current is not None and current.step == repair.step:
                current.regroup(
                    groups.gradients,
                    repair,
                    place_of,
                    self._new_buffers,
                    new=new,
                    generation=view.generation,
                    provenance=provenance,
                )
            self.merging.step_merged.notify_all()

    def _note_lost(self, step: int, provenance: Provenance) -> None:
        self._lost = {number: lost for number, lost in self._lost.items() if number >= self.merging.step}
        lost = self._lost.setdefault(step, {})
        for rank, buckets in provenance.lost.items():
            lost.setdefault(rank, set()).update(buckets)

    def put_out(self) -> None:
        """This rank is no member any more: its steps have no merge before it is let in again."""
        with self._lock:
            self._channel.epoch += 1
            self._groups, self._absent_until, self._gives_at = None, sys.maxsize, -1
            self.is_back = self.is_back and self.fell_behind  # then it is known already that it was away
            self.fell_behind = False
            if self.merging.round is not None:
                self.merging.round.abandoned = True
            self.merging.restore(self.merging.step)
            self._ring.clear()
            self._stand_in.pause()
            self.training.stop_up_to(sys.maxsize)
            self.merging.step_merged.notify_all()

    def end(self, error: BaseException) -> None:
        """The job ends here."""
        with self._lock:
            self._stand_in.end(error)

    def check_ended(self) -> None:
        """Raise what ended the job for this rank, if anything did."""
        if self._stand_in.error is not None:
            raise self._stand_in.error

    @property
    def absent_until(self) -> int:
        """The step from which on this rank takes part; `sys.maxsize`: it is not known."""
        return self._absent_until

    @property
    def gives_state(self) -> bool:
        """Whether the state in which the training thread enters its step is another's to go on from."""
        return self._gives_at == self.training.step

    @property
    def owes_state(self) -> bool:
        """Whether a newcomer waits for the state in which the training thread is still to enter a step."""
        return self._gives_at >= self.training.step

    def healed(self, step: int, history: History, deadline_s: float) -> None:
        """The training thread has the state of its peers at the beginning of ``step``: it takes part from there on."""
        with self._lock:
            self.training.restore(step)
            self.training.stop_only_up_to(max(step, self.merging.step) - 1)
            self._ring = {number: merged for number, merged in self._ring.items() if number >= step}
            self.deadline.restore(history)
            self.deadline.seconds = deadline_s
            for number, table in self._tables:
                if number >= history.num_steps:
                    self.deadline.decide(table)
            self._tables = []
            self._catch_up = self.training.step, sys.maxsize
            self._end_healing_if_caught_up()

    def _merged_among(self, membership: Membership, step: int, table: Table, *, given: bool) -> None:
        """A step is merged: who has its state, and who is let in.

        ``given``: another member had it complete before, and the members have changed since. So who was to be let in
        after it has been, or was not: no view comes that this rank could wait for.
        """
        membership.step = self.merging.step
        self._healing = self._healing & table.stood_in_ranks()
        membership.healing = table.stood_in_ranks()
        if self._stand_in.healing and self._catch_up is None and not self.fell_behind:
            self._tables.append((step, table))
        if self._catch_up is not None and table.stood_in_ranks() >= set(self._ranks):
            self._end_healing()  # the others are at their end, or no further: none of them waits for this rank
        if table.admits() and not given:
            if table.admits_of(self._channel.rank):
                self._gives_at = step + 1
            self._freeze()  # nothing of the next step is on its way when the others come in
            membership.hold(step + 1, leads=table.admits_of(self._channel.rank))

    def _note_telemetry(self, current: Round) -> None:
        """Who was no member when the telemetry was merged has none; the members may have changed since."""
        absent = absent_row(len(self.plan.stages))
        for rank in set(range(self._channel.world_size)) - set(current.told[1]):
            current.buffers.rows[rank] = absent
        self._last_telemetry = current.buffers.telemetry

    def _wait_regrouped(self, current: Round) -> None:
        with self._lock:
            if not self.merging.step_merged.wait_for(
                lambda: self._groups is not None or current.abandoned or self._stand_in.error is not None,
                self._channel.give_up_s,
            ):
                raise PeerFailed(f"rank {self._channel.rank}, step {current.step}: the members found to no new view")
            if self._stand_in.error is not None:
                raise self._stand_in.error

    def _nothing(self) -> MergedStep:
        """What a step comes to for a rank that is no member."""
        buffers = self._new_buffers()
        buffers.rows[:] = absent_row(len(self.plan.stages))
        now = self.stopwatch.now()
        return MergedStep(
            step=self.training.step,
            plan=self.plan,
            buffers=buffers,
            table=Table(buffers.rows.clone(), len(self.plan.stages)),
            seconds=now - self.training.applied_at if math.isfinite(self.training.applied_at) else 0.0,
            deadline_s=self.deadline.seconds,
            shadow_s=self.deadline.shadow_s,
            merged_at=now,
            stood_in=True,
            num_gradients=0,
            num_over=0,
        )

    def _new_buffers(self) -> StageBuffers:
        return StageBuffers(
            self.plan,
            self._parameters,
            self._channel.world_size,
            num_changes=self._num_changes,
            drop_nonfinite=self._merge.nonfinite == "drop",
            telemetry_apart=self._apart,
        )
