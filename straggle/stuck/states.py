"""What ranks that do not go on tell each other, and for whom the job waits because of that, in words. All pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from straggle.stuck.frames import Kind

SILENT = "it gives no word of itself: its process is stopped, something holds its GIL, or its host is gone"
# what a loop with members writes in place of a collective of its own, which ...
INSTEAD = (
    "needs all processes that its group began with: write step.log(loss=loss) and read model.last_report.scalars, or "
    "`with model.pause():` in place of a barrier"
)
_MANY = 8  # ranks that are named one by one


@dataclass(frozen=True)
class RankState:
    """A rank that has been in the same step, or before it, for a while.

    ``kind``: it is stuck in its own code, or in a collective of its own; it ``waits`` for a merge of this model; it is
    ``inside`` of straggle for another reason, such as another rank of its replica; or its loop has said that it pauses.

    ``quiet_s``: for how long it has begun no phase and finished no gradient. ``where``: in words. ``line``: function,
    file and line of the user's code. ``lag``: merged steps that it has not taken. ``number``: of reports in a row.
    """

    kind: Kind
    step: int
    entered: bool
    busy_s: float
    quiet_s: float
    where: str = ""
    line: str = ""
    lag: int = 0
    collective: str = ""
    number: int = 0

    def as_json(self) -> str:
        """As it lies in the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(word: str) -> RankState:
        """The state of such a word."""
        return RankState(**json.loads(word))

    @property
    def since(self) -> str:
        """Its step, and for how long, in words."""
        step = f"in step {self.step}" if self.entered else f"before step {self.step}"
        if self.busy_s - self.quiet_s < 0.2 * self.busy_s:
            return f"been {step} for {duration(self.quiet_s)}"
        return f"been {step} for {duration(self.busy_s)}, the last {duration(self.quiet_s)} of it"


class Finding(NamedTuple):
    """``words``: what a rank logs, nothing if a lower one does. ``ranks``: those that are waited for, by ``waiting``.

    ``is_waited_for``: whether anybody waits; if not, all ranks may be at work between two steps, such as an evaluation.
    """

    words: str
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    is_waited_for: bool = True


def finding(
    own: int, states: Mapping[int, RankState], ranks: Sequence[int], limit_s: float, left: Sequence[int] = ()
) -> Finding | None:
    """What rank ``own``, which does not go on, knows of itself and those at the same place; ``None``: nothing yet.

    ``ranks``: all that take part; ``left``: those that do not any more. ``states``: of those that do not go on.
    ``limit_s``: from when on a rank is stuck.
    """
    me = states[own]
    stuck = {rank for rank, state in states.items() if state.kind == "stuck" and state.quiet_s >= limit_s}
    if me.kind == "collective" and any(s.kind == "stuck" and s.quiet_s >= limit_s / 2 for s in states.values()):
        return None  # it waits for these, which say so
    alike = [rank for rank, state in states.items() if (state.kind, state.line) == (me.kind, me.line)]
    group = tuple(sorted(rank for rank in alike if me.kind == "collective" or rank in stuck))
    waiting = tuple(sorted(rank for rank, state in states.items() if _waits(state, me) and rank not in group))
    others = [rank for rank in ranks if rank not in group]
    nobody = not waiting and not me.lag and me.kind == "stuck"
    if nobody and set(ranks) - stuck:
        return None  # the others are at work, or have not said that they wait
    words = _words(me, group, waiting, others, left)
    return Finding(words if own == group[0] else "", group, waiting, is_waited_for=not nobody)


def _waits(state: RankState, for_one: RankState) -> bool:
    return state.kind == "waits" or (state.kind == "collective" and for_one.kind == "stuck")


def _words(
    me: RankState, group: Sequence[int], waiting: Sequence[int], others: Sequence[int], left: Sequence[int]
) -> str:
    have = "has" if len(group) == 1 else "have"
    words = f"{named(group)} {have} {me.since}, {me.where}"
    if me.kind == "collective":
        last = f" ({me.collective})" if me.collective else ""
        without = f"; {named(left)} {'is no member' if len(left) == 1 else 'are no members'}, and it {INSTEAD}"
        if left and not others:
            return f"{words}, a collective of the loop's own{last}{without}"
        if not others:
            return (
                f"{words}, a collective{last} that all ranks have begun and that does not end: the network is in doubt"
            )
        words = f"{words}, a collective of the loop's own{last} that {named(others)} {_has(others)} not begun"
        return f"{words}{without}" if left else words
    if waiting:
        return f"{words}; {named(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {_it(group)}"
    if me.lag:
        return f"{words}; the others go on without {_it(group)}, by {me.lag} merged steps so far"
    return f"{words}; no rank goes on (an evaluation or a checkpoint on all ranks goes into `with model.pause():`)"


def silent_words(silent: Sequence[int], waiting: Sequence[int], step: int, seconds: float) -> str:
    """What is said of ranks that are waited for and do not speak."""
    they = SILENT if len(silent) == 1 else SILENT.replace("it gives", "they give").replace("itself", "themselves")
    return f"{named(waiting)} {_has(waiting)} waited for {named(silent)} in step {step} for {duration(seconds)}; {they}"


def paused_words(paused: Mapping[int, RankState], waiting: Sequence[int], step: int, seconds: float) -> str:
    """What is said of ranks that are waited for and pause."""
    longest = max(state.busy_s for state in paused.values())
    ranks = sorted(paused)
    return (
        f"{named(waiting)} {_has(waiting)} waited for {named(ranks)} in step {step} for {duration(seconds)}: "
        f"{'it is' if len(ranks) == 1 else 'they are'} in model.pause(), for {duration(longest)} so far"
    )


def blind_words(seconds: float) -> str:
    """What is added of a rank that could not look at itself before."""
    return f" (now: for {duration(seconds)} nothing ran in this process: its GIL was held, or it was stopped)"


def named(ranks: Iterable[int]) -> str:
    """These ranks in words."""
    listed = list(ranks)
    if len(listed) == 1:
        return f"rank {listed[0]}"
    if len(listed) > _MANY:
        return f"{len(listed)} ranks (the first of them {listed[0]})"
    return f"ranks {', '.join(map(str, listed))}"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _it(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def duration(seconds: float) -> str:
    """Seconds, with one digit if they are few."""
    return f"{seconds:.1f} s" if seconds < 3 else f"{seconds:.0f} s"
