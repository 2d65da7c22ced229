"""What is late, and stops, as one: a replica, which is one copy of the model."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from straggle.merge.channel import Channel

_MARKS = 2**20  # of which the squares of thousands can be summed exactly
_MERGED = "the merged gradients"
_NUM_ORDERED = 2  # steps in which the order of units is compared before a unit runs, and not after it


@dataclass(frozen=True)
class Agreed:
    """``present``: of which slots any of the ranks has a gradient; ``slowest``: for which rank each replica waited.

    ``alike``: all have the same, with the same weights.
    """

    present: Sequence[bool]
    slowest: tuple[int, ...]
    alike: bool = True


class Inside(Protocol):
    """This rank inside of its replica."""

    factor: float

    def begin(self) -> None:
        """A step begins."""

    def waited_s(self) -> float:
        """Seconds that it has waited there in this step."""


class Vote(Protocol):
    """Whether a replica leaves its step. All of its ranks ask at the same places, and are told the same."""

    def begin(self) -> None:
        """A step begins."""

    def __call__(self, own: bool, at: int) -> bool:
        """Whether the replica leaves the step at this place, from this rank's ``own`` word for it."""

    def weigh(self, weight: float) -> float:
        """The weight of the replica's step, from that of this rank's; all of its ranks weigh theirs."""

    def agree(self, present: Sequence[bool], waited_s: Sequence[float], weights: Sequence[float]) -> Agreed:
        """What the ranks of the replica have of a merged step, from what this one has of it.

        ``present``: whether there is a gradient, for each slot; ``weights``: what is in those of which all have copies.
        ``waited_s``: for how long the rank with this one's shards waited for others of its replica, for each replica.
        """

    def average(self, copied: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Make gradients that the ranks have copies of equal again: their mean by these weights, in place."""

    def close(self) -> None:
        """Ask no more."""


@dataclass(frozen=True)
class Replica:
    """One rank, or the ranks that shard one copy of the model.

    ``place``: its number among the ``count`` replicas, over which gradients are merged. It has the row of this number
    in each step's table, and a full gradient weighs 1 in ``count``. What is said to people, and what ranks leave in
    the store, has the process's rank instead (`Channel.name`).
    ``vote``: ``None`` for one rank, whose own word it is. ``waited_s``: for how long this rank waited inside of it.
    """

    place: int
    count: int
    vote: Vote | None = None
    waited_s: Callable[[], float] = float

    @staticmethod
    def of_one_rank(channel: Channel) -> Replica:
        """Each rank has a copy of the model by itself."""
        return Replica(channel.rank, channel.world_size)

    @staticmethod
    def of_ranks(
        channel: Channel, inside_channel: Channel, inside: Inside, place_name: Callable[[int], str]
    ) -> Replica:
        """The ranks of ``inside_channel`` have one copy together; ``channel`` has those that hold the same shards."""
        names = inside_channel.gather(list(channel.names), "names")
        vote = UnitVote(inside_channel, place_name, inside, names)
        return Replica(channel.rank, channel.world_size, vote, inside.waited_s)


class _Words:
    """What a rank says in a vote, and after it the sums of what all say."""

    def __init__(self) -> None:
        self.numbers = array("q", (0, 0, 0))
        self.tensor = torch.frombuffer(self.numbers, dtype=torch.int64)

    def write(self, *numbers: int) -> None:
        self.numbers[:] = array("q", numbers)


class UnitVote:
    """At each unit every rank of a replica says whether it is late, and reads what all have said at the next one.

    By then it is known: a unit has collectives of its own, which no rank ends before all have begun them. The answer to
    the last question of a step is read by nobody. ``place_name``: what is at a place, in words. ``names``: for each
    rank of the replica, all ranks that hold its shards.
    """

    def __init__(
        self, channel: Channel, place_name: Callable[[int], str], inside: Inside, names: Sequence[Sequence[int]]
    ) -> None:
        self._channel, self._place_name, self._inside, self._names = channel, place_name, inside, names
        self._num_steps = 0
        self._number = 0  # of the question
        self._spare, self._words = _Words(), _Words()  # they take turns
        self._asked: tuple[Future[dist.Work], int] | None = None  # with these words, and at which place
        # torch keeps a record of each of the last 2,000 collectives, in memory of the thread that launches them: in the
        # training thread's, records of votes would lie between the units' gradients, and break it up
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="straggle-votes")

    def begin(self) -> None:
        """A step begins."""
        self._num_steps += 1
        if self._asked is not None:  # its words are used again
            self._any_late(*self._asked)
            self._asked = None
        self._inside.begin()

    def __call__(self, own: bool, at: int) -> bool:
        """Whether a rank of the replica was late at the place before this one."""
        if self._asked is not None and self._any_late(*self._asked):
            self._asked = None
            return True
        # sums of the places and of their squares show whether all ranks are at the same one
        self._words, self._spare = self._spare, self._words
        self._words.write(int(own), at, at * at)
        self._number += 1
        self._asked = self._launch(self._words.tensor), at
        if self._num_steps <= _NUM_ORDERED:  # FSDP would wait for a rank that is elsewhere
            self._any_late(*self._asked)
        return False

    def weigh(self, weight: float) -> float:
        """The mean of the ranks' weights; until the step ends, this rank's gradients count by its own over that."""
        total: float = self._sum(torch.tensor([weight], dtype=torch.float64), "step.weight")[0]
        mean = total / self._channel.world_size
        self._inside.factor = weight / mean
        return mean

    def agree(self, present: Sequence[bool], waited_s: Sequence[float], weights: Sequence[float]) -> Agreed:
        """The merges of different shards may not have the same replicas in them, if one was stood in for."""
        mark = hash((*present, *weights)) % _MARKS  # of numbers: the same in every process
        own = torch.zeros(self._channel.world_size, len(waited_s), dtype=torch.float64)
        own[self._channel.rank] = torch.tensor(waited_s, dtype=torch.float64)
        marks, squares, *waits = self._sum(torch.cat([torch.tensor([mark, mark * mark]), own.flatten()]), _MERGED)
        if not (alike := self._channel.world_size * squares == marks * marks):
            present = [number > 0 for number in self._sum(torch.tensor(present, dtype=torch.int32), _MERGED)]
        return Agreed(present, self._slowest(waits, len(waited_s)), alike)

    def average(self, copied: Sequence[Tensor], weights: Sequence[float]) -> None:
        """By one message; the order of the ranks is that of each other replica, and so are the bits."""
        parts = [own.flatten() * weight for own, weight in zip(copied, weights, strict=True)]
        flat = torch.cat([*parts, torch.tensor(weights, dtype=parts[0].dtype)]) if parts else torch.empty(0)
        self._number += 1
        work = self._channel.groups.data.all_reduce(flat)
        self._channel.wait(work, self._number, f"rank {self._channel.name}, {_MERGED} of its replica")
        sums, totals = flat[: -len(parts)], flat[-len(parts) :].clamp(min=1e-12)
        for own, part, total in zip(copied, torch.split(sums, [part.numel() for part in parts]), totals, strict=True):
            own.copy_(part.view_as(own) / total)

    def close(self) -> None:
        """Ask no more."""
        self._launcher.shutdown()
        self._channel.close()

    def _slowest(self, waits: Sequence[float], num_replicas: int) -> tuple[int, ...]:
        """For each replica the rank that waited least for its others; -1 if none has waited."""
        by_rank = [waits[place * num_replicas :][:num_replicas] for place in range(len(self._names))]
        return tuple(self._least(number, of_replica) for number, of_replica in enumerate(zip(*by_rank, strict=True)))

    def _least(self, number: int, waits: Sequence[float]) -> int:
        return self._names[waits.index(min(waits))][number] if max(waits) > 0 else -1

    def _sum(self, numbers: Tensor, what: str) -> list[Any]:
        self._number += 1
        work = self._launch(numbers).result()
        self._channel.wait(work, self._number, f"rank {self._channel.name}, {what} of its replica")
        return numbers.tolist()

    def _launch(self, numbers: Tensor) -> Future[dist.Work]:
        """Begin their sum: one after the other, in the order in which they are asked for."""
        return self._launcher.submit(self._channel.groups.control.all_reduce, numbers)

    def _any_late(self, launched: Future[dist.Work], at: int) -> bool:
        self._channel.wait(launched.result(), self._number, self._where(at))
        num_late, places, squares = self._words.numbers
        if self._channel.world_size * squares != places * places:
            raise RuntimeError(
                f"{self._where(at)}: another rank of this replica is at another place of the model. All ranks that "
                "shard a copy must run the same units in the same order: let no branch depend on a rank's own data"
            )
        return bool(num_late)

    def _where(self, at: int) -> str:
        return f"rank {self._channel.name}, {self._place_name(at)}, the vote of its replica"
