"""Merges the contributions of all ranks, one round per step, whichever thread hands in for this rank.

Every rank issues the same collectives in the same order: the buckets of step 0, the buckets of step 1, and so on.
The training thread issues them as its gradients are finished. When it is stuck, its stand-in (`stand_in.py`) has what
is left issued with weight 0, and the merged steps wait in a ring until the training thread comes to take them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from straggle.backward.clocks import Stopwatch
from straggle.backward.kept import NONE, UNDECIDED
from straggle.backward.stages import StagePlan
from straggle.merge.buffers import StageBuffers
from straggle.merge.channel import Channel, PeerFailed
from straggle.merge.current_deadline import DeadlineInForce
from straggle.merge.options import Merge, ReachedShares
from straggle.merge.rank_state import Whereabouts
from straggle.merge.round import Contribution, Layout, MergedStep, Round, Usage
from straggle.merge.stand_in import StandIn
from straggle.merge.telemetry import NO_FINGERPRINT, Table
from straggle.policies.estimators import Estimator, supplement_of
from straggle.policies.history import History

_log = logging.getLogger(__name__)


class Coordinator:
    """The rounds, the collectives and the ring of one wrapped model.

    ``num_changes``: numbers of the module's own buffers that ride along with each merge.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        plan: StagePlan,
        channel: Channel,
        *,
        deadline: DeadlineInForce,
        estimator: Estimator,
        merge: Merge,
        num_changes: int,
    ) -> None:
        if deadline.patience.granularity == "step" and estimator.supplements:
            raise ValueError(
                f"granularity='step' with {type(estimator).__name__}: it adds to gradients that are dropped then; "
                "use granularity='stage' or another estimator"
            )
        self._parameters = parameters
        self._channel = channel
        self._estimator = estimator
        self._merge = merge
        self._num_changes = num_changes
        self._reached = ReachedShares(merge.chance_window)
        self._usage = Usage()
        self._finishes_late = estimator.finishes_late and deadline.patience.max_lag > 0
        self._deadline = deadline
        self.rules = deadline.rules
        self.stopwatch = Stopwatch()
        self._where = Whereabouts(self.stopwatch)
        self._lock = self._where.lock
        self._ring: dict[int, MergedStep] = {}
        self._policy_error: Exception | None = None  # of the estimator, while a step was closed
        self._last_put = torch.cuda.Event() if parameters[0].is_cuda else None  # type: ignore[no-untyped-call]
        self._stand_in = StandIn(self._where, self._deadline, channel, device=parameters[0].device)
        self.learn(plan)

    # -- the training thread

    @property
    def step(self) -> int:
        """The step that the training thread is in or will enter next."""
        return self._where.training

    @property
    def lag(self) -> int:
        """Merged steps that the training thread has not yet taken; from any thread."""
        return self._where.lag

    @property
    def since_step_s(self) -> float:
        """Seconds since the training thread last took a merged step, or since it could have; from any thread."""
        return self._where.since_step_s

    @property
    def stop_requested(self) -> bool:
        """Whether the training thread is to leave its step: it is late, or it was stood in for."""
        return self._where.stop_requested

    @property
    def plan(self) -> StagePlan:
        """The stages as they are planned now."""
        return self._layout.plan

    def learn(self, plan: StagePlan) -> None:
        """Use this plan from here on; between two steps, on all ranks alike, before `start`."""
        self._layout = Layout(plan, self._parameters)
        self._held: StageBuffers | None = None  # whose views are p.grad
        self._spare: StageBuffers | None = None

    @property
    def history(self) -> History:
        """What the deadline policy has seen, to be saved with a checkpoint."""
        with self._lock:
            return self._deadline.history

    def restore(self, history: History) -> None:
        """Go on from the history of another run, with its step numbers; before the first step."""
        with self._lock:
            self._deadline.restore(history)
            self._where.merging = self._where.training = history.num_steps

    @property
    def reached(self) -> Tensor:
        """The share of each stage that this rank handed in of late, of shape (steps, stages)."""
        with self._lock:
            return self._reached.tensor()

    def restore_reached(self, reached: Tensor) -> None:
        """Go on from what `reached` was; before the first step."""
        with self._lock:
            self._reached.restore(reached)

    def wait_for_all(self) -> None:
        """Nobody is late from here on; before the first step."""
        self._deadline.wait_for_all()

    def start(self) -> None:
        """Start the stand-in: from now on this rank can be late, and its stages stay as they are."""
        self._deadline.prepare(self.plan, self._parameters)
        with self._lock:
            self._deadline.watch(self.plan)
        self._stand_in.start(self._hand_in, self._complete)

    def pause(self) -> None:
        """Between two steps: until `resume` the stand-in sleeps, and no step's time goes by."""
        with self._lock:
            self._stand_in.pause()

    def resume(self) -> None:
        """The time of the next step begins now."""
        with self._lock:
            self._where.begin_now()
            self._stand_in.resume()

    def close(self) -> None:
        """End the stand-in, and leave word for the peers."""
        self._stand_in.close()
        self._channel.close()

    def enter(
        self,
        num_microbatches: int,
        *,
        idle: bool = False,
        fingerprint: int = NO_FINGERPRINT,
        stepped: float = math.nan,
        kept: int = NONE,
        max_over: int | None = None,
    ) -> None:
        """The training thread enters its step.

        ``idle``: it has no data for it. ``fingerprint``: of its parameters, where the ranks compare them in this step.
        ``stepped``: how often its optimizers stepped since the merge before. ``kept``: the mark of the gradients that
        it keeps, where that is decided. ``max_over``: as many of its passes are taken for over, where it replays.
        """
        with self._lock:
            self._where.enter(
                num_microbatches, idle=idle, fingerprint=fingerprint, stepped=stepped, kept=kept, max_over=max_over
            )
            self._stand_in.entered()
            if kept != UNDECIDED:
                self._free_held()

    def keep(self, kept: int) -> None:
        """It is decided which gradients of the step before are kept, as copies: the buffers they were in are free."""
        with self._lock:
            self._where.kept = kept
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

    def _own_round(self) -> Round | None:
        """The round of the training thread's step, while it still takes gradients."""
        current = self._where.round
        return None if self._where.lag > 0 or current is None or current.closed else current

    def microbatch_finished(self) -> None:
        """The training thread has finished a micro-batch of its step."""
        self._where.microbatch_finished()

    def weigh(self, weight: float) -> None:
        """Give this rank's step a weight. Raises ``ValueError`` and, after the first gradient, ``RuntimeError``."""
        if not 0 < weight < math.inf:
            raise ValueError(f"weight={weight}: must be a positive number, such as the samples of this rank's step")
        with self._lock:
            if self._where.lag == 0 and (current := self._where.round) is not None:
                if current.num_gradients:
                    raise RuntimeError("step.weight comes before the first backward pass: gradients are scaled by it")
                current.weight = weight
            self._where.weight = weight

    def stop(self) -> None:
        """Ask the training thread to leave its step; from any thread."""
        self._where.stop(self._where.training)

    def offer(self, index: int, gradient: Tensor, number: int = 0) -> bool:
        """Take parameter ``index``'s gradient of backward pass ``number``; merge its bucket once that is complete.

        True where it completes its stage. The gradient of a step that was merged without it is shown to an estimator
        that finishes late, and discarded.
        Raises ``RuntimeError`` for more backward passes than ``num_microbatches``, and for a second gradient of one.
        """
        with self._lock:
            if self._where.lag > 0 or (current := self._open_round()).closed:
                self._observe_late(index, gradient)
                return False
            if current.is_in(index, number) or current.is_full(index):
                raise RuntimeError(self._too_many(index, twice=current.is_in(index, number)))
            complete = current.put(index, gradient, number)
            if self._last_put is not None:
                self._last_put.record()
            if not complete:
                return False
            if self._estimator.watches_own or self._estimator.supplements:
                own, parameter = current.read(index), self._parameters[index]
                if self._estimator.watches_own:
                    self._estimator.observe(parameter, own, merged=False)
                if self._estimator.supplements:
                    current.add(index, supplement_of(self._estimator, parameter, own))
                    if self._last_put is not None:
                        self._last_put.record()
            return current.parameter_complete(index, self._where.since_entered_s)

    def offer_late(self, index: int, gradient: Tensor) -> None:
        """Take a gradient that is not to be merged with its step."""
        with self._lock:
            self._observe_late(index, gradient)

    def _observe_late(self, index: int, gradient: Tensor) -> None:
        if self._finishes_late:
            self._estimator.observe_late(self._parameters[index], gradient, 1 / self._where.num_microbatches)

    def hand_over(self, scalars: Mapping[str, float], changes: Tensor | None) -> bool:
        """The training thread is late in its backward pass: hand in what it has, while it goes on.

        The stand-in waits for the merge. False where the pass has to end instead.
        """
        with self._lock:
            if not self._finishes_late or not self._stand_in.started:
                return False
            if self._where.lag == 0 and not (current := self._open_round()).closed:
                self._close_own(current, truncated=True, scalars=scalars, changes=changes)
                self._stand_in.hand_over(current)
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
        tells = False
        with self._lock:
            mine = self._where.lag == 0 and not (current := self._open_round()).closed
            self._where.overran = self._finishes_late and not mine
            self._where.taking = mine
            if mine:
                if abstain:
                    self._close_abstaining(current)
                else:
                    self._close_own(current, truncated=truncated, failed=failed, scalars=scalars, changes=changes)
                tells = self._stand_in.finished(current.step, truncated=truncated)
            self.stopwatch.enter("outside")
        if tells:
            self._channel.post_finished(current.step)
        if mine:
            self._complete(current)
        return self._take()

    def fail(self, error: BaseException) -> None:
        """The user's code raised in this step: tell the peers, and let them finish it, so that none waits."""
        what = f"rank {self._channel.rank} raised in step {self.step}, {self.stopwatch.phase}: {error!r}"
        self._where.failed = True
        try:
            self._channel.post_failure(what)
            with self._lock:
                if self._where.lag > 0 or (current := self._open_round()).closed:
                    return  # the stand-in tells with its next round
                self._close_abstaining(current)
            self._complete(current, give_up_s=5.0)
        except RuntimeError as problem:  # a peer is gone too, but the user's own error matters more
            _log.warning("could not tell the peers of this failure: %s", problem)

    def _take(self) -> MergedStep:
        """Wait until the training thread's step is merged; the training thread goes on to the next."""
        with self._lock:
            where = self._where
            while where.training not in self._ring:
                if self._stand_in.error is not None:
                    raise self._stand_in.error
                where.step_merged.wait()
            merged = self._ring.pop(where.training)
            where.take(merged)
            self._held = merged.buffers
            self._stand_in.took(behind=merged.stood_in or where.lag > 0)
        if self._policy_error is not None:
            raise self._policy_error
        if failed := [rank for rank in merged.table.failed_ranks() if rank != self._channel.rank]:
            raise PeerFailed(
                self._channel.explain(f"rank {self._channel.rank}, step {merged.step}: ranks {failed} failed")
            )
        return merged

    def _too_many(self, index: int, *, twice: bool) -> str:
        stage = next(stage.name for stage in self.plan.stages if index in stage.parameters)
        where = f"rank {self._channel.rank}, step {self.step}, stage {stage}"
        if twice:
            return (
                f"{where}: a parameter got a gradient twice in one backward pass, as shared weights do under reentrant "
                "checkpointing: use checkpoint(..., use_reentrant=False)"
            )
        return (
            f"{where}: a gradient came after "
            f"{self._where.num_microbatches} backward passes; for more of them, several losses included, write "
            "model.step(num_microbatches=<number of backward passes>)"
        )

    # -- what both threads do, with the lock held

    def _open_round(self) -> Round:
        """The round that is being merged, begun if it is not yet."""
        where = self._where
        if where.round is None:
            buffers = self._spare or StageBuffers(
                self.plan,
                self._parameters,
                self._channel.world_size,
                num_changes=self._num_changes,
                drop_nonfinite=self._merge.nonfinite == "drop",
            )
            self._spare = None
            factors = None
            if self._merge.weighting == "inverse_chance":
                factors = self._reached.factors(len(self.plan.stages), self._merge.chance_cap)
            whole = self._deadline.patience.granularity == "step"
            group = self._channel.gradients
            where.round = Round(
                where.merging, self._layout, buffers, group, factors=factors, whole=whole, usage=self._usage
            )
            where.round.weight = where.weight  # of a rank that has not entered: its last step's
            if where.in_step:
                where.round.num_microbatches, where.round.max_over = where.num_microbatches, where.max_over
        return where.round

    def _hand_in(self) -> Round:
        """For the stand-in: close the round for a training thread that cannot."""
        if self._last_put is not None:  # the gradients that go into the merge are copied in by another stream
            self._last_put.wait()
        current = self._open_round()
        self._close_abstaining(current)
        return current

    def _close_own(
        self,
        current: Round,
        *,
        truncated: bool,
        failed: bool = False,
        scalars: Mapping[str, float],
        changes: Tensor | None,
    ) -> None:
        """Issue what is left of the training thread's own step."""
        own = current.own_part(self.stopwatch.phase, truncated=truncated, failed=failed)
        if not truncated:
            self.microbatch_finished()
        if min(own.computed) < 1 and not self._where.idle:
            own = self._estimate(current, own)
        self._close(current, own, scalars, changes)

    def _estimate(self, current: Round, own: Contribution) -> Contribution:
        """Let the estimator fill in. Where it fails, the peers are told with this step, and the rank ends with it."""
        try:
            return current.estimate(own, self._estimator, self._parameters)
        except Exception as error:
            self._policy_error, self._where.failed = error, True
            self._channel.post_failure(f"rank {self._channel.rank}, step {current.step}: {error!r}")
            return own

    def _close_abstaining(self, current: Round) -> None:
        """Issue the rest of a step for a training thread that cannot: what it finished counts, the rest does not."""
        current.stood_in = True
        own = current.finished_part(self.stopwatch.phase)
        if not self._where.idle:
            current.abstain(own, self._estimator, self._parameters)
        self._close(current, own, {}, None)
        self._where.stop(current.step)

    def _close(self, current: Round, own: Contribution, scalars: Mapping[str, float], changes: Tensor | None) -> None:
        """Issue all that is left, with the telemetry."""
        without_store = not self._channel.store_reachable
        row = self._where.row(current, own, self._layout, scalars, without_store=without_store)
        current.buffers.tell(self._channel.rank, row.encode(), changes)
        current.close(own)
        if self._merge.weighting == "inverse_chance" and not self._where.idle:
            self._reached.append(self._layout.by_stage(own.computed))
        self._where.issued()

    # -- what both threads do without it

    def _complete(self, current: Round, give_up_s: float | None = None) -> None:
        """Wait for the merge of a closed round and publish it."""
        for work, name in current.works:
            what = f"rank {self._channel.rank}, step {current.step}, stage {name}"
            self._channel.wait(work, current.step, what, give_up_s)
        table = Table(current.buffers.rows.cpu().clone(), len(self.plan.stages))
        with self._lock:
            now, deadline = self._where.now(), self._deadline
            self._ring[current.step] = MergedStep(
                step=current.step,
                plan=self.plan,
                buffers=current.buffers,
                table=table,
                seconds=now - self._where.merged_at,
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
                self._where.merged(now, any_late=table.any_late())
                self._stand_in.merged(before_s=before_s)
