"""Requests to be let in, kept in the job's store: a newcomer asks, and the leader reads it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from straggle.members.views.in_replica import ALONE, InReplica
from straggle.members.views.view import View
from straggle.merge.wire.store import peek

_VERSIONS = ("straggle", "torch")  # of which the options and the state of a job are


class Refused(ValueError):
    """The members do not let this rank in: its model or its options differ from theirs."""


class JoinRequests:
    """Requests by and to one incarnation of one rank.

    ``refusal``: why no rank at all can be let in; empty if one can be.
    ``wanted``: by member, the requests to be let in that this rank has read; all ranks of a member have to ask.
    ``probes``: by member that is kept out and asks, what it says of itself.
    """

    def __init__(self, rank: int, world_size: int, incarnation: str, inside: InReplica = ALONE) -> None:
        self._rank, self._world_size, self._incarnation, self._inside = rank, world_size, incarnation, inside
        self._description = self.refusal = ""
        self._own_probe: tuple[float, float] | None = None
        self.wanted: Mapping[int, str] = {}
        self.probes: Mapping[int, tuple[float, float]] = {}
        self._number = 0  # the number of the request that was dealt with last

    def describe(self, description: str) -> None:
        """What newcomers must share with the members."""
        self._description = description

    def tell_probe(self, number: float, seconds: float) -> None:
        """Say with the next requests what this rank's last probe took; of a new process, any number and 0."""
        self._own_probe = number, seconds

    def ask(self, store: Any) -> None:
        """Ask to be let in; the members answer with a view that has this incarnation, or with a refusal."""
        request = json.dumps([self._incarnation, self._description, self._own_probe])
        store.set(f"join/{self._inside.rank(self._rank)}", request)
        # after the request: whoever reads the new number finds it
        store.add("joins", 1)

    def answered(self, store: Any) -> None:
        """This rank is let in: one that asked again meanwhile would be let in later, when it knows nothing of it."""
        store.delete_key(f"join/{self._inside.rank(self._rank)}")

    def check_refused(self, store: Any) -> None:
        """Raise `Refused` if the members do not let this rank in."""
        if (why := peek(store, f"refused/{self._rank}/{self._incarnation}")) is not None:
            raise Refused(why)

    def hear(self, store: Any, view: View, kept_out: Collection[int]) -> None:
        """Read the requests, except that of ranks in ``kept_out`` only the probes count; a refused rank is told why."""
        # before the requests: one that comes while they are read has a number of its own, and is read the next time
        if (number := store.add("joins", 0)) == self._number:
            return
        wanted, probes = {}, {}
        for rank in range(self._world_size):
            asked = [self._asked(store, each) for each in self._inside.ranks(rank)]
            incarnation, description, probe = asked[self._inside.shard]
            if not incarnation or {own for own, _, _ in asked} != {incarnation}:
                continue
            if view.members.get(rank) == incarnation:
                continue
            if rank in kept_out:
                if probe is not None:
                    probes[rank] = probe
                continue
            if why := _refusal(self._description, description) or self.refusal:
                store.set(f"refused/{rank}/{incarnation}", why)
            else:
                wanted[rank] = incarnation
        # at the end: if the store has failed before, all of them are read again
        self._number, self.wanted, self.probes = number, wanted, probes

    def _asked(self, store: Any, rank: int) -> tuple[str, str, tuple[float, float] | None]:
        """With which incarnation a rank asks, what it shares with the members, and its probe; empty if it asks not."""
        if (word := peek(store, f"join/{rank}")) is None:
            return "", "", None
        incarnation, description, probe = json.loads(word)
        return str(incarnation), description, None if probe is None else (float(probe[0]), float(probe[1]))

    def refuse(self, why: str) -> None:
        """From now on let no rank in, and tell those that ask why."""
        self.refusal = why
        self.hear_anew()

    def hear_anew(self) -> None:
        """Read all requests once more."""
        self._number = 0

    def forget(self) -> None:
        """Forget the requests, as another rank leads; if this one leads again, it reads them again."""
        self.wanted, self.probes, self._number = {}, {}, 0

    def take(self, store: Any, view: View) -> dict[int, str]:
        """Take the requests of ranks that are no members and are to be let in now."""
        new = {rank: own for rank, own in self.wanted.items() if view.members.get(rank) != own}
        for rank in new:  # or the next leader would let it in again after it has left, without a new request
            for each in self._inside.ranks(rank):
                store.delete_key(f"join/{each}")
        self.wanted = {}  # not before: with a connection that broke they are taken again
        return new


def _refusal(ours: str, theirs: str) -> str:
    """Why a rank with the description ``theirs`` is not let in; empty if it is."""
    if ours == theirs:
        return ""
    own, other = json.loads(ours), json.loads(theirs)
    for name in (*_VERSIONS, *own):
        if (described := own.get(name)) != (told := other.get(name)):
            what = f"the version of {name}" if name in _VERSIONS else name
            return f"{what} is not that of the job: its members have {described}, and this rank has {told}"
    return "it has options that the job's members do not have"
