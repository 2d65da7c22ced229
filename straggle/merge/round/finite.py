"""Which of this rank's gradients are finite. The others are left out of the merge, and counted."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from straggle.merge.round.memory import Flat


class FiniteGradients:
    """Of one step, in these ``views``, one for each parameter.

    ``large`` ones are summed as they are put in, while they are in the cache: `added` is to be called for each of them.
    """

    def __init__(self, views: Sequence[Tensor]) -> None:
        self._views = views
        self.large: set[int] = set()
        self._sums: dict[int, float] = {}  # of large gradients to which nothing was added since
        self._bad: list[Tensor] = []  # which were left out, if they were looked at

    def begin(self) -> None:
        """A new step begins."""
        self._sums, self._bad = {}, []

    def sum_up(self, large: Collection[int]) -> None:
        """These are summed as they are put in."""
        self.large |= set(large)

    def added(self, index: int, *, complete: bool) -> None:
        """Something was put into a large one's place; ``complete``: that is all of it."""
        if complete:  # a number: a tensor that stays would lie between freed gradients, and break up their memory
            self._sums[index] = _sum(self._views[index])
        else:
            self._sums.pop(index, None)

    def take_over(self, other: FiniteGradients) -> None:
        """What another has found holds for these."""
        self._bad = other._bad

    @property
    def has_left_out(self) -> bool:
        """Whether any bucket had one that is not finite."""
        return bool(self._bad)

    def num_left_out(self) -> Tensor:
        """How many were left out; if any were."""
        return torch.cat(self._bad).sum()

    def leave_out(self, flat: Flat) -> None:
        """Make zeros with weight 0 of gradients that have elements which are not finite.

        On a device all of a bucket are left out if one of them is such. That takes four kernels, without waiting for
        the device; to mask each by itself takes one more for each, and launching them as long as the rest of the merge.
        """
        if flat.gradients.is_cuda:
            if not len(flat.gradients):  # has no norm
                return
            bad = ~(torch.linalg.vector_norm(flat.gradients, math.inf) < math.inf)  # NaN is not less either
            for data in flat.both:
                data.masked_fill_(bad, 0.0)
            self._bad.append(bad.expand(len(flat.parameters)))
            return
        # one pass over what was not summed yet is enough
        summed = all(index in self._sums for index in flat.large)
        sums = [self._sums[index] for index in flat.large] if summed else []
        sums += [_sum(part) for part in (flat.between if summed else (flat.gradients,))]
        if all(map(math.isfinite, sums)):
            return
        views = [self._views[index] for index in flat.parameters]
        bad = torch.stack([~torch.isfinite(view).all() for view in views])
        for view, is_bad in zip(views, bad.unbind(), strict=True):
            view.masked_fill_(is_bad, 0.0)
        flat.tail.view(2, -1).masked_fill_(bad, 0.0)
        self._bad.append(bad)


def _sum(data: Tensor) -> float:
    """Is finite if all elements are and it does not overflow."""
    real = torch.view_as_real(data) if data.is_complex() else data
    return float(real.sum(dtype=torch.float32).item())
