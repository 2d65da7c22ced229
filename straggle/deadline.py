"""When is a rank late: policies that see the telemetry of all ranks and answer in seconds."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final, get_args

import torch
from torch import Tensor

Granularity = Literal["stage", "microbatch"]


@dataclass(frozen=True)
class History:
    """Telemetry of the last ``window`` merged steps, oldest first, equal on every rank.

    ``compute_s`` and ``finished`` have the shape (steps, ranks). Where ``finished`` is false the rank was stopped, and
    its ``compute_s`` is only a lower bound; NaN means that it never entered the step. ``num_steps`` counts all merged
    steps, also those that have left the window.
    """

    num_steps: int
    compute_s: Tensor
    finished: Tensor


class Deadline(ABC):
    """Seconds that a rank may use for a step, counted from entering ``step()``.

    A policy is a function of the history alone, so that every rank comes to the same answer and a resumed run to the
    same one as an uninterrupted run. ``window`` is how many steps of history it wants to see.
    """

    window: int = 1

    @abstractmethod
    def decide(self, history: History) -> float:
        """Seconds for the next step; infinite to wait for everyone."""


@final
class FixedDeadline(Deadline):
    """The same ``budget_s`` seconds for every step after ``warmup_steps``."""

    def __init__(self, budget_s: float, *, warmup_steps: int = 1) -> None:
        if not budget_s > 0:
            raise ValueError(f"budget_s={budget_s}: a deadline needs a positive number of seconds (or deadline=None)")
        _check_count("warmup_steps", warmup_steps)
        self.budget_s = float(budget_s)
        self.warmup_steps = warmup_steps

    def decide(self, history: History) -> float:
        return math.inf if history.num_steps < self.warmup_steps else self.budget_s


@final
class QuantileDeadline(Deadline):
    """``slack`` times the ``q`` quantile of all ranks' compute times over the last ``window`` steps.

    ``q=0.9, slack=1.2`` means: of all ranks and steps, nine in ten would be in time with a fifth to spare. With one
    slow rank among four, a quarter of all times is slow: ``q`` must lie below 0.75 for that rank ever to be late.
    A stopped rank enters with the time at which it was stopped; as ``slack`` is at least 1, a deadline that has become
    too tight for the whole cluster widens by itself.
    """

    def __init__(self, q: float, slack: float = 1.2, *, window: int = 50, warmup_steps: int = 10) -> None:
        if not 0 <= q <= 1:
            raise ValueError(f"q={q}: a quantile lies between 0 and 1, such as 0.5 for the median")
        if not slack >= 1:
            raise ValueError(f"slack={slack}: must be at least 1, or the deadline shrinks from step to step")
        _check_count("window", window, least=1)
        _check_count("warmup_steps", warmup_steps, least=1)
        self.q = q
        self.slack = slack
        self.window = window
        self.warmup_steps = warmup_steps

    def decide(self, history: History) -> float:
        if history.num_steps < self.warmup_steps:
            return math.inf
        return self.slack * _quantile(history.compute_s, self.q)


@final
class WaitForAll(Deadline):
    """No deadline: nobody is ever late, as with DDP."""

    def decide(self, history: History) -> float:  # noqa: ARG002
        return math.inf


class HistoryWindow:
    """The steps that a policy sees: each row is written twice, so that the window always lies in one piece."""

    def __init__(self, window: int, world_size: int) -> None:
        self._window = window
        # plain memory below the tensors: a write costs a tenth of a tensor's
        self._seconds = array("d", [math.nan]) * (2 * window * world_size)
        self._flags = bytearray(2 * window * world_size)
        self._compute_s = torch.frombuffer(self._seconds, dtype=torch.float64).view(2 * window, world_size)
        self._finished = torch.frombuffer(self._flags, dtype=torch.bool).view(2 * window, world_size)
        self._num_steps = 0

    def append(self, compute_s: Sequence[float], finished: Sequence[bool]) -> History:
        """Add a merged step, a number for each rank; the history as it is now."""
        ranks, slot = len(compute_s), self._num_steps % self._window
        for row in (slot, slot + self._window):
            self._seconds[row * ranks : (row + 1) * ranks] = array("d", compute_s)
            self._flags[row * ranks : (row + 1) * ranks] = bytes(finished)
        self._num_steps += 1
        return self.read()

    def read(self) -> History:
        """The history as it is now; its tensors are views."""
        end = (self._num_steps - 1) % self._window + self._window + 1
        rows = slice(end - min(self._num_steps, self._window), end)
        return History(self._num_steps, self._compute_s[rows], self._finished[rows])

    def restore(self, history: History) -> None:
        """Go on from a history that was saved."""
        self._num_steps = history.num_steps - len(history.compute_s)
        for compute_s, finished in zip(history.compute_s.tolist(), history.finished.tolist(), strict=True):
            self.append(compute_s, finished)


@dataclass(frozen=True)
class Patience:
    """How a late rank is treated.

    Nobody is late before ``quorum`` ranks have finished the step (default: half of them, at least one). A late rank
    that does not hand in its gradients within another ``grace_s`` seconds is spoken for by its stand-in. Up to
    ``max_lag`` merged steps wait for a rank that is stuck, each one copy of the gradients in memory; beyond that the
    peers wait. A collective that does not end within ``give_up_s`` seconds ends the job.

    ``granularity`` is what a late rank drops: the stages that it has not finished ("stage"), or the micro-batches that
    it has not begun ("microbatch", as DropCompute does; ``grace_s`` should then be a micro-batch's time, because a rank
    that is spoken for hands in what it has of the running one).
    """

    quorum: int | None = None
    grace_s: float = 0.05
    max_lag: int = 8
    give_up_s: float = 300.0
    granularity: Granularity = "stage"

    def __post_init__(self) -> None:
        if self.quorum is not None:
            _check_count("quorum", self.quorum, least=1)
        _check_count("max_lag", self.max_lag)
        if not self.grace_s >= 0:
            raise ValueError(f"grace_s={self.grace_s}: seconds cannot be negative")
        if not 1 <= self.give_up_s < math.inf:
            raise ValueError(f"give_up_s={self.give_up_s}: must be a finite number of seconds, at least 1")
        check_granularity(self.granularity)

    def quorum_of(self, world_size: int) -> int:
        """Ranks that must have finished; raises ``ValueError`` where there are not that many others."""
        if self.quorum is not None and self.quorum > world_size:
            raise ValueError(f"quorum={self.quorum}: there are only {world_size} ranks")
        return self.quorum or max(1, world_size // 2)


def as_deadline(deadline: Deadline | float | None) -> Deadline:
    """A policy from what users write: a policy, a number of seconds, or ``None`` to wait for everyone."""
    if deadline is None:
        return WaitForAll()
    if isinstance(deadline, Deadline):
        return deadline
    if isinstance(deadline, (int, float)) and not isinstance(deadline, bool):
        return FixedDeadline(float(deadline))
    raise TypeError(f"deadline={deadline!r}: give a straggle.Deadline, a number of seconds, or None")


def check_granularity(granularity: str) -> None:
    """Raise ``ValueError`` for what is no `Granularity`."""
    if granularity not in get_args(Granularity):
        raise ValueError(f"granularity={granularity!r}: choose one of {', '.join(get_args(Granularity))}")


def _quantile(values: Tensor, q: float) -> float:
    """The ``q`` quantile of what is not NaN, between two values by their distance; infinite where there is nothing.

    As ``torch.nanquantile``, in a quarter of its time: every step of every rank waits for this.
    """
    ordered: list[float] = values.flatten().sort().values.tolist()  # NaN comes last
    while ordered and math.isnan(ordered[-1]):
        ordered.pop()
    if not ordered:
        return math.inf
    whole, part = divmod(q * (len(ordered) - 1), 1)
    below, above = ordered[int(whole)], ordered[min(int(whole) + 1, len(ordered) - 1)]
    return below + part * (above - below)


def _check_count(name: str, value: int, least: int = 0) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value}: must be a whole number of at least {least}")
