"""What a rank has of its step's pool, as the passes of its step: one for each micro-batch, with a weight of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

from straggle.merge.step_passes import Passes
from straggle.merge.telemetry import Row
from straggle.pools.draws import Draws

BY_HAND = (
    "gradients were put into p.grad by hand in a step with step.pull(), which weighs those of each backward pass by "
    "its micro-batch: call loss.backward() for each of them, or give each rank micro-batches of its own"
)


@dataclass(frozen=True)
class PoolWeights:
    """The weights of all micro-batches in a pool that so many ranks draw from."""

    weights: tuple[float, ...]
    world_size: int

    @cached_property
    def total(self) -> float:
        """The sum of the weights."""
        return sum(self.weights)

    @cached_property
    def scale(self) -> float:
        """A micro-batch counts this times its weight in the merge: over all ranks, the sum is the number of ranks."""
        return self.world_size / self.total


@final
class Drawn(Passes):
    """The micro-batches with the numbers ``parts``, in this order; ``num_begun`` of them the rank has begun.

    ``draws``: where those that are not begun can be put back, at ``stuck_at``; ``None``: they were dealt out.
    """

    follow_loop = False
    are_owed = True  # no other rank computes what this one has drawn
    parts: tuple[int, ...]

    def __init__(
        self,
        parts: Sequence[int],
        pool: PoolWeights,
        *,
        is_open: bool = False,
        num_begun: int = 0,
        draws: Draws | None = None,
        stuck_at: float = math.inf,
        num_submitted: int | None = None,
    ) -> None:
        own = tuple(pool.weights[number] for number in parts)
        weight = sum(own)
        super().__init__(len(own), pool.scale * weight, is_open=is_open, may_end_early=bool(own))
        self.parts, self.num_begun = tuple(parts), num_begun
        self.own_weight, self.usual_number = weight, math.nan
        self.num_submitted = self.number if num_submitted is None else num_submitted
        self._weights, self._pool = own, pool
        self._draws, self._stuck_at = draws, stuck_at

    def weight_of(self, number: int) -> float:
        """That of its micro-batch."""
        return self._pool.scale * self._weights[number]

    def share(self, num_in: int, num_expected: int) -> float:  # noqa: ARG002
        """By weight: passes come one after another, and any of them may have any micro-batch."""
        return min(1.0, sum(self._weights[:num_in]) / self.own_weight) if self.own_weight else 0.0

    def as_submitted(self) -> Drawn:
        """The first ones, and no more."""
        return self if self.num_submitted == self.number else self._first(self.num_submitted)

    def check_none_by_hand(self) -> None:
        """Raise ``RuntimeError``: it is not known of which micro-batches they are."""
        raise RuntimeError(BY_HAND)

    @property
    def give_back_at(self) -> float:
        """When the running one has taken too long, if there are others that can be put back."""
        if self._draws is None or self.num_begun == self.number or not self._draws.may_put_back:
            return math.inf
        return self._stuck_at

    def give_back(self) -> Drawn:
        """Put back what is not begun; there may be more."""
        assert self._draws is not None
        self._draws.put_back(self.num_begun)
        return self._first(self.num_begun, is_open=True)

    def tell(self, row: Row, num_over: int) -> Row:
        """The pool's size, and what the rank did of it."""
        num_put_back = 0 if self._draws is None else self._draws.num_put_back
        reported = replace(row.reported, parts=min(num_over, self.number), put_back=num_put_back)
        return row._replace(reported=reported, pool_parts=len(self._pool.weights), pool_weight=self._pool.total)

    def _first(self, number: int, *, is_open: bool = False) -> Drawn:
        return Drawn(
            self.parts[:number],
            self._pool,
            is_open=is_open,
            num_begun=self.num_begun,
            draws=self._draws,
            stuck_at=self._stuck_at,
        )
