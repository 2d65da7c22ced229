"""Whose gradients a merged bucket holds where members came and went: what a recording needs to be replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from straggle.merge.members.view import MergeProgress, Repair


@dataclass(frozen=True)
class MergedAmong:
    """Among whom one step was merged.

    ``generations``: of each bucket, and of the telemetry at the end, the generation whose members summed it. A bucket
    that a member gave to the others has that in which the giver got it. ``lost``: by rank, the buckets whose gradients
    a change of members took, so that the rank gave zeros.
    """

    generations: tuple[int, ...]
    lost: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Provenance:
    """What a change of members says about the buckets that were launched before it.

    ``generations``: in which one each given bucket was summed. ``lost``: by rank, the buckets that it has lost.
    """

    generations: Mapping[int, int] = field(default_factory=dict)
    lost: Mapping[int, frozenset[int]] = field(default_factory=dict)


NO_CHANGE = Provenance()


def provenance(progress: Mapping[int, MergeProgress], way: Repair) -> Provenance:
    """From how far each member had come, by rank, and what follows from that; the same on all of them."""
    generations = {bucket: progress[giver].generations.get(bucket, 0) for bucket, giver in way.given.items()}
    lost = {
        rank: frozenset(b for b in range(own.launched) if b not in own.merged and b not in way.given)
        for rank, own in progress.items()
        if own.step == way.step
    }
    return Provenance(generations, {rank: own for rank, own in lost.items() if own})
