"""`MicroBatches`: a step's micro-batches of a data set, of which each rank loads only those that it draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from functools import partial
from typing import Any, final, overload

import torch.multiprocessing
from torch.utils.data import Dataset, IterableDataset, default_collate

from straggle import world
from straggle.data.costs import Cost, costs_of
from straggle.policies.deadline import check_count


@final
class MicroBatches:
    """Micro-batches of ``size`` samples of a map-style ``dataset``, for ``step.pull``.

    >>> micro_batches = straggle.MicroBatches(dataset, size=8)
    >>> for numbers in batch_sampler:  # the samples of the entire step, the same on every rank
    ...     with model.step() as step:
    ...         for x, y in step.pull(micro_batches.of(numbers)):
    ...             criterion(model(x), y).backward()

    A micro-batch is loaded by a thread while the one before it is computed, and ``collate`` makes it of its samples.
    With ``num_workers`` as many processes load, as those of a ``DataLoader`` do, and as many of the micro-batches that
    the rank has drawn are loaded ahead. They are forked here, if that is the start method: make this before the
    model is wrapped.
    ``cost``: what each sample takes, as for `DealtLoader`. Micro-batches are then of samples that are about equally
    long, and the longest come first.
    Raises ``TypeError`` for a data set that has no numbers, ``ValueError`` for a ``size`` below 1, ``num_workers``
    below 0, or costs that are not positive.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        size: int,
        collate: Callable[[list[Any]], Any] = default_collate,
        num_workers: int = 0,
        cost: Cost | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"{type(dataset).__name__} is a stream: ranks cannot draw samples from it by number; use a map-style "
                "dataset, or straggle.Rebalance, which gives slow ranks fewer samples of streams too"
            )
        check_count("size", size, least=1)
        check_count("num_workers", num_workers)
        self._size, self._num_workers = size, num_workers
        self._costs = None if cost is None else costs_of(cost, len(dataset)).tolist()  # type: ignore[arg-type]
        self._load: Callable[[list[int]], Any] = _Loader(dataset, collate)
        self._ahead: Executor = world.Executor(1, thread_name_prefix="straggle-micro-batches")
        if num_workers:
            # tensors come back in shared memory, by torch's own context
            self._ahead = ProcessPoolExecutor(
                num_workers, torch.multiprocessing.get_context(), _begin_worker, (self._load,)
            )
            self._ahead.submit(_load_in_worker, []).exception()  # forked now, while there are few threads
            self._load = partial(_wait_for_worker, self._ahead)
        self._finalizer = world.finalize(self, self._ahead.shutdown, wait=False, cancel_futures=True)

    def of(self, numbers: Iterable[int]) -> StepBatches:
        """A step's micro-batches: its samples by number, in their order or by cost. The last one may be smaller."""
        own = list(map(int, numbers))
        of_samples = self._costs
        if of_samples is not None:
            own.sort(key=lambda number: -of_samples[number])
        split = [own[first : first + self._size] for first in range(0, len(own), self._size)]
        costs = None if of_samples is None else [math.fsum(of_samples[number] for number in part) for part in split]
        return StepBatches(split, self._load, self._begin, num_ahead=max(1, self._num_workers), costs=costs)

    def _begin(self, numbers: list[int]) -> Future[Any]:
        return self._ahead.submit(_load_in_worker if self._num_workers else self._load, numbers)

    def close(self) -> None:
        """End the thread, or the workers."""
        self._finalizer()


class _Loader:
    """Makes a micro-batch of its samples."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __call__(self, numbers: list[int]) -> Any:
        return self._collate([self._dataset[number] for number in numbers])


_loader_of_worker: _Loader | None = None  # in a worker's process, which has one data set only


def _begin_worker(loader: _Loader) -> None:
    global _loader_of_worker
    _loader_of_worker = loader
    torch.set_num_threads(1)  # as the workers of a DataLoader do: the ranks need the cores


def _load_in_worker(numbers: list[int]) -> Any:
    assert _loader_of_worker is not None
    return _loader_of_worker(numbers) if numbers else None


def _wait_for_worker(workers: Executor, numbers: list[int]) -> Any:
    return workers.submit(_load_in_worker, numbers).result()


@final
class StepBatches(Sequence[Any]):
    """The micro-batches of one step, each loaded when it is looked up; ``weights`` are their numbers of samples.

    ``costs``: what each takes, if that is known. ``begin``: has one loaded elsewhere. ``num_ahead``: as many are to be,
    of those that a rank has drawn.
    """

    def __init__(
        self,
        numbers: list[list[int]],
        load: Callable[[list[int]], Any],
        begin: Callable[[list[int]], Future[Any]] | None = None,
        *,
        num_ahead: int = 1,
        costs: list[float] | None = None,
    ) -> None:
        self.costs = costs
        self._numbers, self._load, self._begin = numbers, load, begin
        self.num_ahead = num_ahead
        self._ahead: dict[int, Future[Any]] = {}
        self.weights = [float(len(own)) for own in numbers]

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        ahead = self._ahead.pop(index, None)
        return self._load(self._numbers[index]) if ahead is None else ahead.result()

    def prefetch(self, index: int) -> None:
        """Begin to load a micro-batch."""
        if self._begin is not None and index not in self._ahead:
            self._ahead[index] = self._begin(self._numbers[index])
