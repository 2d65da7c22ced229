"""What a rank's row of telemetry says: from its two sides, and from what it submits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from straggle.backward.device_clock import DeviceClock, HostTimes
from straggle.merge.late.sides import MergeSide, TrainingSide
from straggle.merge.round.round import Contribution, Round
from straggle.merge.rows.device_numbers import NOTHING_ARRIVED, Arrived
from straggle.merge.rows.telemetry import NO_FINGERPRINT, Row
from straggle.report import CAUSES, PHASES, RankNumbers
from straggle.source.kept import UNDECIDED


def row_of(
    training: TrainingSide,
    merging: MergeSide,
    current: Round,
    own: Contribution,
    weights: Sequence[float],
    scalars: Mapping[str, float],
    *,
    in_step: bool,
    state: int,
    without_store: bool,
    arrived: Arrived = NOTHING_ARRIVED,
    inside_wait_s: float = 0.0,
) -> Row:
    """This rank's row for the round, as of now; with the lock held. ``in_step``: it has entered the step.

    ``arrived``: what its device has told of earlier steps.
    """
    now, times, layout = training.stopwatch.now(), training.stopwatch.read(), current.layout
    entry, before = training.entry, merging.times_at_merge
    passes = current.passes
    # a rank for which no passes were left had no data for this step
    idle = in_step and (entry.idle or (not passes.number and not own.late))
    computed = layout.by_stage(own.computed)
    reported = RankNumbers(
        compute_s=now - (training.entered_at or now) if in_step and not idle else math.nan,
        overrun_s=training.take_overrun_s(),
        inside_wait_s=inside_wait_s,  # also in an earlier step, if it was stood in for there
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
        gathers=training.gathers,
        joins_over=training.no_more_after(merging.step, stood_in=current.stood_in),
        without_store=without_store,
        state=state,
        ways=training.ways(now) if training.measured else (),
        cost=training.cost if in_step and not idle else math.nan,
        scalars={**arrived.scalars, **scalars} if arrived.scalars else scalars,
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
