"""What the ranks of a replica ask each other: whether they let others in, and whether all have got their state.

All of them give their shards' state, as of one step, so all of them must be ready, and mean the same newcomers. They
ask that after each merged step, for the next one. If one of them was told to end, they agree on their last step so.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from straggle.members.member import Member
from straggle.members.views.membership import Membership
from straggle.members.views.view import leader
from straggle.merge.wire.store import peek
from straggle.waits import until

_WORDS = 2**20 - 1
_LOOK_S = 0.01
_RETRY_S = 0.2  # a broken connection to the store
_ALL, _NONE = "all", "none"


class AskReplica:
    """A `Question` of one rank."""

    def __init__(self, member: Member, membership: Membership) -> None:
        self._member, self._membership = member, membership

    def __call__(self) -> tuple[int, bool, bool]:
        """A number for the members that this rank would let in; 0 if there are none, or if it could not do so now.

        And whether it is ready to leave after the next step, as it was told to end; and whether it lacks this step.
        """
        return self._wanted(), self._member.is_to_leave(), self._member.lacks_step

    def _wanted(self) -> int:
        view, wanted = self._membership.view, self._membership.joins.wanted
        new = sorted(own for member, own in wanted.items() if view.members.get(member) != own)
        if not new or leader(view, self._membership.detector.healing) != self._membership.rank:
            return 0
        return self._member.asks(1 + zlib.crc32(" ".join(new).encode()) % _WORDS)

    def answered(self, *, agreed: bool, num_yes: tuple[int, int]) -> None:
        """Note what all ranks of the replica say."""
        num_leave, num_lack = num_yes
        self._member.answered(agreed=agreed, leaves=num_leave == self._membership.inside.size)
        if num_leave:  # without the rank that was told, the others cannot go on
            self._member.notice.ask()
        if num_lack:  # what it computes with the others is of no state
            self._member.lose_state()


def all_have_state(
    lent: Callable[[], AbstractContextManager[Any]],
    key: str,
    rank: int,
    ranks: Sequence[int],
    awaits: Callable[[], bool],
) -> bool:
    """Wait until all ``ranks`` of a replica have got their state, as this one has. All of them get the same answer.

    ``awaits()``: whether this rank still waits for the others; otherwise they are not to go on from it either.
    ``lent()``: a connection to the store. If it breaks, the answer may be there all the same, so another one is tried.
    """

    def answer() -> str:
        try:
            with lent() as store:
                store.set(f"{key}/{rank}", "")
                return until(lambda: _answer(store, key, ranks, awaits), every_s=_LOOK_S)
        except (RuntimeError, OSError):
            if not awaits():
                raise
            return ""

    return until(answer, every_s=_RETRY_S) == _ALL


def _answer(store: Any, key: str, ranks: Sequence[int], awaits: Callable[[], bool]) -> str:
    """The answer, if there is one; whoever sees first that all have theirs, or waits no more, gives it for all."""
    if (answer := peek(store, key)) is not None:
        return answer
    if store.check([f"{key}/{each}" for each in ranks]):
        return str(store.compare_set(key, "", _ALL).decode())
    return "" if awaits() else str(store.compare_set(key, "", _NONE).decode())
