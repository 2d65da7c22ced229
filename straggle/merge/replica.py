"""What is late, and stops, as one: a replica, which is one copy of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from straggle.merge.channel import Channel

_NUM_ORDERED = 2  # steps in which the order of units is compared before a unit runs, and not after it


class Vote(Protocol):
    """Whether a replica leaves its step. All of its ranks ask at the same places, and are told the same."""

    def begin(self) -> None:
        """A step begins."""

    def __call__(self, own: bool, at: int) -> bool:
        """Whether the replica leaves the step at this place, from this rank's ``own`` word for it."""


@dataclass(frozen=True)
class Replica:
    """One rank, or the ranks that shard one copy of the model.

    ``place``: its number among the ``count`` replicas, over which gradients are merged. It has the row of this number
    in each step's table, and a full gradient weighs 1 in ``count``. What is said to people, and what ranks leave in
    the store, has the process's rank instead (`Channel.name`).
    ``vote``: ``None`` for one rank, whose own word it is.
    """

    place: int
    count: int
    vote: Vote | None = None

    @staticmethod
    def of_one_rank(channel: Channel) -> Replica:
        """Each rank has a copy of the model by itself."""
        return Replica(channel.rank, channel.world_size)

    @staticmethod
    def of_ranks(channel: Channel, inside: Channel, place_name: Callable[[int], str]) -> Replica:
        """The ranks of ``inside`` have one copy together; ``channel`` has those that hold the same shards."""
        return Replica(channel.rank, channel.world_size, UnitVote(inside, place_name))


class UnitVote:
    """At each unit every rank of a replica says whether it is late, and reads what all have said at the next one.

    By then it is known: a unit has collectives of its own, which no rank ends before all have begun them. The answer to
    the last question of a step is read by nobody. ``place_name``: what is at a place, in words.
    """

    def __init__(self, inside: Channel, place_name: Callable[[int], str]) -> None:
        self._inside, self._place_name = inside, place_name
        self._num_steps = 0
        self._number = 0  # of the question
        self._asked: tuple[Tensor, dist.Work, int] | None = None

    def begin(self) -> None:
        """A step begins."""
        self._num_steps += 1
        self._asked = None

    def __call__(self, own: bool, at: int) -> bool:
        """Whether a rank of the replica was late at the place before this one."""
        if self._asked is not None and self._any_late(*self._asked):
            self._asked = None
            return True
        # sums of the places and of their squares show whether all ranks are at the same one
        words = torch.tensor([int(own), at, at * at])
        self._number += 1
        self._asked = words, self._inside.groups.control.all_reduce(words), at
        if self._num_steps <= _NUM_ORDERED:  # FSDP would wait for a rank that is elsewhere
            self._any_late(*self._asked)
        return False

    def _any_late(self, words: Tensor, work: dist.Work, at: int) -> bool:
        self._inside.wait(work, self._number, self._where(at))
        num_late, places, squares = words.tolist()
        if self._inside.world_size * squares != places * places:
            raise RuntimeError(
                f"{self._where(at)}: another rank of this replica is at another place of the model. All ranks that "
                "shard a copy must run the same units in the same order: let no branch depend on a rank's own data"
            )
        return bool(num_late)

    def _where(self, at: int) -> str:
        return f"rank {self._inside.name}, {self._place_name(at)}, the vote of its replica"
