"""Which members are put out because they are slow, and when they may return: pure, from what all members know.

`absence.py` has the rule: what a member's absence brings. This has the patience. For its link a member is put out after
a few looks, as a link is the best of several measurements. For its work it is put out only if it was slow, or brought
less than half, in nine of ten steps, and these steps together had been better without it, whatever held it up in a few
of them: one that is slow now and then needs a deadline, and stays. It returns when its link is good again, or when it
has timed steps of its own (`probe.py`) with which it would bring more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from straggle.members.slow.absence import (
    Seen,
    absence_gain,
    better_without,
    slow_in_link,
    slow_in_work,
    slowest,
    step_seconds,
    usual_seconds,
    weight_of,
)
from straggle.policies.network.rank_links import others_links
from straggle.policies.network.slow_links import slow_in

LOOK_EVERY_S = 0.3  # between two looks at the links, and at least a step; a look costs a tenth of a millisecond
AFTER_LOOKS = 3  # looks in a row at which the others would be better off without a member, because of its link
RETURN_LOOKS = 10  # looks in a row at which a link was good again; doubled after each return in vain,
_MAX_DOUBLED = 4  # at most so often
_GOOD = 1.4  # a link is good again if at most so many times as slow as the others'; pings differ by a third
_REMEMBERED_S = 300.0  # a rank that is put out again within these had returned in vain

SUSPECTED = 10  # steps in which a member was slow, from which on it is judged by what its absence would bring
AFTER_STEPS = 50  # steps over which that is summed up,
AFTER_S = 10.0  # and at least so many seconds
_STALLS = AFTER_STEPS // 10  # steps, those with the longest waits for it, tell nothing of what it costs for good
_FOR_ANOTHER = 9  # steps in which a member was slow count for nothing, for each step in which it was not
_MOST = 20  # of them are counted: two steps close to each other in which it was not, and it is not suspected
RETURN_PROBES = 2  # probes in a row by which a member would bring more; doubled as looks are
_FOLLOWS = 0.02  # of itself, by which the usual time of a step follows each step: stalls hardly move it


_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Probe:
    """A rank that is out took ``seconds`` for a step of its own work; 0: a new process, of which nothing is known.

    ``number``: another one for each probe of the rank.
    """

    number: float
    seconds: float


@dataclass(frozen=True)
class Window:
    """Steps, since ``since_s``, in which the members ``ranks`` were suspected: what was merged, and would be without.

    ``weight`` in ``seconds``; ``weight_without`` in ``seconds_without``. ``stalls_s``: the longest that the others
    waited for these ranks, each in one step; the longest first.
    """

    ranks: frozenset[int] = frozenset()
    since_s: float = 0.0
    steps: int = 0
    weight: float = 0.0
    seconds: float = 0.0
    weight_without: float = 0.0
    seconds_without: float = 0.0
    stalls_s: tuple[float, ...] = ()

    @property
    def gain(self) -> float:
        """How many times as many gradients a second the others would have merged.

        In the steps with the longest waits, a tenth of all at most, they count as if they had waited for the mean of
        the rest: a rank that logs for a moment in each step, and evaluates in one, is not slow for good.
        """
        if not self.weight:
            return 0.0
        stalls_s = self.stalls_s[: self.steps // 10]
        waited_s = self.seconds - self.seconds_without - sum(stalls_s)
        waited_s *= self.steps / (self.steps - len(stalls_s))
        return self.weight_without / self.weight * (1 + waited_s / self.seconds_without)

    def and_step(self, seen: Seen, out: frozenset[int]) -> Window:
        """With another step, in which ``out`` were out."""
        without = out | self.ranks
        seconds, seconds_without = step_seconds(out, seen), step_seconds(without, seen)
        return replace(
            self,
            steps=self.steps + 1,
            weight=self.weight + weight_of(out, seen),
            seconds=self.seconds + seconds,
            weight_without=self.weight_without + weight_of(without, seen),
            seconds_without=self.seconds_without + seconds_without,
            stalls_s=tuple(sorted((*self.stalls_s, seconds - seconds_without), reverse=True)[:_STALLS]),
        )


@dataclass(frozen=True)
class SlowMembers:
    """The ranks that are ``out`` because they are slow, and what is remembered of all ranks; a state after each step.

    ``for_work``: those of them that are out for their work, and not for their links. ``now_s``: the seconds of all
    steps so far, equal on all members; ``looked_s``: those at the last look at links. ``against``: by rank, at how many
    looks in a row it was better to put it out, or at how many looks or probes in a row to let it return.
    ``slow_steps``: by rank, in how many steps it was slow in its work, less nine for each other step; ``window``: what
    those that are suspected cost. ``usual_s``: about the median of the members' slowest work, while ranks are out for
    theirs. ``probed``: by rank, the number of its last probe.
    ``returned_s``: by rank, when it last returned; ``flaps``: how often it returned in vain.
    """

    out: frozenset[int] = frozenset()
    for_work: frozenset[int] = frozenset()
    step: int = 0
    now_s: float = 0.0
    looked_s: float = -LOOK_EVERY_S
    usual_s: float = 0.0
    against: Mapping[int, int] = field(default_factory=dict)
    slow_steps: Mapping[int, int] = field(default_factory=dict)
    window: Window = Window()
    probed: Mapping[int, float] = field(default_factory=dict)
    returned_s: Mapping[int, float] = field(default_factory=dict)
    flaps: Mapping[int, int] = field(default_factory=dict)

    def after_step(
        self,
        step: int,
        seconds: float,
        look: Callable[[], Seen],
        min_gain: float,
        *,
        work_s: Mapping[int, float] = {},
        brings_less: bool = False,
        probes: Mapping[int, Probe] = {},
    ) -> SlowMembers:
        """The ranks out from the next step on: a function of this and the arguments alone, so the same on all ranks.

        ``work_s``: of each member whose work tells anything in this step; ``brings_less``: one gave less than half.
        ``probes``: of ranks that are out.
        """
        after = replace(self, step=step + 1, now_s=self.now_s + seconds)
        work_s = _of_others(work_s, self.out)  # a rank is in one or two more steps until the next view has come
        if after.for_work and work_s:
            after = after._follow(max(work_s.values()))
            if new := {rank: probe for rank, probe in probes.items() if after._is_new(rank, probe)}:
                after = after._after_probes(new, look())
        if work_s and (self.slow_steps or brings_less or _is_uneven(list(work_s.values()), min_gain)):
            after = after._after_work(look(), min_gain)
        if after.now_s - self.looked_s < LOOK_EVERY_S:
            return after
        return replace(after, looked_s=after.now_s).after_look(look(), min_gain)

    # -- links

    def after_look(self, seen: Seen, min_gain: float) -> SlowMembers:
        """The state after a look at the links, as they are ``seen`` now."""
        leaving = slow_in_link(self.out, seen, min_gain)
        by_link = self.out - self.for_work
        better = leaving | {rank for rank in by_link if _may_return(rank, self.out, seen)}
        kept = {rank: number for rank, number in self.against.items() if rank in self.for_work}
        after = replace(self, against={**kept, **{rank: self.against.get(rank, 0) + 1 for rank in sorted(better)}})
        if leaving and min(after.against[rank] for rank in leaving) >= AFTER_LOOKS:
            after = after.without(leaving)
        too_few = len(seen.links) - len(self.out | seen.absent) < seen.min_ranks
        return after._with({rank for rank in self.out if too_few or (rank in by_link and after._waited_enough(rank))})

    # -- work

    def _after_work(self, seen: Seen, min_gain: float) -> SlowMembers:
        """The state after a step in which members worked as long, and gave as much, as is ``seen``."""
        slow = slow_in_work(self.out, seen, min_gain)
        counted = {
            rank: min(_MOST, self.slow_steps.get(rank, 0) + (1 if rank in slow else -_FOR_ANOTHER))
            for rank in sorted(slow.union(self.slow_steps))
        }
        steps = {rank: number for rank, number in counted.items() if number > 0 and rank not in self.out}
        after = replace(self, slow_steps=steps)
        if not (suspects := after.suspects):
            return replace(after, window=Window())
        window = self.window if suspects == self.suspects else Window()
        window = (window if window.steps else after._begun(suspects, seen)).and_step(seen, self.out)
        if window.steps < AFTER_STEPS or self.now_s - window.since_s < AFTER_S:
            return replace(after, window=window)
        if window.ranks and window.gain >= min_gain:
            return after.without(window.ranks, for_work=True)
        return replace(after, window=Window())

    @property
    def suspects(self) -> frozenset[int]:
        """The members that are slow in their work in nearly all steps."""
        return frozenset(rank for rank, number in self.slow_steps.items() if number >= SUSPECTED)

    def _begun(self, suspects: frozenset[int], seen: Seen) -> Window:
        """A window that begins with this step: of those that had better be put out by it, or else of the slowest."""
        ranks = better_without(suspects, self.out, seen, 1.0) or slowest(suspects, self.out, seen)
        return Window(ranks, since_s=self.now_s)

    def _follow(self, slowest_s: float) -> SlowMembers:
        """A step's slowest work was this: the usual time goes towards it by a little, whatever the difference."""
        if not self.usual_s:
            return replace(self, usual_s=slowest_s)
        times = 1 + _FOLLOWS if slowest_s > self.usual_s else 1 / (1 + _FOLLOWS)
        return replace(self, usual_s=self.usual_s * times)

    def _is_new(self, rank: int, probe: Probe) -> bool:
        return rank in self.for_work and self.probed.get(rank) != probe.number

    def _after_probes(self, probes: Mapping[int, Probe], seen: Seen) -> SlowMembers:
        """The state after these probes of ranks that are out."""
        against = dict(self.against)
        for rank, probe in probes.items():
            back = seen.with_returned(rank, probe.seconds, self.usual_s)
            brings = absence_gain({rank}, self.out - {rank}, back) <= 1
            against[rank] = against.get(rank, 0) + 1 if brings else 0
        numbers = {rank: probe.number for rank, probe in probes.items()}
        after = replace(self, against=against, probed={**self.probed, **numbers})
        back_now = {rank for rank, probe in probes.items() if not probe.seconds or after._waited_enough(rank)}
        return after._with(back_now)

    # -- both

    def without(self, ranks: Collection[int], *, for_work: bool = False) -> SlowMembers:
        """This state with these ranks put out, too; ``for_work``: because of it, and not of their links."""
        flaps = dict(self.flaps)
        for rank in ranks:
            in_vain = self.now_s - self.returned_s.get(rank, -math.inf) < _REMEMBERED_S
            flaps[rank] = flaps.get(rank, 0) + 1 if in_vain else 0
        return replace(
            self,
            out=self.out.union(ranks),
            for_work=self.for_work.union(ranks) if for_work else self.for_work,
            against=_of_others(self.against, ranks),
            slow_steps=_of_others(self.slow_steps, ranks),
            window=Window(),
            usual_s=self.usual_s if self.for_work else 0.0,
            flaps=flaps,
        )

    def _waited_enough(self, rank: int) -> bool:
        needed = RETURN_PROBES if rank in self.for_work else RETURN_LOOKS
        return self.against.get(rank, 0) >= needed << min(self.flaps.get(rank, 0), _MAX_DOUBLED)

    def _with(self, ranks: Collection[int]) -> SlowMembers:
        """This state with these ranks let in again."""
        if not ranks:
            return self
        returned_s = {**self.returned_s, **dict.fromkeys(ranks, self.now_s)}
        return replace(
            self,
            out=self.out.difference(ranks),
            for_work=self.for_work.difference(ranks),
            against=_of_others(self.against, ranks),
            returned_s=returned_s,
        )


def _of_others(values: Mapping[int, _Value], ranks: Collection[int]) -> dict[int, _Value]:
    """Of values by rank, those of all others."""
    return {rank: value for rank, value in values.items() if rank not in ranks}


def _is_uneven(work_s: Sequence[float], min_gain: float) -> bool:
    """Whether one of the members may have been slow in its work; most steps end here, in microseconds."""
    return max(work_s) >= min_gain * usual_seconds(work_s)


def _may_return(rank: int, out: frozenset[int], seen: Seen) -> bool:
    """Whether the rank's link is good again, or slow and worth its gradients; false if the link is unknown."""
    link = seen.links[rank]
    if not link.is_known:
        return False
    if not slow_in(link, others_links(seen.links)[rank], times=_GOOD):
        return True
    return absence_gain({rank}, out - {rank}, seen.all_alike(out)) <= 1
