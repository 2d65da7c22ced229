"""A sampler for data-parallel training that brings dropped samples again before the epoch ends."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import TypeVar, final

import torch
from torch.utils.data import Sampler

Batch = TypeVar("Batch")


@final
class RequeueSampler(Sampler[int]):
    """This rank's share of ``num_samples`` sample numbers, and after it those that were put back by `requeue`.

    Like ``torch.utils.data.DistributedSampler`` it shuffles alike on all ranks, again with each `set_epoch`, and gives
    rank ``r`` every ``world_size``-th number; unlike that one it does not repeat samples to make the shares equal. A
    sample comes at most ``max_requeues`` times again in an epoch, so that an epoch ends although a rank is always late.
    `Epochs` gives what a rank could not bring to the other ranks.

    >>> for samples, x, y in model.join(sampler.epoch(loader)):
    ...     with model.step():
    ...         criterion(model(x), y).backward()
    ...     own = model.last_report.ranks[rank]
    ...     if own.late or own.absent:
    ...         sampler.requeue(samples)

    Raises ``ValueError`` for a rank outside of ``world_size`` and fewer samples than ranks.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        rank: int,
        world_size: int,
        seed: int = 0,
        shuffle: bool = True,
        max_requeues: int = 3,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}: there are {world_size} ranks, from 0 on")
        if num_samples < world_size:
            raise ValueError(f"num_samples={num_samples}: {world_size} ranks need at least one each")
        if max_requeues < 0:
            raise ValueError(f"max_requeues={max_requeues}: cannot be negative")
        self._num_samples = num_samples
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._shuffle = shuffle
        self._max_requeues = max_requeues
        self._epoch = 0
        self._queue: deque[int] = deque()
        self._own_share_is_over = False
        self._times: Counter[int] = Counter()
        self.num_lost = 0  # samples that were put back too often in this epoch

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as in this epoch, on all ranks alike; before its loop."""
        self._epoch = epoch

    def requeue(self, samples: Iterable[int]) -> None:
        """Bring these samples again, because the step that they were in did not come to its end."""
        for sample in map(int, samples):
            if self._times[sample] < self._max_requeues:
                self._times[sample] += 1
                self._queue.append(sample)
            else:
                self.num_lost += 1

    def epoch(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of a ``DataLoader`` that uses this sampler, until nothing is left of what was put back.

        A loader by itself would end with the last batch, before that could be put back, and its workers fetch ahead.
        """
        return _Epoch(self._epoch_of(loader))

    def _epoch_of(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        try:
            yield from loader
            self._own_share_is_over = True
            while self._queue:
                yield from loader
        finally:
            self._own_share_is_over = False

    def __len__(self) -> int:
        """Samples of this rank's own share, without those that come again."""
        return len(range(self._rank, self._num_samples, self._world_size))

    def __iter__(self) -> Iterator[int]:
        if not self._own_share_is_over:
            yield from self._share()
        while self._queue:
            yield self._queue.popleft()

    def _share(self) -> Iterator[int]:
        self._times.clear()
        self.num_lost = 0
        order = torch.arange(self._num_samples)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._num_samples, generator=generator)
        yield from order[self._rank :: self._world_size].tolist()


class _Epoch(Iterator[Batch]):
    """The batches of an epoch whose end depends on the steps that are made with them."""

    waits_for_step = True  # for `join`, which does not fetch the next batch before that step is over

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches

    def __next__(self) -> Batch:
        return next(self._batches)
