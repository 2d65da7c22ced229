"""The wing that repeats a recorded run: in each step this rank decides as it did then."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from straggle.loop.open_step import OpenStep
from straggle.merge.late.sides import Entry
from straggle.merge.round.rank_parts import RankParts
from straggle.merge.round.round import Round
from straggle.merge.round.step_passes import StopRule
from straggle.merge.wing import Wing
from straggle.merge.wire.channel import Channel


@dataclass(frozen=True)
class Decision:
    """One rank's part in one step: how much of it went into the merge, and where its pass ended.

    ``num_gradients``: how many finished gradients (of parameters, over all micro-batches) were merged; autograd
    finishes them in the same order again. ``left_at``: how often the pass had checked whether to go on before it was
    stopped; ``None`` if it was not. ``stood_in``: the stand-in submitted the rest, without estimates. ``num_over``: how
    many of its backward passes were over then; ``None`` if not recorded. ``idle``: it had no data for the last step
    that it had entered; ``None``: the loop decides. ``entered``: false if it was stood in for before it entered this
    step. ``members_changed``: the job's members had changed by the end of the step, which cannot be repeated.
    ``parts``: the numbers of its micro-batches, in order, if it drew them from a shared pool; ``None`` if they were the
    loop's own. ``had_work``: whether gradients that were not computed are missing; ``None`` if none were, or not
    recorded. ``num_parts``: how many of ``parts`` it had when its part was submitted; ``None``: all, or not recorded.
    ``joins_over``: if it was stood in for, the loops over `join` for which it was known to have no more data.
    """

    step: int
    num_gradients: int
    left_at: int | None
    stood_in: bool
    num_over: int | None = None
    idle: bool | None = None
    entered: bool = True
    members_changed: bool = False
    parts: tuple[int, ...] | None = None
    had_work: bool | None = None
    num_parts: int | None = None
    joins_over: int | None = None


def check_members(decisions: Iterable[Decision]) -> None:
    """Raise ``ValueError`` if the decisions include a step in which the members changed, or a later one."""
    if (changed := next((own for own in decisions if own.members_changed), None)) is not None:
        raise ValueError(
            f"the members of the recorded run changed in step {changed.step} (a rank left, came back or was not heard "
            f"of): only the steps before that can be replayed; repeat them with steps={changed.step}, or give the "
            f"first {changed.step} decisions alone"
        )


@dataclass(frozen=True)
class Recording:
    """A rank's decisions from step 0 on, and the order and seconds from which its stages were planned."""

    order: tuple[int, ...]
    seconds: tuple[float, ...]
    decisions: tuple[Decision, ...]


class AsRecorded(StopRule):
    """Stops a replayed pass at the point at which the recorded run was stopped."""

    by_clock = False

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.abstains = decision.stood_in
        self.stops_idle = decision.idle is not None

    def accepts(self, num_gradients: int) -> bool:
        """Whether gradient number ``num_gradients`` was in time in the recorded run."""
        return num_gradients < self.decision.num_gradients

    def stops(self, num_checks: int) -> bool:
        """Whether the recorded run was stopped at this check."""
        return num_checks == self.decision.left_at


class Replay(Wing):
    """The recording that a model repeats, if any; used on the training thread."""

    def __init__(self, rank: RankParts, channel: Channel) -> None:
        self._rank, self._channel = rank, channel
        self._decisions: Iterator[Decision] | None = None
        self._planned_from: tuple[list[int], list[float]] | None = None

    @property
    def is_on(self) -> bool:
        """Whether this run repeats another."""
        return self._decisions is not None

    def follow(self, recording: Recording) -> None:
        """Decide as recorded, on all ranks alike. Raises ``ValueError`` for a recording that cannot be replayed."""
        check_members(recording.decisions)
        self._decisions = iter(recording.decisions)
        self._planned_from = (list(recording.order), list(recording.seconds)) if recording.order else None
        self._rank.deadline.wait_for_all()

    # -- phases

    def entry(self, entry: Entry) -> Entry:
        """The entry of this step as recorded, with the rule that stops it as recorded."""
        if self._decisions is None:
            return entry
        own = next(self._decisions, Decision(self._rank.training.step, sys.maxsize, None, False))
        if own.idle is not None:
            entry = entry._replace(idle=own.idle, entered=own.entered)
        if own.joins_over is not None:
            entry = entry._replace(joins_over=own.joins_over)
        return entry._replace(rule=AsRecorded(own), max_over=own.num_over, had_work=own.had_work)

    def plan(self) -> tuple[list[int], list[float]] | None:
        """The recorded order and seconds to plan stages from. Raises ``ValueError`` if only some ranks repeat a run."""
        for rank, is_on in enumerate(on := self._channel.gather(self.is_on, "replays")):
            if is_on != on[0]:
                which = "replays" if is_on else "does not replay"
                raise ValueError(
                    f"rank {rank} {which} a recorded run, unlike rank 0: call replay() on all ranks or on none"
                )
        return self._planned_from


def decision_of(opened: OpenStep, current: Round) -> Decision:
    """What this rank decided in the step that it has left, for a recording."""
    # including micro-batches that came after its part was submitted: they have run
    parts, merged, own = opened.last.passes.parts, current.passes.parts, current.submitted
    decision = Decision(
        current.step,
        current.gradients.number,
        opened.last.left_at,
        current.stood_in,
        current.gradients.num_over,
        parts=parts,
        had_work=None if own is None else own.had_work,
        joins_over=None if own is None else own.joins_over,
        num_parts=None if merged is None or merged == parts else len(merged),
        members_changed=current.generation > 0,
    )
    if own is None or own.entered:
        return decision  # the loop decides whether there are data for the step
    return replace(decision, idle=own.idle, entered=False)
