"""Where a process is inside of a member: a member is one rank, or the ranks that shard one copy of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class InReplica:
    """Rank ``shard`` of the ``size`` ranks that are one member; views, joins and leavings are of members.

    Member ``m`` has the ranks from ``m * size`` on. Ranks with the same shard of all members merge together, so each
    shard has process groups, states to give and names of its own, and all shards have one chain of views.
    """

    shard: int = 0
    size: int = 1

    def rank(self, member: int) -> int:
        """The rank of that member which has this one's shard."""
        return member * self.size + self.shard

    def ranks(self, member: int) -> range:
        """All ranks of a member."""
        return range(member * self.size, (member + 1) * self.size)

    def others(self, member: int) -> list[int]:
        """The ranks of this one's own member beside it."""
        return [rank for rank in self.ranks(member) if rank != self.rank(member)]

    def next_rank(self, member: int) -> int:
        """The rank that follows this one inside of its own member."""
        return member * self.size + (self.shard + 1) % self.size

    def key(self, name: str) -> str:
        """A key in the store that is this shard's alone."""
        return name if self.size == 1 else f"shard{self.shard}/{name}"

    @property
    def kind(self) -> str:
        """What a member is, in one word."""
        return "rank" if self.size == 1 else "replica"

    def named(self, members: Sequence[int]) -> str:
        """Members in words."""
        return f"{self.kind}s {list(members)}"


ALONE = InReplica()
