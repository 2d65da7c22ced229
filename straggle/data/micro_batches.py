"""`MicroBatches`: a step's micro-batches of a data set, of which each rank loads only those that it draws."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final, overload

from torch.utils.data import Dataset, IterableDataset, default_collate


@final
class MicroBatches:
    """Micro-batches of ``size`` samples of a map-style ``dataset``, for ``step.pull``.

    >>> micro_batches = straggle.MicroBatches(dataset, size=8)
    >>> for numbers in batch_sampler:  # the samples of the entire step, the same on every rank
    ...     with model.step() as step:
    ...         for x, y in step.pull(micro_batches.of(numbers)):
    ...             criterion(model(x), y).backward()

    A micro-batch is loaded by a thread while the one before it is computed, and ``collate`` makes it of its samples.
    Raises ``TypeError`` for a data set that has no numbers, and ``ValueError`` for a ``size`` below 1.
    """

    def __init__(
        self, dataset: Dataset[Any], *, size: int, collate: Callable[[list[Any]], Any] = default_collate
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"{type(dataset).__name__} is a stream: ranks cannot draw samples from it by number; use a map-style "
                "dataset, or straggle.Rebalance, which gives slow ranks fewer samples of streams too"
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"size={size!r}: must be an integer of at least 1")
        self._dataset, self._size, self._collate = dataset, size, collate
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="straggle-micro-batches")
        self._finalizer = weakref.finalize(self, self._thread.shutdown, wait=False, cancel_futures=True)

    def of(self, numbers: Iterable[int]) -> StepBatches:
        """A step's micro-batches: its samples by number, in their order. The last one may be smaller."""
        own = list(map(int, numbers))
        split = [own[first : first + self._size] for first in range(0, len(own), self._size)]
        return StepBatches(split, self._load, self._thread)

    def close(self) -> None:
        """End the thread."""
        self._finalizer()

    def _load(self, numbers: list[int]) -> Any:
        return self._collate([self._dataset[number] for number in numbers])


@final
class StepBatches(Sequence[Any]):
    """The micro-batches of one step, each loaded when it is looked up; ``weights`` are their numbers of samples."""

    def __init__(
        self, numbers: list[list[int]], load: Callable[[list[int]], Any], thread: ThreadPoolExecutor | None = None
    ) -> None:
        self._numbers, self._load, self._thread = numbers, load, thread
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
        if self._thread is not None and index not in self._ahead:
            self._ahead[index] = self._thread.submit(self._load, self._numbers[index])
