"""What is late, and stops, as one: a replica, which is one copy of the model."""

from __future__ import annotations

import contextlib
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from straggle import world
from straggle.merge.rows.telemetry import MAX_SCALARS, means_of
from straggle.merge.wire.channel import Channel
from straggle.merge.wire.groups import succeeds
from straggle.merge.wire.long_wait import LONG_S
from straggle.merge.wire.patience import Heard, PlaceFor, place_in_replica
from straggle.merge.wire.store import StoreUnreachable

_MARKS = 2**20  # of which the squares of thousands can be summed exactly
_MERGED = "the merged gradients"
_NUM_ORDERED = 2  # steps in which the order of units is compared before a unit runs, and not after it
_LOOK_S = 1.0  # a vote that takes longer is looked at by the thread that trains alone

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Agreed:
    """``present``: of which slots any of the ranks has a gradient; ``slowest``: for which rank each replica waited.

    ``alike``: all have the same, with the same weights. ``scalars``: the means over all ranks, by the hash of the name.
    ``told``: the numbers that each rank told.
    """

    present: Sequence[bool]
    slowest: tuple[int, ...]
    alike: bool = True
    scalars: Mapping[float, float] = field(default_factory=dict)
    told: Sequence[Sequence[float]] = ()


class Inside(Protocol):
    """This rank inside of its replica."""

    def weigh(self, factor: float) -> None:
        """Until the step ends this rank's gradients count by so much more or less."""

    def begin(self, *, goes_on: bool) -> None:
        """A step begins; ``goes_on``: what it waits in it is of the one before."""

    def waited_s(self) -> float:
        """Seconds that it has waited there in this step, and in those before it that this one goes on."""


class Question(Protocol):
    """What an optional part asks the ranks of its replica after each merged step; on the training thread."""

    def __call__(self) -> tuple[int, bool, bool]:
        """This rank's word, from 0 to 2**20, of which 0 is no; and whether it says yes to two more questions."""

    def answered(self, *, agreed: bool, num_yes: tuple[int, int]) -> None:
        """All ranks of the replica have this step merged; ``agreed``: they have said the same word, and not no."""


class Vote(Protocol):
    """Whether a replica leaves its step. All of its ranks ask at the same places, and are told the same."""

    def ask_too(self, question: Question) -> None:
        """With each merged step ask the ranks this, too; on all of them."""

    def begin(self, step: int, *, stood_in: bool) -> None:
        """This step begins; ``stood_in``: this rank was, in the one before."""

    def forget_waits(self) -> None:
        """A step is left that was not stood in for: no later one goes on with it."""

    def __call__(self, own: bool, at: int) -> bool:
        """Whether the replica leaves the step at this place, from this rank's ``own`` word for it."""

    def say_ahead(self, word: Callable[[], int]) -> None:
        """One rank says ``word()`` with each vote from here on: a number for what is to come; 0: nothing so far."""

    def say_nothing_ahead(self) -> None:
        """It says nothing of what is to come any more."""

    def heard(self) -> tuple[bool, int]:
        """Of the last vote, if its answer is not read yet: whether any rank is late, and what was said ahead."""

    def ask(self, numbers: Sequence[float], what: str) -> Sequence[Sequence[float]]:
        """The numbers that each rank of the replica says, as many on each; all of them call it. It waits for them."""

    def weigh(self, weight: float) -> float:
        """The weight of the replica's step, from that of this rank's; all of its ranks weigh theirs."""

    def agree(
        self,
        present: Sequence[bool],
        waited_s: Sequence[float],
        weights: Sequence[float],
        scalars: Mapping[float, float],
        tells: Sequence[float] = (),
    ) -> Agreed:
        """What the ranks of the replica have of a merged step, from what this one has of it.

        ``present``: whether there is a gradient, for each slot; ``weights``: what is in those of which all have copies.
        ``waited_s``: for how long the rank with this one's shards waited for others of its replica, for each replica.
        ``scalars``: the means over the ranks with these shards, at most `MAX_SCALARS` of them. ``tells``: as many
        numbers on each rank, that all are told.
        """

    def average(self, copied: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Make gradients that the ranks have copies of equal again: their mean by these weights, in place.

        There is at least one, on all ranks.
        """

    def close(self) -> None:
        """Ask no more."""


@dataclass(frozen=True)
class Replica:
    """One rank, or the ranks that shard one copy of the model.

    ``place``: its number among the ``count`` replicas, over which gradients are merged. It has the row of this number
    in each step's table, and a full gradient weighs 1 in ``count``. What is said to people, and what ranks leave in
    the store, has the process's rank instead (`Channel.name`).
    ``vote``: ``None`` for one rank, whose own word it is. ``waited_s``: for how long this rank waited inside of it.
    ``is_first``: this rank is the lowest of it. ``own_data``: its number among those of its ranks that compute other
    samples: with FSDP each does, with tensor parallelism alone all compute the same.
    ``ranks``: of the job, if it is several; ``inside``: the channel of these.
    """

    place: int
    count: int
    vote: Vote | None = None
    waited_s: Callable[[], float] = float
    is_first: bool = True
    own_data: int = 0
    ranks: Sequence[int] = ()
    inside: Channel | None = None

    def tell(self, channel: Channel, own: Callable[[], PlaceFor]) -> None:
        """Let the ranks of ``channel`` know where this rank is, ``own()``; in a step it may wait for its replica."""
        if (inside := self.inside) is None:
            channel.tell(own)
            return
        inside.tell(own)
        channel.tell(partial(_place_inside, own, inside, Heard(inside.patience.silent_s, world.monotonic)))

    @staticmethod
    def of_one_rank(channel: Channel) -> Replica:
        """Each rank has a copy of the model by itself."""
        return Replica(channel.rank, channel.world_size)

    @staticmethod
    def of_ranks(
        channel: Channel, inside_channel: Channel, inside: Inside, place_name: Callable[[int], str], own_data: int
    ) -> Replica:
        """The ranks of ``inside_channel`` have one copy together; ``channel`` has those that hold the same shards."""
        names = inside_channel.gather(list(channel.names), "names")
        vote = UnitVote(inside_channel, place_name, inside, names, channel.post_failure)
        is_first, ranks = inside_channel.rank == 0, tuple(inside_channel.names)
        return Replica(
            channel.rank,
            channel.world_size,
            vote,
            inside.waited_s,
            is_first=is_first,
            own_data=own_data,
            ranks=ranks,
            inside=inside_channel,
        )


def _place_inside(own: Callable[[], PlaceFor], inside: Channel, heard: Heard) -> PlaceFor:
    place, for_s = own()
    others = [rank for rank in range(inside.world_size) if rank != inside.rank]
    if place == "inside" and for_s >= LONG_S:
        with contextlib.suppress(StoreUnreachable):
            return place_in_replica((place, for_s), inside.places(others, heard))
    return place, for_s


class _Words:
    """What a rank says in a vote, and after it what all say.

    How many are late, what one of them said ahead, and at which place each rank is.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._none = array("q", bytes(8 * (2 + world_size)))
        self._numbers = self._none[:]
        self.tensor = torch.frombuffer(self._numbers, dtype=torch.int64)

    def write(self, own: bool, at: int, ahead: int) -> None:
        self._numbers[:] = self._none
        self._numbers[0], self._numbers[1], self._numbers[2 + self._rank] = own, ahead, at

    @property
    def any_late(self) -> bool:
        return self._numbers[0] > 0

    @property
    def ahead(self) -> int:
        return self._numbers[1]

    @property
    def places(self) -> Sequence[int]:
        return self._numbers[2:]


class UnitVote:
    """At each unit every rank of a replica says whether it is late, and reads what all have said at the next one.

    By then it is known: a unit has collectives of its own, which no rank ends before all have begun them. The answer to
    the last question of a step is read by nobody. ``place_name``: what is at a place, in words. ``names``: for each
    rank of the replica, all ranks that hold its shards. ``tell``: these ranks why this one fails.
    """

    def __init__(
        self,
        channel: Channel,
        place_name: Callable[[int], str],
        inside: Inside,
        names: Sequence[Sequence[int]],
        tell: Callable[[str], None],
    ) -> None:
        self._channel, self._place_name, self._inside, self._names = channel, place_name, inside, names
        self._tell = tell
        self._question: Question | None = None
        self._left_out_scalars = False  # in some step, and it is said
        self._ahead: Callable[[], int] | None = None
        self._num_steps = self._step = 0
        self._number = 0  # of the question
        self._spare, self._words = (_Words(channel.rank, channel.world_size) for _ in range(2))  # they take turns
        self._asked: tuple[Future[dist.Work], int] | None = None  # with these words, and at which place
        # torch keeps a record of each of the last 2,000 collectives, in memory of the thread that launches them: in the
        # training thread's, records of votes would lie between the units' gradients, and break it up
        self._launcher = world.Executor(1, thread_name_prefix="straggle-votes")

    def ask_too(self, question: Question) -> None:
        """With each merged step ask the ranks this, too."""
        self._question = question

    def begin(self, step: int, *, stood_in: bool) -> None:
        """This step begins; if it is late, too, then because of whom its replica waited for in the one before."""
        if self._asked is not None:  # its words are used again
            self._any_late(*self._asked)
            self._asked = None
        # after the vote that is left from the step before: its errors name that step
        self._num_steps, self._step = self._num_steps + 1, step
        self._inside.begin(goes_on=stood_in)

    def forget_waits(self) -> None:
        """A step is left that was not stood in for: no later one goes on with it."""
        self._inside.begin(goes_on=False)

    def __call__(self, own: bool, at: int) -> bool:
        """Whether a rank of the replica was late at the place before this one."""
        if self._asked is not None and self._any_late(*self._asked):
            self._asked = None
            return True
        # two in turn: the launcher's thread may still look at the answer to the last question
        self._words, self._spare = self._spare, self._words
        # written before it is launched: the collective reads it on another thread
        self._words.write(own, at, 0 if self._ahead is None else self._ahead())
        self._number += 1
        self._asked = launched, _ = self._launch(self._words.tensor), at
        self._launcher.submit(self._look, launched, self._words, at)
        # in the first steps it waits, so that ranks in another order are named before FSDP hangs over them
        if self._num_steps <= _NUM_ORDERED:  # FSDP would wait for a rank that is elsewhere
            self._any_late(*self._asked)
        return False

    def say_ahead(self, word: Callable[[], int]) -> None:
        """Asked on the training thread, with each vote."""
        self._ahead = word

    def say_nothing_ahead(self) -> None:
        """0 in each vote."""
        self._ahead = None

    def heard(self) -> tuple[bool, int]:
        """It is there when a pass is over; the next vote reads it, too."""
        if self._asked is None:
            return False, 0
        return self._any_late(*self._asked), self._words.ahead

    def ask(self, numbers: Sequence[float], what: str) -> Sequence[Sequence[float]]:
        """By one message."""
        size = len(numbers)
        own = torch.zeros(self._channel.world_size, size, dtype=torch.float64)
        own[self._channel.rank] = torch.tensor(numbers, dtype=torch.float64)
        said = self._sum(own.flatten(), what)
        return [said[first : first + size] for first in range(0, len(said), size)]

    def weigh(self, weight: float) -> float:
        """The mean of the ranks' weights; until the step ends, this rank's gradients count by its own over that."""
        total: float = self._sum(torch.tensor([weight], dtype=torch.float64), "step.weight")[0]
        mean = total / self._channel.world_size
        self._inside.weigh(weight / mean)
        return mean

    def agree(
        self,
        present: Sequence[bool],
        waited_s: Sequence[float],
        weights: Sequence[float],
        scalars: Mapping[float, float],
        tells: Sequence[float] = (),
    ) -> Agreed:
        """The merges of different shards may not have the same replicas in them, if one was stood in for."""
        # one number in place of a list: if its mean and mean square agree, all ranks have the same
        mark = hash((*present, *weights)) % _MARKS  # of numbers: the same in every process
        pairs = [number for pair in self._with_room(scalars) for number in pair]
        first_told = len(waited_s) + 2 * MAX_SCALARS
        numbers = [*waited_s, *pairs, *[0.0] * (2 * MAX_SCALARS - len(pairs)), *tells]
        own = torch.zeros(self._channel.world_size, len(numbers), dtype=torch.float64)
        own[self._channel.rank] = torch.tensor(numbers, dtype=torch.float64)
        word, *yes = (0, False, False) if self._question is None else self._question()
        said = torch.tensor([mark, mark * mark, word, word * word, *map(int, yes)])
        marks, squares, words, of_words, first, second, *rest = self._sum(torch.cat([said, own.flatten()]), _MERGED)
        if self._question is not None:
            agreed = words > 0 and self._channel.world_size * of_words == words * words
            self._question.answered(agreed=agreed, num_yes=(round(first), round(second)))
        by_rank = [rest[first : first + len(numbers)] for first in range(0, len(rest), len(numbers))]
        waits, told = [row[: len(waited_s)] for row in by_rank], [row[first_told:] for row in by_rank]
        means = means_of(row[len(waited_s) : first_told] for row in by_rank)
        # a second message only if they differ, which all ranks see alike: they all send it, or none does
        if not (alike := self._channel.world_size * squares == marks * marks):
            present = [number > 0 for number in self._sum(torch.tensor(present, dtype=torch.int32), _MERGED)]
        return Agreed(present, self._slowest(waits), alike, means, told)

    def _with_room(self, scalars: Mapping[float, float]) -> list[tuple[float, float]]:
        """As many of them as a message has room for."""
        if len(scalars) > MAX_SCALARS and not self._left_out_scalars:
            self._left_out_scalars = True
            what = "in a sharded job a report has room for %d scalars of all ranks, and step %d has %d: %s"
            _log.warning(what, MAX_SCALARS, self._step, len(scalars), "the others are left out")
        return [*scalars.items()][:MAX_SCALARS]

    def average(self, copied: Sequence[Tensor], weights: Sequence[float]) -> None:
        """By one message; the order of the ranks is that of each other replica, and so are the bits."""
        parts = [own.flatten() * weight for own, weight in zip(copied, weights, strict=True)]
        flat = torch.cat([*parts, torch.tensor(weights, dtype=parts[0].dtype, device=parts[0].device)])
        self._number += 1
        work = self._channel.groups.data.all_reduce(flat)
        self._channel.wait(work, self._number, f"rank {self._channel.name}, {_MERGED} of its replica")
        sums, totals = flat[: -len(parts)], flat[-len(parts) :].clamp(min=1e-12)
        for own, part, total in zip(copied, torch.split(sums, [part.numel() for part in parts]), totals, strict=True):
            own.copy_(part.view_as(own) / total)

    def close(self) -> None:
        """Ask no more."""
        # before the channel: a vote on its way needs its groups
        self._launcher.shutdown()
        self._channel.close()

    def _slowest(self, by_rank: Sequence[Sequence[float]]) -> tuple[int, ...]:
        """For each replica the rank that waited least for its others; -1 if none has waited."""
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

    def _look(self, launched: Future[dist.Work], words: _Words, at: int) -> None:
        """Report ranks that are elsewhere before the thread that trains can: FSDP may crash or hang over them first."""
        # on the launcher's thread, after each launch: the training thread may be inside of FSDP, and come to no hook
        if launched.exception() is None and succeeds(launched.result(), _LOOK_S) and (why := self._apart(words, at)):
            _log.error(why)
            self._tell(why)

    def _any_late(self, launched: Future[dist.Work], at: int) -> bool:
        self._channel.wait(launched.result(), self._number, self._where(at))
        if why := self._apart(self._words, at):
            raise RuntimeError(why)
        return self._words.any_late

    def _apart(self, words: _Words, at: int) -> str:
        """Which ranks are at other places than this one, if any is."""
        if all(place == at for place in words.places):
            return ""
        names = [of_rank[self._names[self._channel.rank].index(self._channel.name)] for of_rank in self._names]
        others = [
            f"rank {names[rank]} is {self._place_name(place)}" for rank, place in enumerate(words.places) if place != at
        ]
        return (
            f"{self._where(at)}: {', '.join(others)}. All ranks that shard a copy must run the same units in the same "
            "order: let no branch depend on a rank's own data"
        )

    def _where(self, at: int) -> str:
        return f"rank {self._channel.name}, step {self._step}, {self._place_name(at)}, the vote of its replica"
