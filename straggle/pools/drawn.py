"""A rank's micro-batches of its step's pool, as the passes of its step: one for each, with a weight of its own."""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

from straggle.merge.round.step_passes import Passes
from straggle.merge.rows.telemetry import Column, Row
from straggle.pools.draws import Draws
from straggle.pools.rows import ATTEMPTS, COMPUTED, COSTS, PARTS, WEIGHT

BY_HAND = (
    "gradients were put into p.grad by hand in a step with step.pull(), which weighs those of each backward pass by "
    "its micro-batch: call loss.backward() for each of them, or give each rank micro-batches of its own"
)


@dataclass(frozen=True)
class PoolWeights:
    """The weights of all micro-batches in a pool, and the number of ranks that draw from it.

    ``costs``: what each takes, relative to the mean of all; empty: all take as long. ``attempt``: how often the pool
    was begun; 0: what is lost of it is not computed again.
    """

    weights: tuple[float, ...]
    world_size: int
    attempt: int = 0
    costs: tuple[float, ...] = ()

    def cost(self, parts: Sequence[int]) -> float:
        """Of these micro-batches together, in mean ones."""
        return math.fsum(self.costs[number] for number in parts) if self.costs else float(len(parts))

    @cached_property
    def mark(self) -> int:
        """A number for the costs, which fits into a row; 0 if there are none."""
        return zlib.crc32(array("d", self.costs).tobytes()) >> 8 if self.costs else 0

    @cached_property
    def total(self) -> float:
        """The sum of the weights."""
        return sum(self.weights)

    @cached_property
    def scale(self) -> float:
        """The factor on a micro-batch's weight in the merge, with which all weights sum to the number of ranks."""
        return self.world_size / self.total


@final
class Drawn(Passes):
    """The micro-batches with the numbers ``parts``, in this order; the rank has begun ``num_begun`` of them.

    ``draws``: to where those not begun can be put back, at the time ``stuck_at``; ``None`` if they were dealt out.
    """

    follow_loop = False
    are_owed = True  # no other rank computes the micro-batches that this one has drawn
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
        """The weight of the pass with this number: that of its micro-batch, scaled."""
        return self._pool.scale * self._weights[number]

    def share(self, num_in: int, num_expected: int) -> float:  # noqa: ARG002
        """The share by weight: passes come one after another, and each may have any micro-batch."""
        return min(1.0, sum(self._weights[:num_in]) / self.own_weight) if self.own_weight else 0.0

    def as_submitted(self) -> Drawn:
        """These passes with the micro-batches that the rank had when its part was submitted."""
        return self if self.num_submitted == self.number else self._first(self.num_submitted)

    def check_none_by_hand(self) -> None:
        """Raise ``RuntimeError``: it is unknown to which micro-batches gradients put in by hand belong."""
        raise RuntimeError(BY_HAND)

    @property
    def give_back_at(self) -> float:
        """When the running micro-batch has taken too long, if others can be put back."""
        if self._draws is None or self.num_begun == self.number or not self._draws.may_put_back:
            return math.inf
        return self._stuck_at

    def give_back(self) -> Drawn:
        """Put back the micro-batches that are not begun; the rank may draw more later."""
        assert self._draws is not None
        self._draws.put_back(self.num_begun)
        return self._first(self.num_begun, is_open=True)

    def tell(self, row: Row, num_over: int) -> Row:
        """Add the pool's size, and the rank's part of it, to the row."""
        num_put_back = 0 if self._draws is None else self._draws.num_put_back
        num_over, pool = min(num_over, self.number), self._pool
        own: dict[Column, float] = {
            PARTS: len(pool.weights),
            WEIGHT: pool.total,
            ATTEMPTS: pool.attempt,
            COMPUTED: pool.cost(self.parts[:num_over]),
            COSTS: pool.mark,
        }
        return row._replace(reported=replace(row.reported, parts=num_over, put_back=num_put_back)).telling(own)

    def _first(self, number: int, *, is_open: bool = False) -> Drawn:
        return Drawn(
            self.parts[:number],
            self._pool,
            is_open=is_open,
            num_begun=self.num_begun,
            draws=self._draws,
            stuck_at=self._stuck_at,
        )
