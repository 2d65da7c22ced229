"""What is late, and stops, as one: a replica, which is one copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from straggle.merge.channel import Channel

_MARKS = 2**24  # of which squares can be summed exactly
_NUM_ORDERED = 2  # steps in which the order of units is compared before a unit runs, and not after it


class Vote(Protocol):
    """Whether a replica leaves its step. All of its ranks ask at the same places, and are told the same."""

    def begin(self) -> None:
        """A step begins."""

    def __call__(self, own: bool, at: int) -> bool:
        """Whether the replica leaves the step at this place, from this rank's ``own`` word for it."""

    def weigh(self, weight: float) -> float:
        """The weight of the replica's step, from that of this rank's; all of its ranks weigh theirs."""

    def agree(self, present: Sequence[bool]) -> Sequence[bool]:
        """Of which slots any rank of the replica has a merged gradient, from those of which this one has."""


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
    def of_ranks(channel: Channel, vote: UnitVote) -> Replica:
        """Those that vote have one copy together; ``channel`` has the ranks that hold the same shards."""
        return Replica(channel.rank, channel.world_size, vote)


class UnitVote:
    """At each unit every rank of a replica says whether it is late, and reads what all have said at the next one.

    By then it is known: a unit has collectives of its own, which no rank ends before all have begun them. The answer to
    the last question of a step is read by nobody. ``place_name``: what is at a place, in words. ``scale``: is told how
    often this rank's gradients count in the mean over the replica.
    """

    def __init__(self, inside: Channel, place_name: Callable[[int], str], scale: Callable[[float], None]) -> None:
        self._inside, self._place_name, self._scale = inside, place_name, scale
        self._scaled = False
        self._num_steps = 0
        self._number = 0  # of the question
        self._asked: tuple[Tensor, dist.Work, int] | None = None

    def begin(self) -> None:
        """A step begins."""
        self._num_steps += 1
        self._asked = None
        if self._scaled:
            self._scale(1.0)
            self._scaled = False

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

    def weigh(self, weight: float) -> float:
        """The mean of the ranks' weights; until the step ends, this rank's gradients count by its own over that."""
        total: float = self._sum(torch.tensor([weight], dtype=torch.float64), "step.weight")[0]
        mean = total / self._inside.world_size
        self._scale(weight / mean)
        self._scaled = True
        return mean

    def agree(self, present: Sequence[bool]) -> Sequence[bool]:
        """The merges of different shards may not have the same replicas in them, if one was stood in for."""
        mark = hash(tuple(present)) % _MARKS  # of booleans: the same in every process
        size, found = self._inside.world_size, self._sum(torch.tensor([mark, mark * mark]), "the merged gradients")
        if size * found[1] == found[0] * found[0]:
            return present
        return [number > 0 for number in self._sum(torch.tensor(present, dtype=torch.int32), "the merged gradients")]

    def _sum(self, numbers: Tensor, what: str) -> list[Any]:
        self._number += 1
        work = self._inside.groups.control.all_reduce(numbers)
        self._inside.wait(work, self._number, f"rank {self._inside.name}, {what} of its replica")
        return numbers.tolist()

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
