"""The members of a job: the chain of views, and when a silent member is put out; all pure.

A *view* is one value in the job's store. A rank that wants another view replaces it by compare-and-set, so there is one
chain of views and no split brain: a rank that cannot reach the store is not in the job.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from straggle.policies.deadline import is_number
from straggle.report import LEAVING_KINDS, LeavingKind

WATCHED = 3  # members that each member watches: those that follow it in the ring


@dataclass(frozen=True)
class Elastic:
    """Ranks may die, freeze, be cut off and come back while the others go on.

    ``min_ranks``: with fewer members the job ends (default: more than half of those that it was started with).
    ``suspect_s``: a member that has sent no sign of life for so many seconds is put out; one that a signal has stopped,
    as its launcher says, after half a second.
    ``absence_gain``: a member that is slow for good, in its data, its layers or its link, is put out while the others
    merge at least so many times the gradients a second without it; it comes back when it would bring more. Infinite: no
    member is put out.
    """

    min_ranks: int | None = None
    suspect_s: float = 2.0
    absence_gain: float = 1.1

    def __post_init__(self) -> None:
        if self.min_ranks is not None and (
            isinstance(self.min_ranks, bool) or not isinstance(self.min_ranks, int) or self.min_ranks < 1
        ):
            raise ValueError(f"min_ranks={self.min_ranks!r}: must be an integer, at least 1")
        if isinstance(self.suspect_s, bool) or not 0.5 <= self.suspect_s < math.inf:
            raise ValueError(f"suspect_s={self.suspect_s!r}: must be a finite number of seconds, at least 0.5")
        if not is_number(self.absence_gain) or not self.absence_gain >= 1:
            raise ValueError(
                f"absence_gain={self.absence_gain!r}: must be a number, at least 1 (inf: no member is put out)"
            )

    def least(self, world_size: int) -> int:
        """The smallest number of members that go on. Raises ``ValueError`` if the job has fewer ranks."""
        if (self.min_ranks or 0) > world_size:
            raise ValueError(f"min_ranks={self.min_ranks}: there are only {world_size} ranks")
        return self.min_ranks or world_size // 2 + 1


@dataclass(frozen=True)
class Leaving:
    """Why a member leaves: a kind, in one word, and a reason, in a sentence."""

    kind: LeavingKind
    reason: str


DONE = Leaving("done", "ended")  # its loop is over
# its loop is over, and may have more to do
ENDED_EARLY = Leaving("done", "ended early: without the ranks that were told to end, too few would be left")
SLOW = ("slow", "link")  # kinds of leaving of a member that is put out, for its work or its link
NOTICE = Leaving("notice", "was told to end, and handed its place over")
OF_A_SPARE = "-spare-"  # in the name of a process that has waited to take a place (`straggle launch --spares`)
NOT_KNOWN = "not known"  # the reason of a change in a view that a rank has not seen
STARTED_AGAIN = Leaving("restarted", "was started again")
TOO_FAR_BEHIND = "it fell behind by more merged steps than may wait for it (max_lag)"


@dataclass(frozen=True)
class Change:
    """A rank that ``joined`` or left from one view to the next, and why; ``kind``: that of its leaving."""

    rank: int
    joined: bool
    reason: str
    kind: LeavingKind = "silent"

    @staticmethod
    def left(rank: int, why: Leaving) -> Change:
        """The change of a rank that left."""
        return Change(rank, False, why.reason, why.kind)


@dataclass(frozen=True)
class View:
    """The members of one generation, each with its incarnation; a restarted process is another incarnation.

    ``changes`` since the view before. Ranks that joined take part from ``step`` on, and get their state from the member
    ``giver``; in later views that is still the step of those that joined last. ``ended``: ranks whose loop is over;
    ``returning``: ranks that live and may be let in again. ``put_out``: those of them that were put out because they
    are slow; ``for_work``: and not by their links. ``before``: why others that are no members left, in earlier views.
    ``job``: drawn with the first view, and the same in all that follow it. ``begun``: all members of the first view
    have wrapped their model; until then the view is given up if one of them is restarted.
    """

    generation: int
    members: Mapping[int, str]
    changes: tuple[Change, ...] = ()
    step: int = 0
    giver: int = -1
    ended: frozenset[int] = frozenset()
    returning: frozenset[int] = frozenset()
    put_out: frozenset[int] = frozenset()
    for_work: frozenset[int] = frozenset()
    before: tuple[Change, ...] = ()
    job: str = ""
    begun: bool = field(default=False, compare=False)
    joined: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        joined = frozenset(change.rank for change in self.changes if change.joined)
        object.__setattr__(self, "joined", joined & set(self.members))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks in order: a rank's place among them is its rank in the process groups."""
        return tuple(sorted(self.members))

    @property
    def has_begun(self) -> bool:
        """Whether ranks that are no members come late; a view that has a successor has begun."""
        return self.begun or self.generation > 0

    def without(self, gone: Mapping[int, Leaving]) -> View:
        """The next view, without the members ``gone``, each with its reason."""
        left = {rank: own for rank, own in self.members.items() if rank not in gone}
        changes = tuple(Change.left(rank, gone[rank]) for rank in sorted(gone) if rank in self.members)
        ended = self.ended | {change.rank for change in changes if change.kind == "done"}
        returning = self.returning | {change.rank for change in changes if change.kind in ("returns", *SLOW)}
        put_out = self.put_out | {change.rank for change in changes if change.kind in SLOW}
        for_work = self.for_work | {change.rank for change in changes if change.kind == "slow"}
        return View(
            self.generation + 1,
            left,
            changes,
            self.step,
            ended=ended,
            returning=returning,
            put_out=put_out,
            for_work=for_work,
            before=self._left(left),
            job=self.job,
        )

    def again(self) -> View:
        """The next view, with the same members."""
        return replace(self, generation=self.generation + 1, changes=(), before=self._left(self.members))

    def _left(self, members: Mapping[int, str]) -> tuple[Change, ...]:
        """Why the ranks that are not among ``members`` left, as far as this view knows it; the last change of each."""
        known = {change.rank: change for change in (*self.before, *self.changes) if not change.joined}
        return tuple(change for rank, change in sorted(known.items()) if rank not in members)

    @property
    def is_done(self) -> bool:
        """Whether no member is left because all loops are over."""
        return not self.members and bool(self.ended)

    @property
    def ended_early(self) -> bool:
        """Whether ranks have ended their loops because some were told to end."""
        told = {*self.changes, *self.before}
        return any(Change.left(rank, ENDED_EARLY) in told for rank in self.ended)

    def shortfall(self, least: int, *, with_returning: bool) -> bool:
        """Whether there are fewer members than the job may go on with.

        Ranks whose loop is over are not missed. ``with_returning``: ranks that are about to be let in again count as
        members.
        """
        number = len(self.members) + (len(self.returning - set(self.members)) if with_returning else 0)
        return number < max(1, least - len(self.ended))

    def with_joined(self, new: Mapping[int, str], *, step: int, giver: int) -> View:
        """The next view, with new incarnations of these ranks; older incarnations are put out."""
        changes = [Change.left(rank, STARTED_AGAIN) for rank in sorted(new) if rank in self.members]
        changes += [Change(rank, True, _how_it_came(new[rank])) for rank in sorted(new)]
        members = {**self.members, **new}
        return View(
            self.generation + 1,
            members,
            tuple(changes),
            step,
            giver,
            ended=self.ended - set(new),
            returning=self.returning - set(new),
            put_out=self.put_out - set(new),
            for_work=self.for_work - set(new),
            before=self._left(members),
            job=self.job,
        )

    def changes_since(self, old: View, seen: Mapping[tuple[int, bool], Change]) -> tuple[Change, ...]:
        """The changes of members since ``old``, over any number of views; ``seen``: by rank and joined.

        Not every member sees all views that follow one another quickly.
        """
        gone = [rank for rank in old.ranks if self.members.get(rank) != old.members[rank]]
        new = [rank for rank in self.ranks if old.members.get(rank) != self.members[rank]]
        changed = [*((rank, False) for rank in gone), *((rank, True) for rank in new)]
        told = {(change.rank, change.joined): change for change in (*self.before, *self.changes)}
        known = {**seen, **told, **{(rank, False): Change.left(rank, DONE) for rank in self.ended}}
        return tuple(known.get(which, Change(*which, NOT_KNOWN, "restarted")) for which in changed)

    def said(self, kind: str = "rank") -> str:
        """The changes in words; ``kind``: what a member is."""
        return "; ".join(f"{kind} {c.rank} {'joined' if c.joined else 'left'}: {c.reason}" for c in self.changes)

    def watched_by(self, rank: int) -> tuple[int, ...]:
        """The members that ``rank`` watches: those that follow it in the ring of members."""
        ranks = self.ranks
        place = ranks.index(rank)
        following = [*ranks[place + 1 :], *ranks[:place]]
        return tuple(following[:WATCHED])

    def encode(self) -> str:
        """The text that is kept in the store."""
        changes, before = ([[c.rank, c.joined, c.reason, c.kind] for c in own] for own in (self.changes, self.before))
        members = {str(rank): self.members[rank] for rank in self.ranks}
        apart = [sorted(self.ended), sorted(self.returning), sorted(self.put_out), sorted(self.for_work)]
        numbers = [self.generation, members, changes, self.step, self.giver]
        return json.dumps([*numbers, *apart, before, self.job, self.begun])

    @classmethod
    def decode(cls, text: str, world_size: int) -> View:
        """The view of a text. Raises ``ValueError`` if it is no view of a job of ``world_size`` ranks."""
        try:
            generation, members, changes, step, giver, *ranks, before, job, begun = json.loads(text)
            ended, returning, put_out, for_work = (frozenset(map(int, own)) for own in ranks)
            view = cls(
                int(generation),
                {int(rank): str(own) for rank, own in members.items()},
                _changes(changes),
                int(step),
                int(giver),
                ended,
                returning,
                put_out,
                for_work,
                _changes(before),
                str(job),
                bool(begun),
            )
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"the job's store has no view of its members, but {text[:80]!r}") from error
        if view.generation < 0 or not all(0 <= rank < world_size for rank in view.members):
            raise ValueError(f"a view of ranks {view.ranks} in a job of {world_size} ranks")
        return view


def _changes(told: Sequence[tuple[int, bool, str, str]]) -> tuple[Change, ...]:
    return tuple(Change(int(rank), bool(joined), str(why), _kind(kind)) for rank, joined, why, kind in told)


def _kind(word: object) -> LeavingKind:
    return LEAVING_KINDS[LEAVING_KINDS.index(word)]


class Silence:
    """Since when each watched member has sent no sign of life, by this rank's own clock.

    ``interval_s``: seconds between two looks. If this rank itself was stopped and did not look for long, all silences
    begin again: it cannot tell whose silence that was.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._signs: dict[int, tuple[str, float]] = {}
        self._looked_at = -math.inf

    def look(self, now: float, signs: Mapping[int, str]) -> None:
        """Compare the watched members' signs with those of the last look."""
        missed = now - self._looked_at > 4 * self._interval_s
        self._looked_at = now
        before = {} if missed else self._signs
        self._signs = {
            rank: known if (known := before.get(rank)) is not None and known[0] == sign else (sign, now)
            for rank, sign in signs.items()
        }

    def forget(self, rank: int) -> None:
        """The silence of ``rank`` begins again."""
        self._signs.pop(rank, None)

    def longer_than(self, seconds: float) -> tuple[int, ...]:
        """The members that had been silent for longer at the last look."""
        return tuple(rank for rank, (_, since) in self._signs.items() if self._looked_at - since > seconds)


# -- a step that some members had finished, and others not, when the view changed


@dataclass(frozen=True)
class MergeProgress:
    """How far one member had come when its old process groups were dropped.

    It was merging ``step`` and had launched the merges of ``launched`` buckets, of which those in ``merged`` were over.
    ``complete``: it also had all ranks' telemetry, and so knew that all have all buckets. ``is_first``: it was let in
    at this step, and has no telemetry of the one before. A member that has just joined is at no step: -1.
    """

    step: int
    launched: int = 0
    merged: frozenset[int] = frozenset()
    complete: bool = False
    is_first: bool = False

    def encode(self, num_buckets: int) -> list[int]:
        """The progress as numbers, `progress_length` of them."""
        merged = [int(bucket in self.merged) for bucket in range(num_buckets)]
        return [self.step, self.launched, int(self.complete), int(self.is_first), *merged]

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> MergeProgress:
        """The progress of the numbers that `encode` gave."""
        step, launched, complete, is_first, *merged = numbers
        of_buckets = frozenset(bucket for bucket, is_merged in enumerate(merged) if is_merged)
        return cls(step, launched, of_buckets, bool(complete), bool(is_first))


def progress_length(num_buckets: int) -> int:
    """How many numbers an encoded `MergeProgress` has."""
    return 4 + num_buckets


@dataclass(frozen=True)
class Repair:
    """How the members of a new view end the step that the old one began, the same on all of them.

    ``completed``: a step that some member has complete, whose telemetry ``giver`` sends to all; ``None`` if there is
    none. ``step`` is merged next. Its buckets in ``given`` come from the member named there, those in ``kept`` have
    been merged by all, and the others are lost for members that had launched them.
    """

    step: int
    completed: int | None = None
    giver: int = -1
    given: Mapping[int, int] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    num_launched: int = 0


def repair(progress: Mapping[int, MergeProgress]) -> Repair:
    """The repair that follows from each member's progress, by rank.

    Members are at most one step apart, because a merge needs all of them. A member that has a step complete knows that
    all have its buckets, so only its telemetry is left to give.
    """
    known = {rank: own for rank, own in progress.items() if own.step >= 0}
    if not known:
        raise ValueError("no member knows a step: all have only just joined")
    step = min(own.step for own in known.values())
    done = [rank for rank, own in known.items() if own.step > step or own.complete]
    if done:
        after = {rank: own if own.step > step else MergeProgress(step + 1) for rank, own in known.items()}
        waiting = any(own.step == step for own in known.values())
        launched = max(own.launched for own in after.values())
        has_it = [rank for rank in done if known[rank].step == step or not known[rank].is_first]
        return Repair(step + 1, step if waiting else None, min(has_it) if waiting else -1, num_launched=launched)
    launched = max(own.launched for own in known.values())
    merged = {b: [rank for rank, own in known.items() if b in own.merged] for b in range(launched)}
    kept = frozenset(b for b, ranks in merged.items() if len(ranks) == len(progress))
    given = {b: min(ranks) for b, ranks in merged.items() if ranks and b not in kept}
    return Repair(step, given=given, kept=kept, num_launched=launched)


def leader(view: View, healing: Iterable[int]) -> int:
    """The member that lets others in: the lowest that is not itself waiting for its state."""
    whole = [rank for rank in view.ranks if rank not in set(healing)]
    return min(whole or view.ranks)


def _how_it_came(incarnation: str) -> str:
    return "a spare took its place" if OF_A_SPARE in incarnation else "came back"
