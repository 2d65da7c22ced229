"""Merges the contributions of all ranks, one round per step, whichever thread submits for this rank.

Every rank launches the same collectives in the same order: the buckets of step 0, the buckets of step 1, and so on.
The training thread launches them as its gradients are finished. When it is stuck, its stand-in (`stand_in.py`) launches
what is left with weight 0, and the merged steps wait in a ring until the training thread comes to take them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from straggle.backward.clocks import Stopwatch
from straggle.backward.kept import UNDECIDED
from straggle.backward.passes import TWICE_IN_ONE_PASS
from straggle.backward.stages import StagePlan
from straggle.merge.buffers import StageBuffers
from straggle.merge.channel import Channel, PeerFailed
from straggle.merge.current_deadline import CurrentDeadline
from straggle.merge.options import Merge, ReachedShares
from straggle.merge.rank_state import Entry, MergeSide, TrainingSide
from straggle.merge.round import Contribution, Layout, MergedStep, Round, Usage
from straggle.merge.row import row_of
from straggle.merge.stand_in import StandIn
from straggle.merge.telemetry import Table
from straggle.policies.fill_in import FillIn
from straggle.policies.history import History

_log = logging.getLogger(__name__)


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
        self._ring: dict[int, MergedStep] = {}
        self._policy_error: Exception | None = None  # of the estimator, while a step was submitted
        self._last_copy = torch.cuda.Event() if parameters[0].is_cuda else None  # type: ignore[no-untyped-call]
        self._stand_in = StandIn(self.training, self.merging, deadline, channel, device=parameters[0].device)
        self.learn(plan)

    # -- between two steps

    @property
    def lag(self) -> int:
        """Merged steps that the training thread has not yet taken; from any thread."""
        return max(0, self.merging.step - self.training.step)

    def learn(self, plan: StagePlan) -> None:
        """Use this plan from here on; between two steps, on all ranks alike, before `start`."""
        self.plan = plan
        self._layout = Layout(plan, self._parameters)
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
            training, merging, now = self.training, self.merging, self.stopwatch.now()
            # where it was still in its pass when the last step was merged, its peers began then
            came_late = training.ran_past_merge and merging.step == training.step
            training.enter(entry, now, merging.merged_at if came_late else now)
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
            if self.merging.step <= self.training.step and (current := self.merging.round) is not None:
                if current.num_gradients:
                    raise RuntimeError("step.weight comes before the first backward pass: gradients are scaled by it")
                current.weight = weight
            self.training.weigh(weight)

    def gradients_ready(self, indices: Sequence[int], gradients: Sequence[Tensor], number: int = 0) -> bool:
        """Take these parameters' gradients of backward pass ``number``; merge each bucket that is complete with them.

        True where they complete a stage. Gradients of a step that was merged without them are shown to an estimator
        that finishes late, and discarded.
        Raises ``RuntimeError`` for more backward passes than ``num_microbatches``, and for a second gradient of one.
        """
        with self._lock:
            current, training = self.merging.round, self.training
            if current is None and self.merging.step <= training.step:
                current = self._begin_round()
            if current is None or current.closed or self.merging.step > training.step:
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

    def submit_partial(self, scalars: Mapping[str, float], changes: Tensor | None) -> bool:
        """The training thread is late in its backward pass: submit what it has, while it goes on.

        The stand-in waits for the merge. False where the pass has to end instead.
        """
        with self._lock:
            if not self._fill_in.finishes_late or not self._stand_in.started:
                return False
            if (current := self._open_own_round()) is not None:
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
    ) -> MergedStep:
        """The training thread's work for its step is over: merge the rest, wait for the peers, and take the result.

        ``truncated``: it was cut short; ``failed``: a backward pass did not come to its end. ``changes`` of the
        module's buffers, where the rank finished its forward pass; ``abstain``: give what is finished and nothing else,
        as the stand-in does.
        Raises `PeerFailed` when a rank failed in this step or cannot be reached.
        """
        posts = False
        with self._lock:
            mine = (current := self._open_own_round()) is not None
            self.training.leave(merges=mine, ran_past_merge=self._fill_in.finishes_late and not mine)
            if current is not None:
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
            self._complete(current)
        return self._take()

    def fail(self, error: BaseException) -> None:
        """The user's code raised in this step: post it, and let the peers finish the step, so that none waits."""
        what = f"rank {self._channel.rank} raised in step {self.training.step}, {self.stopwatch.phase}: {error!r}"
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
                self.merging.step_merged.wait()
            training.take(merged, self.stopwatch.now())
            self._held = merged.buffers
            if merged.stood_in or self.merging.step > training.step:
                self._stand_in.applied()
        if self._policy_error is not None:
            raise self._policy_error
        if failed := [rank for rank in merged.table.failed_ranks() if rank != self._channel.rank]:
            raise PeerFailed(
                self._channel.explain(f"rank {self._channel.rank}, step {merged.step}: ranks {failed} failed")
            )
        return merged

    # -- both threads, with the lock held

    def _own_round(self) -> Round | None:
        """The round of the training thread's step, if it is begun and still takes gradients."""
        current = self.merging.round
        return None if current is None or current.closed or self.merging.step > self.training.step else current

    def _open_own_round(self) -> Round | None:
        """The same, begun if it is not yet; `None` where it was submitted, in the training thread's place or by it."""
        if self.merging.step > self.training.step:
            return None
        current = self.merging.round or self._begin_round()
        return None if current.closed else current

    def _begin_round(self) -> Round:
        training, merging, merge = self.training, self.merging, self._merge
        buffers = self._spare or StageBuffers(
            self.plan,
            self._parameters,
            self._channel.world_size,
            num_changes=self._num_changes,
            drop_nonfinite=merge.nonfinite == "drop",
        )
        self._spare = None
        factors = None
        if merge.weighting == "inverse_probability":
            factors = self.reached.factors(len(self.plan.stages), merge.max_weight)
        current = Round(
            merging.step,
            self._layout,
            buffers,
            self._channel.gradients,
            factors=factors,
            all_or_nothing=self.deadline.late_handling.granularity == "step",
            usage=self._usage,
        )
        current.weight = training.weight  # of a rank that has not entered: its last step's
        if training.step == merging.step and training.entered_at is not None:
            current.num_microbatches = training.entry.num_microbatches
            if training.entry.max_over is not None:
                current.max_over = training.entry.max_over
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
            self.training.fail()
            self._channel.post_failure(f"rank {self._channel.rank}, step {current.step}: {error!r}")
            return own

    def _submit_for_stuck(self) -> Round:
        """For the stand-in: submit for a training thread that cannot."""
        if self._last_copy is not None:  # the gradients that go into the merge are copied in by another stream
            self._last_copy.wait()
        current = self.merging.round or self._begin_round()
        self._submit_finished(current)
        return current

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
        current.buffers.write_telemetry(self._channel.rank, row.encode(), changes)
        current.close(own, weights)
        if self._merge.weighting == "inverse_probability" and not self.training.entry.idle:
            self.reached.append(row.computed)
        now = self.stopwatch.now()
        self.merging.submit(now)
        return now

    # -- both threads, without it

    def _complete(self, current: Round, give_up_s: float | None = None) -> None:
        """Wait for the merge of a closed round and publish it."""
        for work, name in current.works:
            what = f"rank {self._channel.rank}, step {current.step}, stage {name}"
            self._channel.wait(work, current.step, what, give_up_s)
        table = Table(current.buffers.rows.cpu().clone(), len(self.plan.stages))
        with self._lock:
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
            )
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
