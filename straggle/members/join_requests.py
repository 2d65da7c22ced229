"""Who asks to be let in, as it lies in the job's store: a newcomer asks, and the member that leads hears it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from straggle.members.view import Seal, View


class Refused(ValueError):
    """The members do not let this rank in: it has another model or other options than they."""


class JoinRequests:
    """Of one incarnation of one rank; ``description``: what newcomers must have in common with the members.

    ``wanted``: who asks to be let in, by rank, as far as this rank has heard.
    """

    def __init__(self, rank: int, world_size: int, incarnation: str, seal: Seal) -> None:
        self._rank, self._world_size, self._incarnation = rank, world_size, incarnation
        self._seal = seal
        self.description = ""
        self.wanted: Mapping[int, str] = {}
        self._number = 0  # how often a rank has asked, as this one has dealt with

    def ask(self, store: Any) -> None:
        """Ask to be let in; the members answer with a view that has this incarnation, or with a refusal."""
        key = f"join/{self._rank}"
        store.set(key, self._seal.seal(key, json.dumps([self._incarnation, self.description])))
        store.add("joins", 1)

    def check_refused(self, store: Any) -> None:
        """Raise `Refused` where the members do not let this rank in."""
        key = f"refused/{self._rank}/{self._incarnation}"
        if store.check([key]) and (why := self._seal.open(key, store.get(key).decode())) is not None:
            raise Refused(why)

    def hear(self, store: Any, view: View, kept_out: Collection[int]) -> None:
        """Look who asks, but for ranks that are ``kept_out``; who is refused is told why."""
        if (number := store.add("joins", 0)) == self._number:
            return
        wanted = {}
        for rank in range(self._world_size):
            key = f"join/{rank}"
            if not store.check([key]) or (word := self._seal.open(key, store.get(key).decode())) is None:
                continue
            incarnation, description = json.loads(word)
            if view.members.get(rank) == incarnation or rank in kept_out:
                continue
            if why := _refusal(self.description, description):
                refused = f"refused/{rank}/{incarnation}"
                store.set(refused, self._seal.seal(refused, why))
            else:
                wanted[rank] = str(incarnation)
        self._number, self.wanted = number, wanted

    def hear_anew(self) -> None:
        """Who has asked is heard once more."""
        self._number = 0

    def forget(self) -> None:
        """Another rank leads; should this one lead again, it hears again who asks."""
        self.wanted, self._number = {}, 0

    def take(self, store: Any, view: View) -> dict[int, str]:
        """Those that have asked and are no members, who are to be let in now."""
        new = {rank: own for rank, own in self.wanted.items() if view.members.get(rank) != own}
        self.wanted = {}
        for rank in new:  # or it would be let in again, by the next leader, when it has left and does not ask
            store.delete_key(f"join/{rank}")
        return new


def _refusal(ours: str, theirs: str) -> str:
    """Why who describes itself so is not let in; empty: it is."""
    if ours == theirs:
        return ""
    own, other = json.loads(ours), json.loads(theirs)
    for name, described in own.items():
        if other.get(name) != described:
            return f"{name} is not that of the job: its members have {described}, and this rank has {other.get(name)}"
    return "it has options that the job's members do not have"
