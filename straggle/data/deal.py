"""Which samples of an epoch each rank has in which step, and what becomes of those that a rank did not bring.

A *deal* gives each step of an epoch ``sum(shares)`` samples, and of these each rank its share. It holds until a rank
leaves or comes back: what was not brought so far is then dealt again, by new shares. A rank that misses a step, because
it is not there when that is merged, has the same samples in the next one: it need not load any for the steps that it
misses, and what it has not come to at the end of the deal is dealt again. All follows from the telemetry of the merged
steps, so that every rank deals alike and no message is needed.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from straggle.data.costs import Costs
from straggle.members.rows import leaving_ranks
from straggle.merge.rows.step_record import StepRecord

_KEPT = 64  # steps whose deal by cost is remembered: a loader fetches ahead


@dataclass(frozen=True)
class Deal:
    """``samples``, int64 numbers in their order, and how many of them each rank has in a step.

    In the last step there may be fewer: each rank then has its part of them, rounded, which may be none. With
    ``costs`` a rank has its share of what the step's samples cost, whatever their number.
    """

    samples: Tensor
    shares: tuple[int, ...]
    costs: Costs | None = None
    _dealt: dict[int, list[Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_steps(self) -> int:
        """Steps until all samples are dealt."""
        return -(-len(self.samples) // sum(self.shares))

    def of(self, step: int, rank: int) -> Tensor:
        """The samples of a rank in step ``step`` of the deal."""
        total = sum(self.shares)
        begin = step * total
        there = max(0, min(total, len(self.samples) - begin))
        if self.costs is not None:
            return self._by_cost(self.costs, step, self.samples[begin : begin + there])[rank]
        first = sum(self.shares[:rank])
        last = first + self.shares[rank]
        return self.samples[begin + first * there // total : begin + last * there // total]

    def _by_cost(self, costs: Costs, step: int, samples: Tensor) -> list[Tensor]:
        if step not in self._dealt:
            self._dealt[step] = costs.deal(samples, self.shares)
            if len(self._dealt) > _KEPT:
                del self._dealt[next(iter(self._dealt))]
        return self._dealt[step]

    def after(self, num_steps: int) -> Tensor:
        """What has not been dealt after so many steps."""
        return self.samples[num_steps * sum(self.shares) :]


@dataclass(frozen=True)
class Parts:
    """What the ranks brought in a merged step: ``brought`` by rank.

    ``absent``: they are no members. ``stood_in``: they did not take part by themselves. ``leaving``: they leave after
    this step. ``missed``: they were stood in for before they had entered it, and have not begun with their samples.
    """

    brought: tuple[bool, ...]
    absent: frozenset[int] = frozenset()
    stood_in: frozenset[int] = frozenset()
    leaving: frozenset[int] = frozenset()
    missed: frozenset[int] = frozenset()

    def active(self, before: frozenset[int], world_size: int) -> frozenset[int]:
        """The ranks to which something is dealt from here on, if these had something ``before``.

        One that comes back does from when it takes part by itself: it has the state of the others by then. None is
        left out if none would be there.
        """
        gone = self.absent | self.leaving
        itself = frozenset(range(world_size)) - gone - self.stood_in
        return (before - gone) | itself or before


def parts_of(record: StepRecord, repeat_up_to: float = 0.0) -> Parts:
    """What the ranks brought, by a step's telemetry.

    A rank that gave at most the share ``repeat_up_to`` has not brought its samples.
    """
    finished, table = record.table.finished_ranks(), record.table
    if not all(finished):
        ranks = record.report.ranks
        finished = [not (own.absent or own.idle) and own.reach > repeat_up_to for own in ranks]
    stood_in = table.stood_in_ranks()
    missed = table.missed_ranks() if stood_in else stood_in
    return Parts(tuple(finished), table.absent_ranks(), stood_in, leaving_ranks(table), missed)


class Ledger:
    """What of an epoch was brought and what is still to be dealt; from one epoch to the next.

    ``batch_size`` samples go to each rank that is ``active``: one that has not left, or has taken part by itself since.
    A sample of a rank that is there but brings nothing is dealt at most ``max_repeats`` times again in an epoch;
    ``num_lost`` counts those that were given up, over all epochs. ``shares``: those of the first step, if they are
    not equal. ``costs``: shares are of these.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        batch_size: int,
        world_size: int,
        seed: int = 0,
        shuffle: bool = True,
        max_repeats: int = 3,
        shares: Sequence[int] | None = None,
        costs: Costs | None = None,
    ) -> None:
        self._costs = costs
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._world_size = world_size
        self._seed = seed
        self._shuffle = shuffle
        self._max_repeats = max_repeats
        self.num_lost = 0
        self.active = frozenset(range(world_size))
        self.deal: Deal
        self._lost: list[Tensor]  # of this deal
        self._repeats: dict[int, int]  # of samples in this epoch
        self._num_missed: list[int]  # steps of this deal, by rank: it is so far behind with its samples
        self._begin(0, tuple(shares or self._shares()))

    @property
    def position(self) -> tuple[int, int, int]:
        """Epoch, deal in the epoch, step in the deal: of the next step."""
        return self.epoch, self.num_deals, self.done

    def place(self, rank: int) -> tuple[int, int, int]:
        """The same, of the step for which the rank's next samples were dealt: an earlier one if it has missed some."""
        return self.epoch, self.num_deals, self.done - self._num_missed[rank]

    def of(self, rank: int) -> Tensor:
        """The rank's samples in the next step."""
        return self.deal.of(self.done - self._num_missed[rank], rank)

    def work(self) -> list[float]:
        """What each rank's samples in the next step cost, in mean units of the costs, with which it was made."""
        assert self._costs is not None
        return [self._costs.of(self.of(rank)) for rank in range(self._world_size)]

    def merged(self, parts: Parts, shares: Sequence[int] | None = None) -> None:
        """The step at `position` is merged; ``shares`` from here on, if they are not equal ones."""
        for rank, brought in enumerate(parts.brought):
            if rank in parts.missed:
                self._num_missed[rank] += 1
            elif not brought:
                self._not_brought(self.of(rank), counts=rank not in parts.absent)
        self.done += 1
        self.active = parts.active(self.active, self._world_size)
        if shares is None:
            shares = self._shares()
        if tuple(shares) == self.deal.shares and self.done < self.deal.num_steps:
            return
        if len(left := self._left(parts.absent)):
            self._deal(left, tuple(shares))
        else:
            self._begin(self.epoch + 1, tuple(shares))

    def state_dict(self) -> dict[str, Any]:
        """Numbers and tensors, equal on all ranks."""
        return {
            "num_samples": self._num_samples,
            "world_size": self._world_size,
            "batch_size": self._batch_size,
            "position": list(self.position),
            "shares": list(self.deal.shares),
            "active": sorted(self.active),
            "samples": self.deal.samples.clone() if self.num_deals else torch.empty(0, dtype=torch.int64),
            "lost": torch.cat([torch.empty(0, dtype=torch.int64), *self._lost]),
            "repeats": torch.tensor(sorted(self._repeats.items()), dtype=torch.int64).view(-1, 2),
            "num_lost": self.num_lost,
            "num_missed": list(self._num_missed),
        }

    def load_state_dict(self, state: Mapping[str, Any], shares: Sequence[int] | None = None) -> None:
        """Go on from there; with another number of ranks or another batch size, what is left is dealt again.

        ``shares`` are then those from here on, if they are not equal ones.
        Raises ``ValueError`` for the state of another number of samples.
        """
        if state["num_samples"] != self._num_samples:
            raise ValueError(
                f"this state is of {state['num_samples']} samples, not of {self._num_samples}: begin without it"
            )
        epoch, num_deals, done = map(int, state["position"])
        samples = state["samples"].clone() if num_deals else self._order(epoch)
        self.epoch, self.num_deals, self.done = epoch, num_deals, done
        self.deal = Deal(samples, tuple(map(int, state["shares"])), self._costs)
        self._lost = [state["lost"].clone()]
        self._num_missed = list(map(int, state.get("num_missed", [0] * len(self.deal.shares))))
        self._repeats = {int(sample): int(times) for sample, times in state["repeats"].tolist()}
        self.num_lost = int(state["num_lost"])
        self.active = frozenset(map(int, state["active"]))
        if (state["world_size"], state["batch_size"]) != (self._world_size, self._batch_size):
            self.active = frozenset(range(self._world_size))
            self._deal(self._left(range(len(self._num_missed))), tuple(shares or self._shares()))

    def _left(self, absent: Collection[int]) -> Tensor:
        """What is to be dealt again, as the deal ends; what a rank had that is not ``absent`` counts as repeated."""
        for rank, missed in enumerate(self._num_missed):
            for step in range(self.done - missed, self.done):
                self._not_brought(self.deal.of(step, rank), counts=rank not in absent)
        return torch.cat([self.deal.after(self.done), *self._lost])

    def _not_brought(self, samples: Tensor, *, counts: bool) -> None:
        if counts and len(samples):
            numbers = samples.tolist()
            for number in numbers:
                self._repeats[number] = self._repeats.get(number, 0) + 1
            again = [self._repeats[number] <= self._max_repeats for number in numbers]
            self.num_lost += len(again) - sum(again)
            samples = samples[torch.tensor(again)]
        self._lost.append(samples)

    def _shares(self) -> tuple[int, ...]:
        return tuple(self._batch_size if rank in self.active else 0 for rank in range(self._world_size))

    def _begin(self, epoch: int, shares: tuple[int, ...]) -> None:
        self.epoch, self.num_deals, self._repeats = epoch, -1, {}
        self._deal(self._order(epoch), shares)

    def _deal(self, samples: Tensor, shares: tuple[int, ...]) -> None:
        self.deal = Deal(samples, shares, self._costs)
        self.num_deals += 1
        self.done, self._lost, self._num_missed = 0, [], [0] * len(shares)

    def _order(self, epoch: int) -> Tensor:
        """The samples of an epoch in their order."""
        return epoch_order(self._num_samples, self._seed, epoch) if self._shuffle else torch.arange(self._num_samples)


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The epoch's permutation of all sample numbers, int64 of shape (num_samples,): the same on every rank."""
    # Hashed, because with seed + epoch the second epoch of seed 0 would be the first of seed 1.
    hashed = random.Random(f"{seed}/{epoch}").getrandbits(32)
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(hashed))
