"""A merge of one bucket that this process's own threads carry out: it is waited for as a collective is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import cast

import torch.distributed as dist
from torch import Tensor

from straggle.merge.buffers import StageBuffers


class Pending:
    """Over when `end` was called; by any thread."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._problem: str | None = None

    def end(self, problem: str | None = None) -> None:
        """It is over, or it failed."""
        self._problem = problem
        self._over.set()

    def is_completed(self) -> bool:
        """Whether it is over, or failed."""
        return self._over.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for it. Raises ``RuntimeError`` where it failed, and where it is not over in time."""
        if not self._over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("the merge is not over yet")
        if self._problem is not None:
            raise dist.DistNetworkError(self._problem)
        return True


@dataclass
class Bucket:
    """One bucket of one step on its way. ``stages``: the numbers of its stages, ``num_stages``: of the entire plan.

    ``rows``: the telemetry, which goes with the last bucket. ``gives``: this rank gives anything to it beside these.
    ``weights()``: for each of its stages, the weight of what is in it now.
    ``launched`` in the ring, with the parts of the leaves in ``taken``.
    """

    step: int
    number: int
    messages: Sequence[Tensor]
    stages: Sequence[int]
    num_stages: int
    rows: Tensor | None
    gives: bool
    weights: Callable[[], Sequence[float]]
    work: Pending
    launched: list[dist.Work] = field(default_factory=list)
    taken: frozenset[int] = frozenset()

    @property
    def nbytes(self) -> int:
        """Of all its messages."""
        return sum(message.nbytes for message in self.messages)


class StepBuckets:
    """A `Group` for one step: collects the messages of each bucket, and hands them to ``take(bucket)`` together.

    ``stages``: for each bucket the numbers of its stages.
    """

    def __init__(
        self, step: int, buffers: StageBuffers, stages: Sequence[Sequence[int]], take: Callable[[Bucket], None]
    ) -> None:
        self._step, self._buffers, self._stages = step, buffers, stages
        self._take = take
        self._number = 0
        self._messages: list[Tensor] = []
        self._work = Pending()

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        """The next message of the step's next bucket."""
        work, number = self._work, self._number
        self._messages.append(tensor)
        if len(self._messages) == self._buffers.num_messages(number):
            rows = self._buffers.rows if number + 1 == len(self._stages) else None
            num_stages = sum(map(len, self._stages))
            own, gives = self._stages[number], self._buffers.gives(number)
            weights = partial(self._buffers.weights_in, number)
            bucket = Bucket(self._step, number, self._messages, own, num_stages, rows, gives, weights, work)
            self._number, self._messages, self._work = number + 1, [], Pending()
            self._take(bucket)
        return cast("dist.Work", work)

    def all_gather(self, tensors: Sequence[Tensor], tensor: Tensor) -> dist.Work:
        """Not of a step's buckets."""
        raise NotImplementedError

    def broadcast(self, tensor: Tensor, source: int) -> dist.Work:
        """Not of a step's buckets."""
        raise NotImplementedError

    def drop(self) -> None:
        """Nothing is its own."""
