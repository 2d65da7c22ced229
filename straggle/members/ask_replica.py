"""What the ranks of a replica ask each other after each merged step: whether they let others in after the next one.

All of them give their shards' state, as of one step, so all of them must be ready, and mean the same newcomers.
"""

from __future__ import annotations

import zlib

from straggle.members.member import Member
from straggle.members.membership import Membership
from straggle.members.view import leader

_WORDS = 2**20 - 1


class AskReplica:
    """A `Question` of one rank."""

    def __init__(self, member: Member, membership: Membership) -> None:
        self._member, self._membership = member, membership

    def __call__(self) -> int:
        """A number for the members that this rank would let in; 0 if there are none, or if it could not do so now."""
        view, wanted = self._membership.view, self._membership.joins.wanted
        new = sorted(own for member, own in wanted.items() if view.members.get(member) != own)
        if not new or leader(view, self._membership.detector.healing) != self._membership.rank:
            return 0
        return self._member.asks(1 + zlib.crc32(" ".join(new).encode()) % _WORDS)

    def answered(self, *, agreed: bool) -> None:
        """Note what all ranks of the replica say."""
        self._member.answered(agreed=agreed)
