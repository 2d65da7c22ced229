"""What comes of a merged round: the rows of all ranks, the next deadline, and the record of the step."""

from __future__ import annotations

import math

from straggle.merge.round.completion import OtherState
from straggle.merge.round.rank_parts import RankParts
from straggle.merge.round.round import Round
from straggle.merge.rows.step_record import StepRecord
from straggle.merge.rows.telemetry import ScalarNames, absent_row
from straggle.merge.wing import Wings


class StepResult:
    """The first phases of `when_merged`; called with the coordinator's lock held."""

    def __init__(self, rank: RankParts, names: ScalarNames, wings: Wings, others: OtherState) -> None:
        self._rank, self._names, self._wings, self._others = rank, names, wings, others
        self._ended_s = math.inf, math.nan  # the deadline that the step had, and one that is not enforced
        self._error: Exception | None = None  # the policy's

    def read(self, current: Round) -> None:
        """Read the rows of all ranks."""
        # before they are read: a rank that was not among the groups has a row of zeros, which would count
        for phase in self._wings.rows_merged:
            phase(current)
        if not current.is_read:
            current.read_rows()
        # before `decide`: weights that they change are part of what the deadline goes by
        for phase in () if current.table.is_usual else self._wings.rows_read:
            phase(current)

    def decide(self, current: Round) -> None:
        """Decide the deadline of the next step. An error of the policy's is reported to the peers, and kept."""
        deadline, table = self._rank.deadline, current.table
        # noted before the next one is decided: the record is of the step that ends
        self._ended_s = deadline.seconds, deadline.shadow_s
        try:
            if table.is_usual or not table.replanning():  # which is no step of the training
                deadline.decide(table)
        except Exception as error:  # a policy may be the user's
            self._rank.channel.post_failure(f"{self._rank.where(current.step)}: {error!r}")
            # not raised here: the phases after this one begin the next step, for which peers wait
            self._error = error

    def take_error(self) -> Exception | None:
        """The policy's, to be raised after all phases."""
        error, self._error = self._error, None
        return error

    def record(self, current: Round) -> None:
        """Note what happened in the step, whose time ends now."""
        now = self._rank.stopwatch.now()
        sent = {} if current.table.is_usual else self._others.sent_in(current, current.table)
        current.recorded(self._recorded(current, now - self._rank.merging.merged_at, now), sent)

    def keep(self, current: Round) -> None:
        """Put the round into the ring, for the training thread to take."""
        # before the next step begins: whoever is notified then looks here
        self._rank.ring[current.step] = current
        # the last word of a rank that ends now says that it had this step
        self._rank.channel.merged(current.step)

    def of_absent(self, step: int) -> Round:
        """What a step comes to for a rank that takes no part in it."""
        rank, now = self._rank, self._rank.stopwatch.now()
        current = rank.rounds.empty(step)
        current.merged_without(absent_row(len(current.layout.plan.stages)), probed=rank.training.probes)
        self._ended_s = rank.deadline.seconds, rank.deadline.shadow_s
        since_s = now - rank.training.applied_at
        current.recorded(self._recorded(current, since_s if math.isfinite(since_s) else 0.0, now), {})
        return current

    def _recorded(self, current: Round, seconds: float, now: float) -> StepRecord:
        deadline, (deadline_s, shadow_s) = self._rank.deadline, self._ended_s
        return StepRecord(
            current.step,
            seconds,
            deadline_s,
            current.layout.plan,
            current.table,
            self._names,
            shadow_s=shadow_s,
            rules=deadline.rules,
            usual_cost=deadline.usual_cost,
            merged_weights=() if current.terms.rows_tell_all else current.merged_weights(),
            differing=current.differing,
            dealt=deadline.dealt,
            merged_at=now,
        )
