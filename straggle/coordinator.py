"""Merges the contributions of all ranks, one round per step, whichever thread hands in for this rank.

Every rank issues the same collectives in the same order: the buckets of step 0, the buckets of step 1, and so on.
The training thread issues them as its gradients are finished. When it is stuck, its stand-in (a second thread) issues
what is left with weight 0, and the merged steps wait in a ring until the training thread comes to take them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from straggle.buffers import StageBuffers
from straggle.channel import LONG_S, Channel, PeerFailed
from straggle.clocks import Stopwatch
from straggle.deadline import Deadline, Patience, WaitForAll
from straggle.estimators import Estimator
from straggle.history import History, HistoryWindow
from straggle.merge import Merge, ReachedShares
from straggle.outcome import Rules
from straggle.report import PHASES
from straggle.rounds import Contribution, Layout, Round
from straggle.stages import Stage, StagePlan
from straggle.telemetry import NO_FINGERPRINT, Row, Table

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergedStep:
    """A step that all ranks have merged, waiting for this rank to apply it."""

    step: int
    plan: StagePlan
    buffers: StageBuffers
    table: Table
    seconds: float
    deadline_s: float
    shadow_s: float
    merged_at: float
    stood_in: bool
    num_gradients: int


class Coordinator:
    """The rounds, the collectives, the stand-in and the ring of one wrapped model."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        plan: StagePlan,
        channel: Channel,
        *,
        deadline: Deadline,
        estimator: Estimator,
        patience: Patience,
        merge: Merge,
        num_changes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if patience.granularity == "step" and estimator.supplements:
            raise ValueError(
                f"granularity='step' with {type(estimator).__name__}: it adds to gradients that are dropped then; "
                "use granularity='stage' or another estimator"
            )
        self._parameters = parameters
        self._channel = channel
        self._policy = deadline
        self._estimator = estimator
        self._patience = patience
        self._merge = merge
        self._num_changes = num_changes
        self._reached = ReachedShares(merge.chance_window)
        self._finishes_late = estimator.finishes_late and patience.max_lag > 0
        self.rules = Rules.of(deadline, patience, channel.world_size)
        self._clock = clock
        self.stopwatch = Stopwatch(clock)
        self._lock = threading.Lock()
        self._step_merged = threading.Condition(self._lock)
        self._stand_in_wakes = threading.Condition(self._lock)
        self.learn(plan)
        # the round that is being merged, by whichever thread
        self._merging = 0
        self._round: Round | None = None
        self._merged_at = clock()
        self._times_at_merge = self.stopwatch.read()
        self._window = HistoryWindow(deadline.window, channel.world_size)
        self._deadline_s = math.inf  # of the step that is being merged; the first waits for everyone
        self._stage_share: Tensor | None = None  # of the model, where the policy looks at more than times
        self._shadow_s = math.nan if deadline.enforced else math.inf  # of a policy that is not enforced
        self._waited_since = math.inf  # when a quorum was seen to wait
        self._merge_s = 0.0
        self._closed_at = self._merged_at
        # the training thread
        self._training = 0  # its step: the one that it is in, or will enter next
        self._entered_at: float | None = None
        self._clock_from = -math.inf  # what its deadline counts from
        self._overran = False  # it was still in the backward pass of the step before when that was merged
        self._took_at = -math.inf
        self._made_at = clock()
        self._fingerprint = NO_FINGERPRINT
        self._num_microbatches = 1
        self._weight = 1.0
        self._idle = False
        self._microbatch_s: list[float] = []  # when each was finished
        self._overrun_s = 0.0
        self._failed = False
        # between both
        self._ring: dict[int, MergedStep] = {}
        self._stop_step = -1  # the training thread is to leave every step up to this one
        self._unposted: int | None = None  # the step whose end the peers are to learn of, if it comes to that
        self._handed_over: Round | None = None  # closed, and the training thread does not wait for its merge
        self._any_late = False  # in the step before
        self._last_put = torch.cuda.Event() if parameters[0].is_cuda else None  # type: ignore[no-untyped-call]
        self._doing = ""  # what the peers were last told that the training thread is stuck in
        self._error: BaseException | None = None
        self._closing = False
        self._paused = False
        self._stand_in: threading.Thread | None = None

    # -- the training thread

    @property
    def step(self) -> int:
        """The step that the training thread is in or will enter next."""
        return self._training

    @property
    def lag(self) -> int:
        """Merged steps that the training thread has not yet taken; from any thread."""
        return max(0, self._merging - self._training)

    @property
    def since_step_s(self) -> float:
        """Seconds since the training thread last took a merged step, or since it could have; from any thread."""
        return self._clock() - max(self._took_at, self._made_at)

    @property
    def stop_requested(self) -> bool:
        """Whether the training thread is to leave its step: it is late, or it was stood in for."""
        return self._stop_step >= self._training or self._merging > self._training

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
            return self._window.read()

    def restore(self, history: History) -> None:
        """Go on from the history of another run, with its step numbers; before the first step."""
        with self._lock:
            self._window.restore(history)
            self._merging = self._training = history.num_steps

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
        self._policy = WaitForAll()

    def start(self) -> None:
        """Start the stand-in: from now on this rank can be late, and its stages stay as they are."""
        self._policy.prepare(self._patience, [self._parts(stage) for stage in self.plan.stages])
        if self._policy.wants_progress:
            numel = torch.tensor([stage.numel for stage in self.plan.stages], dtype=torch.float32)
            with self._lock:
                self._stage_share = numel / numel.sum()
                self._window.watch(self._stage_share)
        self._stand_in = threading.Thread(target=self._stand_in_loop, name="straggle-stand-in", daemon=True)
        self._stand_in.start()

    def pause(self) -> None:
        """Between two steps: until `resume` the stand-in sleeps, and no step's time goes by."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """The time of the next step begins now."""
        with self._lock:
            self._paused = False
            self._took_at = self._merged_at = self._clock()
            self._times_at_merge = self.stopwatch.read()
            self._stand_in_wakes.notify_all()

    def _parts(self, stage: Stage) -> int:
        """How many gradients of the same size would come as evenly as those of the stage."""
        return round(stage.numel**2 / sum(self._parameters[index].numel() ** 2 for index in stage.parameters))

    def close(self) -> None:
        """End the stand-in."""
        with self._lock:
            self._closing = True
            self._stand_in_wakes.notify_all()
        if self._stand_in is not None:
            self._stand_in.join(timeout=5)

    def enter(self, num_microbatches: int, *, idle: bool = False, fingerprint: int = NO_FINGERPRINT) -> None:
        """The training thread enters its step; the buffers with the gradients of the step before are free again.

        ``idle``: it has no data for it. ``fingerprint``: of its parameters, where the ranks compare them in this step.
        """
        with self._lock:
            self._fingerprint = fingerprint
            self._entered_at = self._clock_from = self._clock()
            if self._overran and self._merging == self._training:  # its peers began when the last merge ended
                self._clock_from = self._merged_at
            self._num_microbatches = num_microbatches
            self._weight, self._idle, self._microbatch_s = 1.0, idle, []
            if self._entered_at >= self._merged_at + self._deadline_s:
                self._stand_in_wakes.notify()  # it sleeps until it would hand in for a rank that has not entered
            if self._held is not None:
                self._spare = self._spare or self._held  # a second spare is memory that only a stuck rank needs
                self._held = None

    def microbatch_finished(self) -> None:
        """The training thread has finished a micro-batch of its step."""
        if len(self._microbatch_s) < self._num_microbatches:  # a loop may call the model more often
            self._microbatch_s.append(self._clock() - (self._entered_at or 0.0))

    def weigh(self, weight: float) -> None:
        """Give this rank's step a weight. Raises ``ValueError`` and, after the first gradient, ``RuntimeError``."""
        if not 0 < weight < math.inf:
            raise ValueError(f"weight={weight}: must be a positive number, such as the samples of this rank's step")
        with self._lock:
            if self._merging == self._training and self._round is not None:
                if self._round.num_gradients:
                    raise RuntimeError("step.weight comes before the first backward pass: gradients are scaled by it")
                self._round.weight = weight
            self._weight = weight

    def stop(self) -> None:
        """Ask the training thread to leave its step; from any thread."""
        self._stop_step = max(self._stop_step, self._training)

    def offer(self, index: int, gradient: Tensor) -> bool:
        """Take parameter ``index``'s gradient of one backward pass; merge its bucket once that is complete.

        True where it completes its stage. The gradient of a step that was merged without it is shown to an estimator
        that finishes late, and discarded.
        Raises ``RuntimeError`` for more backward passes than ``num_microbatches``.
        """
        with self._lock:
            if self._merging > self._training or (current := self._open_round()).closed:
                self._observe_late(index, gradient)
                return False
            if current.is_full(index):
                raise RuntimeError(self._too_many(index))
            complete = current.put(index, gradient)
            if self._last_put is not None:
                self._last_put.record()
            if not complete:
                return False
            if self._estimator.watches_own or self._estimator.supplements:
                own, parameter = current.read(index), self._parameters[index]
                if self._estimator.watches_own:
                    self._estimator.observe(parameter, own, merged=False)
                if self._estimator.supplements:
                    current.add(index, self._estimator.supplement(parameter, own))
                    if self._last_put is not None:
                        self._last_put.record()
            return current.parameter_complete(index, self._clock() - (self._entered_at or 0.0))

    def offer_late(self, index: int, gradient: Tensor) -> None:
        """Take a gradient that is not to be merged with its step."""
        with self._lock:
            self._observe_late(index, gradient)

    def _observe_late(self, index: int, gradient: Tensor) -> None:
        if self._finishes_late:
            self._estimator.observe_late(self._parameters[index], gradient, 1 / self._num_microbatches)

    def hand_over(self, scalars: Mapping[str, float], changes: Tensor | None) -> bool:
        """The training thread is late in its backward pass: hand in what it has, while it goes on.

        The stand-in waits for the merge. False where the pass has to end instead.
        """
        with self._lock:
            if not self._finishes_late or self._stand_in is None:
                return False
            if self._merging == self._training and not (current := self._open_round()).closed:
                self._close_own(current, truncated=True, scalars=scalars, changes=changes)
                self._handed_over = current
                if self._deadline_s < math.inf:
                    self._unposted = current.step
                self._stand_in_wakes.notify()
            return True

    def finish(
        self,
        *,
        truncated: bool,
        scalars: Mapping[str, float],
        changes: Tensor | None = None,
        abstain: bool = False,
    ) -> MergedStep:
        """The training thread's work for its step is over: merge the rest, wait for the peers, and take the result.

        ``changes`` of the module's buffers, where the rank finished its forward pass; ``abstain``: give what is
        finished and nothing else, as the stand-in does.
        Raises `PeerFailed` when a rank failed in this step or cannot be reached.
        """
        with self._lock:
            mine = self._merging == self._training and not (current := self._open_round()).closed
            self._overran = self._finishes_late and not mine
            if mine:
                if abstain:
                    self._close_abstaining(current)
                else:
                    self._close_own(current, truncated=truncated, scalars=scalars, changes=changes)
                if self._deadline_s < math.inf:
                    self._unposted = current.step
                    if self._clock() >= self._post_at():
                        self._stand_in_wakes.notify()
            self.stopwatch.enter("outside")
        if mine:
            self._complete(current)
        return self._take()

    def fail(self, error: BaseException) -> None:
        """The user's code raised in this step: tell the peers, and let them finish it, so that none waits."""
        what = f"rank {self._channel.rank} raised in step {self._training}, {self.stopwatch.phase}: {error!r}"
        self._failed = True
        try:
            self._channel.post_failure(what)
            with self._lock:
                if self._merging != self._training or (current := self._open_round()).closed:
                    return  # the stand-in tells with its next round
                self._close_abstaining(current)
            self._complete(current, give_up_s=5.0)
        except RuntimeError as problem:  # a peer is gone too, but the user's own error matters more
            _log.warning("could not tell the peers of this failure: %s", problem)

    def _take(self) -> MergedStep:
        """Wait until the training thread's step is merged; the training thread goes on to the next."""
        with self._lock:
            while self._training not in self._ring:
                if self._error is not None:
                    raise self._error
                self._step_merged.wait()
            merged = self._ring.pop(self._training)
            now = self._clock()
            if merged.stood_in:
                self._overrun_s += now - max(merged.merged_at, self._took_at)
            self._took_at = now
            self._held = merged.buffers
            self._training += 1
            self._entered_at = None
            if merged.stood_in or self._merging > self._training:
                self._stand_in_wakes.notify()  # it may have stopped at max_lag
        if failed := [rank for rank in merged.table.failed_ranks() if rank != self._channel.rank]:
            raise PeerFailed(
                self._channel.explain(f"rank {self._channel.rank}, step {merged.step}: ranks {failed} failed")
            )
        return merged

    def _too_many(self, index: int) -> str:
        stage = next(stage.name for stage in self.plan.stages if index in stage.parameters)
        return (
            f"rank {self._channel.rank}, step {self._training}, stage {stage}: a gradient came after "
            f"{self._num_microbatches} backward passes; for more of them, several losses included, write "
            "model.step(num_microbatches=<number of backward passes>)"
        )

    # -- what both threads do, with the lock held

    def _open_round(self) -> Round:
        if self._round is None:
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
            whole = self._patience.granularity == "step"
            group = self._channel.gradients
            self._round = Round(self._merging, self._layout, buffers, group, factors=factors, whole=whole)
            self._round.weight = self._weight  # of a rank that has not entered: its last step's
            if self._in_step():
                self._round.num_microbatches = self._num_microbatches
        return self._round

    def _in_step(self) -> bool:
        """Whether the training thread is in the step that is being merged."""
        return self._training == self._merging and self._entered_at is not None

    def _close_own(
        self, current: Round, *, truncated: bool, scalars: Mapping[str, float], changes: Tensor | None
    ) -> None:
        """Issue what is left of the training thread's own step."""
        own = current.own_part(truncated=truncated, in_backward=self.stopwatch.phase == "backward")
        if not truncated:
            self.microbatch_finished()
        if truncated and not self._idle:
            own = current.estimate(own, self._estimator, self._parameters)
        self._close(current, own, scalars, changes)

    def _close_abstaining(self, current: Round) -> None:
        """Issue the rest of a step for a training thread that cannot: what it finished counts, the rest does not."""
        current.stood_in = True
        own = current.finished_part()
        if not self._idle:
            current.abstain(own, self._estimator, self._parameters)
        self._close(current, own, {}, None)
        self._stop_step = max(self._stop_step, current.step)

    def _close(self, current: Round, own: Contribution, scalars: Mapping[str, float], changes: Tensor | None) -> None:
        """Issue all that is left, with the telemetry."""
        current.buffers.tell(self._channel.rank, self._row(current, own, scalars).encode(), changes)
        current.close(own)
        if self._merge.weighting == "inverse_chance" and not self._idle:
            self._reached.append(self._layout.by_stage(own.computed))
        self._closed_at = self._clock()

    def _row(self, current: Round, own: Contribution, scalars: Mapping[str, float]) -> Row:
        """This rank's telemetry for the round."""
        now, times = self._clock(), self.stopwatch.read()
        entered_at = self._entered_at if self._in_step() else None
        idle = entered_at is not None and self._idle
        late = min(own.computed) < 1 and not idle
        overrun_s, self._overrun_s = self._overrun_s, 0.0
        estimated = [own.estimated.get(index, 0.0) for index in range(len(own.computed))]
        computed, weights = self._layout.by_stage(own.computed), current.weights(own)
        return Row(
            times={phase: times[phase] - self._times_at_merge[phase] for phase in PHASES},
            compute_s=math.nan if entered_at is None or idle else now - self._clock_from,
            busy_s=now - self._merged_at,
            overrun_s=overrun_s,
            late=late,
            stood_in=current.stood_in,
            cause=PHASES.index(self.stopwatch.phase) if late else -1,
            failed=self._failed,
            idle=idle,
            weight=current.weight,
            # a rank that has not entered may have an older state, which is no different one
            fingerprint=NO_FINGERPRINT if entered_at is None else self._fingerprint,
            computed=computed,
            estimated=self._layout.by_stage(estimated),
            stage_s=tuple(current.stage_s),
            weights=computed if weights is own.computed else self._layout.by_stage(weights),
            merge_s=self._merge_s,
            num_microbatches=current.num_microbatches,
            microbatch_s=tuple(self._microbatch_s) if self._in_step() else (),
            scalars=scalars,
        )

    # -- what both threads do without it

    def _complete(self, current: Round, give_up_s: float | None = None) -> None:
        """Wait for the merge of a closed round and publish it."""
        for work, name in current.works:
            what = f"rank {self._channel.rank}, step {current.step}, stage {name}"
            self._channel.wait(work, current.step, what, give_up_s)
        table = Table(current.buffers.rows.cpu().clone(), len(self.plan.stages))
        with self._lock:
            now = self._clock()
            self._ring[current.step] = MergedStep(
                step=current.step,
                plan=self.plan,
                buffers=current.buffers,
                table=table,
                seconds=now - self._merged_at,
                deadline_s=self._deadline_s,
                shadow_s=self._shadow_s,
                merged_at=now,
                stood_in=current.stood_in,
                num_gradients=current.num_gradients,
            )
            before_s, self._merge_s = self._deadline_s, now - self._closed_at
            self._decide(table)
            self._any_late = table.any_late()
            self._merging += 1
            self._waited_since = math.inf
            self._round = None
            self._merged_at, self._times_at_merge = now, self.stopwatch.read()
            self._step_merged.notify_all()
            if self._deadline_s < 0.9 * before_s:  # it sleeps until the end of a longer one
                self._stand_in_wakes.notify()

    def _decide(self, table: Table) -> None:
        """The deadline of the next step."""
        shares = self._stage_share
        progress = None if shares is None else table.progress(shares, self._patience.granularity)
        decided_s = self._policy.decide(self._window.append(table.compute_s(), table.finished(), progress))
        if self._policy.enforced:
            self._deadline_s = decided_s
        else:
            self._shadow_s = decided_s

    # -- the stand-in

    def _stand_in_loop(self) -> None:
        try:
            with self._own_stream():
                while not self._closing:
                    self._stand_in_once()
        except BaseException as error:
            with self._lock:
                self._error = error
                self._stop_step = self._merging
                self._step_merged.notify_all()

    def _own_stream(self) -> contextlib.AbstractContextManager[object]:
        """On a CUDA device the stand-in's collectives must not queue behind the kernels of the training thread."""
        if self._last_put is None:
            return contextlib.nullcontext()
        device = self._parameters[0].device
        torch.cuda.set_device(device)
        return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def _stand_in_once(self) -> None:
        """Post what the training thread finished; then watch the step: stop a late rank, or hand in for it."""
        with self._lock:
            if self._paused and not self._closing:
                self._stand_in_wakes.wait()
                return
            finished = self._to_post()
            handed_over, self._handed_over = self._handed_over, None
            doing, was_doing = self._stuck_in(), self._doing
            self._doing = doing
        if finished is not None:
            self._channel.post_finished(finished)
        if doing or was_doing:
            self._channel.post_doing(doing)
        if handed_over is not None:
            self._complete(handed_over)
            return
        with self._lock:
            step, (stop_at, _), post_at = self._merging, self._limits(), self._post_at()
            wake_at = min(stop_at, post_at) if self._clock() < post_at else stop_at
            if self._closing or self._handed_over or self._post_due() or self._sleep_until(wake_at):
                return
        waited_for = self._channel.num_finished(step) >= self.rules.quorum
        with self._lock:
            if waited_for and step == self._merging:
                self._waited_since = min(self._waited_since, self._clock())
            stop_at, hand_in_at = self._limits()
            closed = self._round is not None and self._round.closed  # all is issued: there is nothing left to say
            if step != self._merging or closed or self._clock() < stop_at:
                return
            if not waited_for:
                asked_for_s = self._clock() - max(stop_at, self._merged_at)
                self._stand_in_wakes.wait(0.002 + 0.05 * min(asked_for_s, 1.0))  # asks less often as time goes by
                return
            if self._sleep_until(self._waited_since + self._policy.grace_s):
                return
            if self._entered_at is not None:
                self._stop_step = max(self._stop_step, step)
            if self._sleep_until(hand_in_at):
                return
            if self._last_put is not None:  # the gradients that go into the merge are copied in by another stream
                self._last_put.wait()
            current = self._open_round()
            self._close_abstaining(current)
        self._complete(current)

    def _post_at(self) -> float:
        """When the peers want to know that this rank has finished: shortly before one of them could be late.

        A step in which nobody is late is over by then, and costs no message. After one in which somebody was, at once:
        a rank that is stuck is stood in for as soon as its peers have finished.
        """
        if self._any_late:
            return -math.inf
        return self._merged_at + self._deadline_s - max(0.002, 0.02 * self._deadline_s)

    def _to_post(self) -> int | None:
        """The step of which the peers are to learn now that this rank has finished it."""
        if not self._post_due():
            return None
        step, self._unposted = self._unposted, None
        return step if step == self._merging else None

    def _post_due(self) -> bool:
        return self._unposted is not None and (self._unposted != self._merging or self._clock() >= self._post_at())

    def _sleep_until(self, moment: float) -> bool:
        """Sleep, without the lock, until ``moment`` or until woken; false where it is already over."""
        remaining = moment - self._clock()
        if remaining <= 0:
            return False
        self._stand_in_wakes.wait(min(remaining, LONG_S))
        return True

    def _stuck_in(self) -> str:
        """What the training thread has been doing for long, in words; empty where it is not."""
        mine = self._merging == self._training and self._round is not None and self._round.closed
        since = self._took_at if self._entered_at is None else self._entered_at
        seconds = self._clock() - since
        if mine or not LONG_S < seconds < math.inf:
            return ""
        behind = f" ({lag} merged steps behind)" if (lag := self._merging - self._training) else ""
        where = f"{self.stopwatch.phase} of step {self._training}{behind}"
        return f"rank {self._channel.rank} has been in {where} for {seconds:.0f} s"

    def _limits(self) -> tuple[float, float]:
        """When the training thread is to stop and when it is stood in for, by the clock, if a quorum waits."""
        lag = self._merging - self._training
        if self._round is not None and self._round.closed:  # nothing can be late before the next deadline is over
            next_stop_at = self._clock() + self._deadline_s
            return next_stop_at, next_stop_at
        if lag > 0:  # still stuck in an earlier step
            waited_for = lag >= self._patience.max_lag or self._deadline_s == math.inf
            return (math.inf, math.inf) if waited_for else (-math.inf, -math.inf)
        stop_at = self._deadline_s + (self._merged_at if self._entered_at is None else self._clock_from)
        if self._patience.max_lag == 0:
            return stop_at, math.inf
        late_at = stop_at if self._waited_since == math.inf else max(stop_at, self._waited_since + self._policy.grace_s)
        return stop_at, late_at + self._patience.grace_s
