"""Where a rank's training thread is, and where its merge: the state that the training thread and the stand-in share.

The training thread is in one step, or before it; the merge is in the same step or, where the rank was stood in for, in
a later one. From the times of both comes the rank's telemetry.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Mapping

from straggle.backward.clocks import Stopwatch
from straggle.backward.kept import UNDECIDED
from straggle.merge.round import Contribution, Layout, MergedStep, Round
from straggle.merge.telemetry import NO_FINGERPRINT, Row
from straggle.report import CAUSES, PHASES


class Whereabouts:
    """Counts and times of both. ``lock`` guards what they share, the coordinator's rounds and ring included.

    ``step_merged`` is told when the merge goes on to the next step.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.lock = threading.Lock()
        self.step_merged = threading.Condition(self.lock)
        self.stopwatch = stopwatch
        # the merge, whichever thread is at it
        self.merging = 0  # its step
        self.round: Round | None = None
        self.merged_at = self.now()  # the step before
        self.any_late = False  # in the step before
        self._times_at_merge = stopwatch.read()
        self._closed_at = self.merged_at
        self._merge_s = 0.0
        # the training thread
        self.training = 0  # its step: the one that it is in, or will enter next
        self.entered_at: float | None = None
        self.clock_from = -math.inf  # what its deadline counts from
        self.took_at = -math.inf
        self.taking = False  # it has merged its step itself, and is about to take it
        self.overran = False  # it was still in the backward pass of the step before when that was merged
        self.failed = False
        self.num_microbatches = 1
        self.max_over = sys.maxsize
        self.weight = 1.0
        self.idle = False
        self._stop_step = -1  # it is to leave every step up to this one
        self._made_at = self.now()
        self._fingerprint = NO_FINGERPRINT
        self._stepped = math.nan
        self.kept = UNDECIDED
        self._microbatch_s: list[float] = []  # when each was finished
        self._overrun_s = 0.0

    def now(self) -> float:
        """Seconds, by the rank's clock."""
        return self.stopwatch.now()

    @property
    def lag(self) -> int:
        """Merged steps that the training thread has not yet taken."""
        return max(0, self.merging - self.training)

    @property
    def entered(self) -> bool:
        """Whether the training thread has entered its step, and is not yet done with it."""
        return self.entered_at is not None and not self.taking

    @property
    def in_step(self) -> bool:
        """Whether the training thread is in the step that is being merged."""
        return self.training == self.merging and self.entered_at is not None

    @property
    def all_issued(self) -> bool:
        """Whether this rank has handed in all of the step that is being merged."""
        return self.round is not None and self.round.closed

    @property
    def since_entered_s(self) -> float:
        """Seconds since the training thread entered its step."""
        return self.now() - (self.entered_at or 0.0)

    @property
    def since_step_s(self) -> float:
        """Seconds since the training thread last took a merged step, or since it could have."""
        return self.now() - max(self.took_at, self._made_at)

    @property
    def stop_requested(self) -> bool:
        """Whether the training thread is to leave its step: it is late, or it was stood in for."""
        return self._stop_step >= self.training or self.merging > self.training

    def stop(self, step: int) -> None:
        """Ask the training thread to leave every step up to this one."""
        self._stop_step = max(self._stop_step, step)

    # -- what the training thread does

    def enter(
        self, num_microbatches: int, *, idle: bool, fingerprint: int, stepped: float, kept: int, max_over: int | None
    ) -> None:
        """The training thread enters its step."""
        self.max_over = sys.maxsize if max_over is None else max_over
        self._fingerprint, self._stepped, self.kept = fingerprint, stepped, kept
        self.entered_at = self.clock_from = self.now()
        if self.overran and self.merging == self.training:  # its peers began when the last merge ended
            self.clock_from = self.merged_at
        self.num_microbatches = num_microbatches
        self.weight, self.idle, self._microbatch_s = 1.0, idle, []

    def microbatch_finished(self) -> None:
        """The training thread has finished a micro-batch of its step."""
        if len(self._microbatch_s) < self.num_microbatches:  # a loop may call the model more often
            self._microbatch_s.append(self.since_entered_s)

    def take(self, merged: MergedStep) -> None:
        """The training thread takes its step's merge and goes on to the next step."""
        now = self.now()
        if merged.stood_in:
            self._overrun_s += now - max(merged.merged_at, self.took_at)
        self.took_at = now
        self.training += 1
        self.entered_at = None
        self.taking = False

    # -- what happens to the merge

    def issued(self) -> None:
        """All of this rank's part of the merge is on its way."""
        self._closed_at = self.now()

    def merged(self, now: float, *, any_late: bool) -> None:
        """A step is merged: on to the next one."""
        self._merge_s = now - self._closed_at
        self.any_late = any_late
        self.merging += 1
        self.round = None
        self.merged_at, self._times_at_merge = now, self.stopwatch.read()
        self.step_merged.notify_all()

    def begin_now(self) -> None:
        """The time of the next step begins now."""
        self.took_at = self.merged_at = self.now()
        self._times_at_merge = self.stopwatch.read()

    # -- what is told of both

    def row(
        self,
        current: Round,
        own: Contribution,
        layout: Layout,
        scalars: Mapping[str, float],
        *,
        without_store: bool = False,
    ) -> Row:
        """This rank's telemetry for the round."""
        now, times = self.now(), self.stopwatch.read()
        entered_at = self.entered_at if self.in_step else None
        idle = entered_at is not None and self.idle
        overrun_s, self._overrun_s = self._overrun_s, 0.0
        estimated = [own.estimated.get(index, 0.0) for index in range(len(own.computed))]
        computed, weights = layout.by_stage(own.computed), current.weights(own)
        return Row(
            times={phase: times[phase] - self._times_at_merge[phase] for phase in PHASES},
            compute_s=math.nan if entered_at is None or idle else now - self.clock_from,
            busy_s=now - self.merged_at,
            overrun_s=overrun_s,
            late=own.late and not idle,
            stood_in=current.stood_in,
            cause=CAUSES.index(own.cause) if own.cause is not None and not idle else -1,
            failed=self.failed,
            idle=idle,
            weight=current.weight,
            # a rank that has not entered may have an older state, which is no different one
            fingerprint=NO_FINGERPRINT if entered_at is None else self._fingerprint,
            stepped=math.nan if entered_at is None else self._stepped,
            kept=UNDECIDED if entered_at is None else self.kept,
            computed=computed,
            estimated=layout.by_stage(estimated),
            stage_s=tuple(current.stage_s),
            weights=computed if weights is own.computed else layout.by_stage(weights),
            merge_s=self._merge_s,
            num_microbatches=current.num_microbatches,
            microbatch_s=tuple(self._microbatch_s) if self.in_step else (),
            without_store=without_store,
            scalars=scalars,
        )
