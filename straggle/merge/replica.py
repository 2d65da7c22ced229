"""What is late, and stops, as one: a replica, which is one copy of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from straggle.merge.channel import Channel


@dataclass(frozen=True)
class Replica:
    """One rank, or the ranks that shard one copy of the model.

    ``place``: its number among the ``count`` replicas, over which gradients are merged. It has the row of this number
    in each step's table, and a full gradient weighs 1 in ``count``. What is said to people, and what ranks leave in
    the store, has the process's rank instead (`Channel.rank`).
    ``vote(own)``: whether the replica leaves the step at this boundary, from this rank's own word for it. All of its
    ranks are asked at the same boundaries, and are told the same. ``None``: one rank, whose own word it is.
    """

    place: int
    count: int
    vote: Callable[[bool], bool] | None = None

    @staticmethod
    def of_one_rank(channel: Channel) -> Replica:
        """Each rank has a copy of the model by itself."""
        return Replica(channel.rank, channel.world_size)
