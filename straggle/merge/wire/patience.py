"""How long a rank is waited for: a pure function of where it is, and the signs by which its peers know that.

A rank that is alive and outside of a step may evaluate or save. DDP's peers would wait for it as long as the time limit
of their process group is, and so do these. One that has said that it pauses is waited for until it is back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Place = Literal["inside", "outside", "paused"]
PlaceFor = tuple[Place, float]  # and for how many seconds
Verdict = Literal["wait", "name", "give up"]

_NAME_S = 4.0  # after so long the ranks that are waited for are named
_NAME_AGAIN_S = 60.0
_SIGN_S = (2.0, 10.0)  # the silence of a rank that gives no sign of life any more: `give_up_s`, between these


@dataclass(frozen=True)
class Patience:
    """Seconds that a rank is waited for: ``give_up_s`` by the policy, ``group_s`` by the user's process group."""

    give_up_s: float
    group_s: float

    @property
    def outside_s(self) -> float:
        """For a rank that lives and is outside of a step, or has not wrapped the model yet."""
        return max(self.give_up_s, self.group_s)

    @property
    def silent_s(self) -> float:
        """Without a sign for so long a rank counts as one that gives none."""
        return min(max(self.give_up_s, _SIGN_S[0]), _SIGN_S[1])

    def limit_s(self, place: Place | None) -> float:
        """For a rank that is at this place; ``None``: it gives no sign of life."""
        if place == "paused":
            return math.inf
        return self.outside_s if place == "outside" else self.give_up_s

    def words(self, place: Place | None) -> str:
        """That limit, and what sets it."""
        if place == "outside" and self.group_s >= self.give_up_s:
            return f"{self.group_s:g} s, the process group's own limit (init_process_group(timeout=...))"
        return f"give_up_s={self.give_up_s:g} (LateHandling)"


def verdict(place: Place | None, waited_s: float, patience: Patience, named_s: float = 0.0) -> Verdict:
    """What becomes of a wait for a rank at this place, after so long; ``named_s``: when it was last named, 0: not yet.

    ``None``: the rank gives no sign of life.
    """
    if waited_s >= patience.limit_s(place):
        return "give up"
    return "name" if waited_s >= (named_s + _NAME_AGAIN_S if named_s else _NAME_S) else "wait"


class Awaited(NamedTuple):
    """A rank that has not come, by its name: where it is, ``None`` if it gives no sign of life, and for how long."""

    name: int
    place: Place | None
    for_s: float = math.inf

    def words(self, patience: Patience) -> str:
        """Where it is, and how long it is waited for."""
        if self.place == "paused":
            return f"rank {self.name} is in model.pause(), for which there is no limit"
        return f"rank {self.name} {_IS[self.place]}; the limit is {patience.words(self.place)}"


_IS = {None: "gives no sign of life", "inside": "is in a step", "outside": "is alive and outside of a step"}


def judged(
    awaited: Sequence[Awaited], waited_s: float, patience: Patience, named_s: float = 0.0
) -> tuple[Verdict, str]:
    """The verdict on a wait for several ranks, and why it is given up; it is in vain if one of them is given up.

    A rank is waited for at a place for as long as it is there: one that comes back from a long evaluation has the time
    for its step. If all have come, the network does not do its part.
    """
    for rank in awaited:
        if verdict(rank.place, min(waited_s, rank.for_s), patience) == "give up":
            return "give up", f"rank {rank.name} {_IS[rank.place]}: given up after {patience.words(rank.place)}"
    then = verdict(awaited[0].place if awaited else "inside", waited_s, patience, named_s)
    if then == "give up" and awaited:
        then = verdict("paused", waited_s, patience, named_s)
    return then, f"given up after {patience.words('inside')}" if then == "give up" else ""


def place_in_replica(own: PlaceFor, others: Sequence[Awaited]) -> PlaceFor:
    """Where a rank is for its peers, if it shards its copy of the model with ``others``, which wait for each other."""
    if own[0] == "inside":
        for place in ("paused", "outside"):
            if away := [other.for_s for other in others if other.place == place]:
                return place, max(away)
    return own


# -- signs of life


class Sign(NamedTuple):
    """What a rank writes in the store each second: a ``number`` that grows, where it is, and for how many seconds."""

    number: int
    place: Place
    for_s: float

    def word(self) -> str:
        """As it lies in the store."""
        return f"{self.number} {self.place} {self.for_s:.1f}"

    @staticmethod
    def of(word: str) -> Sign:
        """The sign of such a word."""
        number, place, for_s = word.split(" ")
        return Sign(int(number), place, float(for_s))  # type: ignore[arg-type]


class Heard:
    """The signs that one rank has heard of others, by ``clock``; one that stays the same is no sign of life."""

    def __init__(self, silent_s: float, clock: Callable[[], float]) -> None:
        self._silent_s, self._clock = silent_s, clock
        self._last: dict[int, tuple[str, float, bool]] = {}  # a word, since when it is that, and whether it has changed

    def of(self, rank: int, name: int, word: str) -> Awaited:
        """Where a rank is by the word that is its last one now; an empty one: it has given none."""
        now = self._clock()
        if not word:
            return Awaited(name, None)
        if (last := self._last.get(rank)) is None or last[0] != word:
            self._last[rank] = last = word, now, last is not None
        silent_s = now - last[1]
        if silent_s >= self._silent_s:
            return Awaited(name, None, silent_s if last[2] else math.inf)
        _, place, for_s = Sign.of(word)
        return Awaited(name, place, for_s + silent_s)
