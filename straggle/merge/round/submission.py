"""What this rank submits for a step: its own work with estimates beside it, or what was finished and nothing else.

Its row goes with that, and says how the step went.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from straggle.backward.clocks import HostTimes
from straggle.merge.round.rank_parts import RankParts
from straggle.merge.round.round import Contribution, Round, Submitted
from straggle.merge.rows.device_numbers import NOTHING_ARRIVED
from straggle.merge.rows.telemetry import MAX_SCALARS, NO_FINGERPRINT, Row
from straggle.merge.state.exchange import NOTHING_GIVEN, Given
from straggle.merge.wing import Wings
from straggle.policies.estimators import FillIn
from straggle.report import CAUSES, PHASES, RankNumbers
from straggle.source.kept import UNDECIDED
from straggle.source.source import Slot

if TYPE_CHECKING:
    from straggle.backward.device_clock import DeviceClock


class Submission:
    """Called by the training thread, and by the stand-in in its place, with the coordinator's lock held.

    ``error``: the estimator's, while a step was submitted.
    """

    def __init__(self, rank: RankParts, wings: Wings, slots: Sequence[Slot], fill_in: FillIn) -> None:
        self._rank, self._wings = rank, wings
        self._slots, self._fill_in = slots, fill_in
        self.error: Exception | None = None

    def own(
        self,
        current: Round,
        *,
        truncated: bool,
        failed: bool = False,
        scalars: Mapping[str, float],
        later: Iterable[str] = (),
        given: Given,
    ) -> float:
        """Submit the training thread's own step; when that was. ``later``: scalars that its device has yet to tell."""
        training = self._rank.training
        # first: what is complete by the passes that there were is launched as complete, not with a share
        if current.passes.may_end_early:
            self._complete(current, current.end_early())
        own = current.own_part(self._rank.stopwatch.phase, truncated=truncated, failed=failed)
        if current.beside:
            self._complete(current, current.add_beside(own))
        # the last micro-batch ends here: no forward pass comes after it to say so
        if not truncated:
            training.microbatch_finished()
        had_work = None
        if min(own.computed) < 1 and (had_work := self._had_work(current)):
            own = self._estimate(current, own)
        return self._submit(current, own, scalars, given, had_work, later=later)

    def _estimate(self, current: Round, own: Contribution) -> Contribution:
        """Let the estimator fill in."""
        try:
            return current.estimate(own, self._fill_in, self._slots)
        except Exception as error:
            self._estimator_failed(current, error)
            return own

    def _estimator_failed(self, current: Round, error: Exception) -> None:
        """Report the estimator's error to all ranks; this rank raises it when the step ends."""
        self.error = error
        if not self._wings.go_on:
            # the row of this step says so too: peers learn of it by the merge, even without the store
            self._rank.training.fail()
            self._rank.channel.post_failure(f"{self._rank.where(current.step)}: {error!r}")

    def forget_error(self) -> None:
        """It was raised, and the rank may take part again."""
        self.error = None

    def finished(self, current: Round) -> float:
        """Submit what the training thread finished, and nothing for the rest; when that was."""
        current.stand_in()
        if current.passes.may_end_early:
            self._complete(current, current.end_early())
        own = current.finished_part(self._rank.stopwatch.phase)
        if current.beside:
            self._complete(current, current.add_beside(own))
        now = self._submit(current, own, {}, NOTHING_GIVEN)
        # after the submission: a training thread that leaves before that would submit its own part
        self._rank.training.stops.up_to(current.step)
        return now

    def _complete(self, current: Round, indices: Sequence[int]) -> None:
        """Only now it is known that no more comes to these: what is complete counts like any other that is."""
        after_s = self._rank.stopwatch.now() - (self._rank.training.entered_at or 0.0)
        for index in indices:
            if self._fill_in.reads_own:
                try:
                    self._fill_in.computed(self._slots[index].parameter, current.read(index))
                except Exception as error:
                    self._estimator_failed(current, error)
            current.parameter_complete(index, after_s)

    def _had_work(self, current: Round) -> bool:
        """Whether what is not computed is missing: who has no data, or no passes, has dropped nothing."""
        entry = self._rank.training.entry
        if (had_work := entry.had_work) is None:
            had_work = current.passes.number > 0 and not entry.idle
        return had_work

    def _submit(
        self,
        current: Round,
        own: Contribution,
        scalars: Mapping[str, float],
        given: Given,
        had_work: bool | None = None,
        *,
        later: Iterable[str] = (),
    ) -> float:
        """Launch all collectives that are left, the last with the telemetry; when that was."""
        training = self._rank.training
        weights, in_step = current.weights(own), training.is_in(current.step)
        # as late as possible: its seconds are those until the last bucket goes
        row = self._row(current, own, weights, scalars, later, in_step=in_step, state=given.mark)
        if (clock := self._rank.device_clock) is not None:
            row = by_device(row, clock, in_step=in_step)
        # the last who write to the row; after them it is in the buffers
        for phase in self._wings.submit:
            row = phase(current, row)
        # state and rows before `close`: they travel with the last bucket, which that launches
        current.buffers.write_state(given.message)
        current.buffers.write_telemetry(self._rank.replica.place, row.numbers(current.layout.columns))
        joins_over = row.joins_over if current.stood_in else None
        current.close(own, weights, Submitted(row, given, training.entry.idle, in_step, had_work, joins_over))
        now = self._rank.stopwatch.now()
        # after all is launched: until then nobody may take this rank for one whose part is on its way
        self._rank.merging.submit(now)
        return now

    def _row(
        self,
        current: Round,
        own: Contribution,
        weights: Sequence[float],
        scalars: Mapping[str, float],
        later: Iterable[str],
        *,
        in_step: bool,
        state: int,
    ) -> Row:
        """This rank's row for the round, from its two sides, as of now. ``in_step``: it has entered the step."""
        rank, training, merging = self._rank, self._rank.training, self._rank.merging
        arrived = NOTHING_ARRIVED  # what its device has told of earlier steps
        if current.buffers.is_queued:
            arrived = rank.device_numbers.take(current.step, MAX_SCALARS - len(scalars))
        if arrived.scalars:
            scalars = {**arrived.scalars, **scalars}
        now, times, layout = training.stopwatch.now(), training.stopwatch.read(), current.layout
        entry, before = training.entry, merging.times_at_merge
        passes = current.passes
        # a rank for which no passes were left had no data for this step
        idle = in_step and (entry.idle or (not passes.number and not own.late))
        computed = layout.by_stage(own.computed)
        reported = RankNumbers(
            compute_s=now - (training.entered_at or now) if in_step and not idle else math.nan,
            overrun_s=training.take_overrun_s(),
            inside_wait_s=rank.replica.waited_s(),  # also in an earlier step, if it was stood in for there
            late=own.late and not idle,
            stood_in=current.stood_in,
            idle=idle,
            weight=passes.own_weight if in_step else passes.weight,
            nonfinite=arrived.nonfinite,
        )
        row = Row(
            times={phase: times[phase] - before[phase] for phase in PHASES},
            reported=reported,
            busy_s=now - merging.merged_at,
            cause=CAUSES.index(own.cause) if own.cause is not None and not idle else -1,
            failed=training.failed,
            # a rank that has not entered may have an older state, which is no different one
            fingerprint=entry.fingerprint if in_step else NO_FINGERPRINT,
            stepped=entry.stepped if in_step else math.nan,
            kept=entry.kept if in_step else UNDECIDED,
            frozen=entry.frozen if in_step else UNDECIDED,
            replans=entry.replans and in_step,
            computed=computed,
            estimated=layout.by_stage([own.estimated.get(index, 0.0) for index in range(len(own.computed))])
            if own.estimated
            else (0.0,) * len(computed),
            stage_s=tuple(current.gradients.stage_s),
            weights=computed if weights is own.computed else layout.by_stage(weights),
            merge_s=merging.merge_s,
            num_microbatches=max(1, passes.number),
            microbatch_s=tuple(training.microbatch_s) if in_step else (),
            gathers=training.collectives.gathers,
            joins_over=training.no_more_after(merging.step, stood_in=current.stood_in),
            without_store=not rank.channel.store.reachable,
            state=state,
            cost=training.cost if in_step and not idle else math.nan,
            scalars=scalars,
            awaited=tuple([name for name in later if name not in scalars]),
            counts_behind=arrived.behind,
            skipped_before=arrived.skipped,
        )
        return row if passes.parts is None or not in_step else passes.tell(row, current.gradients.num_over)


def by_device(row: Row, clock: DeviceClock, *, in_step: bool) -> Row:
    """The row with seconds of the rank's device; as it is, if the rank computes nothing in this step.

    Phases stay the host's.
    """
    reported = row.reported
    if not in_step or reported.idle or row.replans:
        return row
    host = HostTimes(row.stage_s, row.microbatch_s, row.num_microbatches, row.cost)
    complete = row.cause < 0 and not (reported.late or reported.stood_in)
    if (times := clock.submitted(host, complete=complete)) is None:
        return row
    return row._replace(
        reported=replace(reported, compute_s=times.compute_s),
        busy_s=row.busy_s if math.isnan(times.busy_s) else times.busy_s,
        merge_s=row.merge_s if math.isnan(times.merge_s) else times.merge_s,
        stage_s=times.stage_s,
        microbatch_s=times.microbatch_s,
    )
