"""Seconds that an allreduce takes: latency plus bytes over bandwidth, around a ring or up and down a tree."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final


class Network(ABC):
    """How long merging takes."""

    @abstractmethod
    def merge_s(self, ranks: int, share: float) -> float:
        """Seconds of the allreduce of this ``share`` of the gradients."""

    def merging(self, ranks: int, shares: Sequence[float], overhead_s: float = 0.0) -> Merging:
        """A job whose messages have these ``shares`` of the gradients; a step takes ``overhead_s`` beside them."""
        return Merging([self.merge_s(ranks, share) for share in shares], overhead_s)


class Merging:
    """Merges the messages of a step one after another; each takes ``merge_s``."""

    def __init__(self, merge_s: Sequence[float], overhead_s: float) -> None:
        self._merge_s, self._overhead_s = merge_s, overhead_s

    def merge(self, ready_s: Sequence[float]) -> float:
        """The seconds of one step, of whose messages the ranks have submitted the last part at these seconds."""
        seconds = 0.0
        for ready, merge_s in zip(ready_s, self._merge_s, strict=True):
            seconds = max(seconds, ready) + merge_s
        return seconds + self._overhead_s


@final
class Constant(Network):
    """The merge of all gradients takes ``seconds``, whatever the number of ranks."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = at_least_0("seconds", seconds)

    def merge_s(self, ranks: int, share: float) -> float:
        return self.seconds * share if ranks > 1 else 0.0


class _Links(Network):
    """Links of a latency and a bandwidth; ``nbytes``: of all gradients."""

    def __init__(self, nbytes: float, *, bytes_per_s: float, latency_s: float) -> None:
        self.nbytes = at_least_0("nbytes", nbytes)
        self.bytes_per_s = at_least_0("bytes_per_s", bytes_per_s)
        self.latency_s = at_least_0("latency_s", latency_s)
        if bytes_per_s == 0:
            raise ValueError("bytes_per_s=0: nothing would ever arrive")


@final
class Ring(_Links):
    """``2 (N - 1)`` messages one after another, each with an N-th of the bytes."""

    def merge_s(self, ranks: int, share: float) -> float:
        return 2 * (ranks - 1) * (self.latency_s + share * self.nbytes / ranks / self.bytes_per_s)


@final
class Tree(_Links):
    """``log2 N`` messages up and as many down; the bytes are pipelined, so they count once in each direction."""

    def merge_s(self, ranks: int, share: float) -> float:
        if ranks == 1:
            return 0.0
        return 2 * (math.ceil(math.log2(ranks)) * self.latency_s + share * self.nbytes / self.bytes_per_s)


def at_least_0(name: str, value: float) -> float:
    """``value``; raises ``ValueError`` for what is no finite number of at least 0."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}={value}: must be a finite number from 0 on")
    return float(value)
