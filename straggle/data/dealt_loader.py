"""`DealtLoader`: a ``DataLoader`` whose samples are dealt out to the ranks by their speed, in place of equally."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from straggle.data.costs import Cost, Costs, costs_of
from straggle.data.epochs import Epochs
from straggle.data.rebalance import Rebalance
from straggle.parallel import StagedDataParallel
from straggle.policies.deadline import check_count

Batch = TypeVar("Batch")
KEPT = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
)


@final
class DealtLoader(Generic[Batch]):
    """The batches of ``loader``, of which a slow rank has fewer samples and a quick one more.

    >>> loader = straggle.DealtLoader(model, DataLoader(dataset, batch_size=32, shuffle=True))
    >>> for epoch in range(loader.epoch, 3):
    ...     for x, y in loader:
    ...         with model.step():
    ...             criterion(model(x), y).backward()

    ``loader`` is what a rank would have under DDP: its ``batch_size`` is that of one rank, and the ranks' batches of a
    step add up to as many samples as with equal ones. Of its sampler only ``shuffle`` and ``seed`` are used: each
    sample comes once in an epoch over all ranks, none twice to make the ranks' numbers equal, and each epoch has an
    order of its own, without ``set_epoch``. Each sample counts the same: a step's weight is set from their number.

    ``num_microbatches``: the batches of a step of one rank. The loop is then given a list of them, of which a slow rank
    has fewer, for ``model.step(num_microbatches=len(batches))``. ``min_share``: samples, or micro-batches, that each
    rank has at least. `Rebalance` finds the shares; `Epochs` deals by them, and repeats what was not brought, for which
    ``repeat_up_to`` is its own.

    ``cost``: what each sample takes, in any unit, such as its tokens: a function of its number, called once for each,
    or one number for each sample; the same on every rank. A step then has the same samples as without it, but each
    rank has its share of their cost, the longest first, so that all end together. With micro-batches, each is of
    samples that are about equally long.

    Raises ``ValueError`` for costs that are not positive and finite, or not as many as samples, and for a loader whose
    samples cannot be dealt: of an ``IterableDataset``, with a sampler of its
    own, or with ``drop_last``.
    """

    def __init__(
        self,
        model: StagedDataParallel,
        loader: DataLoader[Any],
        *,
        num_microbatches: int = 1,
        min_share: int = 1,
        seed: int = 0,
        repeat_up_to: float = 0.0,
        cost: Cost | None = None,
    ) -> None:
        check_count("num_microbatches", num_microbatches, least=1)
        order = order_of(loader, seed)
        assert loader.batch_size is not None
        self._model = model
        self._num_samples = len(loader.dataset)  # type: ignore[arg-type]
        self._samples_per_step = model.world_size * num_microbatches * loader.batch_size
        unit = loader.batch_size if num_microbatches > 1 else 1  # what is dealt, in samples
        self._rebalance = Rebalance(model, total=self._samples_per_step // unit, min_share=min_share)
        self._epochs = Epochs(
            model,
            num_samples=self._num_samples,
            batch_size=unit,
            seed=order.seed,
            shuffle=order.shuffle,
            repeat_up_to=repeat_up_to,
            rebalance=self._rebalance,
            costs=None if cost is None else Costs(costs_of(cost, self._num_samples), unit),
        )
        collate = _Microbatches(loader.collate_fn, unit) if num_microbatches > 1 else loader.collate_fn
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=self._epochs.sampler,
            collate_fn=collate,
            persistent_workers=loader.num_workers > 0,  # it begins again wherever shares change
            **{name: getattr(loader, name) for name in KEPT},
        )

    @property
    def epoch(self) -> int:
        """The number of the running epoch: how many are complete."""
        return self._epochs.number

    @property
    def shares(self) -> tuple[int, ...]:
        """What each rank has in the next step, in samples or micro-batches."""
        return self._rebalance.shares

    def __len__(self) -> int:
        """Steps of an epoch, if no sample has to come again."""
        return -(-self._num_samples // self._samples_per_step)

    def __iter__(self) -> Iterator[Batch]:
        """The rest of the running epoch: all of it, but for a run that was resumed."""
        return self._epochs.batches(self._loader)

    def close(self) -> None:
        """Leave the shares as they are, and deal no more."""
        self._rebalance.close()
        self._epochs.close()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run, or a rank that comes back, needs: equal on all ranks."""
        return {"rebalance": self._rebalance.state_dict(), "epochs": self._epochs.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Raises ``ValueError`` for the state of other data, or of other ranks."""
        self._rebalance.load_state_dict(state["rebalance"])
        self._epochs.load_state_dict(state["epochs"])


@dataclass(frozen=True)
class Order:
    """In which order a loader wants its samples."""

    shuffle: bool
    seed: int


def order_of(loader: DataLoader[Any], seed: int) -> Order:
    """The order that a plain or a distributed sampler stands for. Raises ``ValueError`` for any other loader."""
    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError("an IterableDataset has no numbers that could be dealt out: use model.join(loader)")
    if loader.batch_size is None:
        raise ValueError("this loader has a batch sampler of its own, or none: give it batch_size=, which is dealt out")
    if loader.drop_last:
        raise ValueError(
            "drop_last=True: each sample comes once in an epoch, and a last step with fewer of them has less weight; "
            "leave it out"
        )
    if isinstance(sampler, DistributedSampler):
        return Order(sampler.shuffle, sampler.seed)
    if isinstance(sampler, SequentialSampler) or (isinstance(sampler, RandomSampler) and not sampler.replacement):
        return Order(isinstance(sampler, RandomSampler), seed)
    raise ValueError(
        f"the loader's sampler is a {type(sampler).__name__}, whose order is not known: use shuffle=True or False, or "
        "straggle.Rebalance, whose shares a sampler of your own can deal out"
    )


@final
class _Microbatches:
    """Collates the samples of a step as batches of ``size``; with workers it is sent to them."""

    def __init__(self, collate: Callable[[list[Any]], Any], size: int) -> None:
        self._collate = collate
        self._size = size

    def __call__(self, samples: list[Any]) -> list[Any]:
        return [self._collate(samples[first : first + self._size]) for first in range(0, len(samples), self._size)]
