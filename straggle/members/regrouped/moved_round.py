"""A round whose members change before it is over: what each has of it, and how the remaining members go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from weakref import WeakKeyDictionary

import torch.distributed as dist

from straggle.members.views.view import MergeProgress, Repair
from straggle.merge.round.buffers import StageBuffers
from straggle.merge.round.round import Round
from straggle.merge.rows.telemetry import Row
from straggle.merge.wire.groups import ProcessGroups, kept_by, succeeded
from straggle.report import CAUSES


@dataclass
class Notes:
    """What is known of a round in a job whose members change; made by `RoundNotes.of`.

    ``row_ranks``: the ranks whose rows are merged. ``merged``: buckets known to be merged. ``lost``: buckets that were
    lost by a change of members. ``last_message``: ends when all members have all of the step. ``complete``: some member
    had the step complete, and gave this rank all rows.
    """

    row_ranks: tuple[int, ...]
    merged: set[int] = field(default_factory=set)
    lost: frozenset[int] = frozenset()
    last_message: dist.Work | None = None
    complete: bool = False

    def end_with(self, message: dist.Work, row_ranks: tuple[int, ...] | None = None) -> None:
        """``message`` ends when all members have all; ``row_ranks``: it merges the rows of these."""
        self.last_message = message
        if row_ranks is not None:
            self.row_ranks = row_ranks

    def found_merged(self, buckets: Iterable[int]) -> None:
        """These are merged, as far as this rank can see."""
        self.merged.update(buckets)

    def forget_message(self) -> None:
        """Of groups that are not used any more: it has their connections."""
        self.last_message = None

    def found_complete(self) -> None:
        """Note that some member had the step complete: all rows are here."""
        self.complete = True

    def lose(self, buckets: frozenset[int]) -> None:
        """These are lost, and what was launched is of no more use."""
        self.lost |= buckets
        self.last_message = None


class RoundNotes:
    """The notes of one member's rounds, each as long as there is that round; with the lock of the merge."""

    def __init__(self) -> None:
        self._notes = WeakKeyDictionary[Round, Notes]()

    def of(self, current: Round, ranks: tuple[int, ...]) -> Notes:
        """Those of a round; made with the members ``ranks`` if it has none yet."""
        if (notes := self._notes.get(current)) is None:
            self._notes[current] = notes = Notes(ranks)
        return notes

    def found(self, current: Round) -> Notes | None:
        """Those of a round, if it has any."""
        return self._notes.get(current)


def freeze(current: Round, notes: Notes) -> MergeProgress:
    """Launch nothing from here on: the members change. Returns how far this rank has come."""
    current.hold_back()
    notes.found_merged(b for b, works in enumerate(current.launched) if works and all(map(succeeded, works)))
    complete = notes.complete or (notes.last_message is not None and succeeded(notes.last_message))
    return MergeProgress(current.step, len(current.launched), frozenset(notes.merged), complete)


def go_on(
    current: Round,
    notes: Notes,
    groups: ProcessGroups,
    repair: Repair,
    place_of: Mapping[int, int],
    renew: Callable[[], StageBuffers],
    *,
    new: bool,
    generation: int,
) -> None:
    """Go on among the members of ``groups``. ``place_of``: each rank's place. ``new``: this rank has just joined.

    A bucket that was in flight and that no member has is lost: its gradients do not count, unless this rank has kept
    what it gave. The old merges may still write into the buffers that they were launched with, even if only what is
    there already, so ``renew()`` gives other buffers.
    """
    num_launched = repair.num_launched if new else len(current.launched)
    in_flight = [b for b in range(num_launched) if b not in notes.merged]
    kept = {b: own for b in in_flight if b < len(current.launched) and (own := kept_by(current.launched[b]))}
    lost = frozenset(in_flight) - kept.keys()
    if in_flight or not all(work.is_completed() for work in chain.from_iterable(current.launched)):
        current.move(renew(), lost, kept)
    notes.lose(lost - repair.given.keys())
    launched: list[list[dist.Work]] = [[] for _ in range(num_launched)]
    for bucket in range(num_launched):
        if (giver := repair.given.get(bucket)) is not None:
            launched[bucket] = current.buffers.broadcast(bucket, groups, place_of[giver])
        elif bucket not in repair.kept:
            launched[bucket] = current.buffers.resend(bucket, groups)
    current.go_on_in(groups, launched, generation, rows_tell_all=not (repair.given or repair.kept))


def without_lost(row: Row, current: Round, notes: Notes) -> Row:
    """The row without the stages whose buckets were lost by a change of members."""
    if not notes.lost:
        return row
    names = {stage.name for bucket in notes.lost for stage in current.layout.buckets[bucket]}
    kept = [stage.name not in names for stage in current.layout.plan.stages]
    cause = row.cause if row.cause >= 0 else CAUSES.index("members")
    computed, estimated, weights = (
        tuple(share * own for share, own in zip(shares, kept, strict=True))
        for shares in (row.computed, row.estimated, row.weights or row.computed)
    )
    return row._replace(computed=computed, estimated=estimated, weights=weights, cause=cause)


def travels(current: Round, notes: Notes | None) -> bool:
    """Whether anything that was launched is still in flight."""
    last = None if notes is None else notes.last_message
    works = chain(chain.from_iterable(current.launched), [] if last is None else [last])
    return not all(work.is_completed() for work in works)
