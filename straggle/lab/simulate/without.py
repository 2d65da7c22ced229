"""What simulated steps take without ranks that are always slow, whose samples the others have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SLOW = 1.1  # times the median rank's work, from which on a rank is slow
_ALWAYS = 0.5  # of the steps, from which on it is so always
_EACH = 3  # so many slow ranks have a row each


@dataclass(frozen=True)
class Without:
    """The mean step of the others, ``step_s``, if all of them are waited for, and that of all ranks, ``all_s``.

    All samples are computed, so gradients per second go with the steps per second.
    """

    ranks: tuple[int, ...]
    step_s: float
    all_s: float

    @property
    def speedup(self) -> float:
        """Gradients per second, over those when all ranks are waited for."""
        return self.all_s / self.step_s


def always_slow(whole_s: Tensor) -> list[int]:
    """Ranks that take longer than the median rank in most steps; ``whole_s``, (steps, ranks): their own work."""
    slow = whole_s >= _SLOW * whole_s.median(1, keepdim=True).values
    found: list[int] = (slow.float().mean(0) >= _ALWAYS).nonzero().flatten().tolist()
    return found


def without_slow(whole_s: Tensor, all_s: Tensor) -> list[Without]:
    """Without each of them, if they are few, and without all; ``all_s``, (steps,): what waiting for all ranks takes."""
    if whole_s.shape[1] < 2:
        return []
    return [_without(ranks, whole_s.double(), all_s) for ranks in _sets(always_slow(whole_s), whole_s.shape[1])]


def _sets(slow: Sequence[int], num_ranks: int) -> Iterator[tuple[int, ...]]:
    if len(slow) <= _EACH:
        yield from ((rank,) for rank in slow)
    if 1 < len(slow) < num_ranks:
        yield tuple(slow)


def _without(ranks: tuple[int, ...], whole_s: Tensor, all_s: Tensor) -> Without:
    """With ``n`` of ``N`` ranks left, their work takes these ``N / n`` times as long."""
    kept = torch.ones(whole_s.shape[1], dtype=torch.bool)
    kept[list(ranks)] = False
    slowest_s = whole_s[:, kept].amax(1) * (len(kept) / int(kept.sum()))
    step_s = slowest_s + (all_s - whole_s.amax(1)).clamp(min=0.0)
    return Without(ranks, float(step_s.mean()), float(all_s.mean()))
