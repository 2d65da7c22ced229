"""`Epochs`: a data set dealt to the ranks that are there, so that an absent rank's samples are not lost."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, final

from torch import Tensor
from torch.utils.data import Sampler

from straggle.data.costs import Costs
from straggle.data.deal import Ledger, parts_of
from straggle.data.rebalance import Rebalance
from straggle.merge.rows.step_record import StepRecord
from straggle.parallel import StagedDataParallel
from straggle.policies.deadline import check_count

_MAX_UNUSED = 10  # times that a batch comes again because the loop made no step with it
_MAX_REPEATS = 3  # so that an epoch ends although a rank is always stuck

Batch = TypeVar("Batch")


@final
class Epochs:
    """Epochs of ``num_samples`` samples, of which each rank has ``batch_size`` in a step.

    >>> epochs = straggle.Epochs(model, num_samples=len(dataset), batch_size=32)
    >>> loader = DataLoader(dataset, batch_sampler=epochs.sampler)
    >>> model.register_state(optimizer=optimizer, epochs=epochs)
    >>> while epochs.number < 3:
    ...     for x, y in epochs.batches(loader):
    ...         with model.step():
    ...             criterion(model(x), y).backward()

    A step's weight is the number of the rank's samples over ``batch_size``, if the loop does not set it.
    What a rank was to bring and did not is dealt again at the end of the epoch, to the ranks that are then there: what
    it had while it was absent, and what it had in a step to which it gave at most the share ``repeat_up_to`` of its
    gradient (0: only if all of it is missing). A sample of a rank that is there is dealt at most three times again.
    A rank that loads slowly and misses steps loads nothing for these: its batch comes again until it is in time for a
    step, and the batches that it has not come to at the end of the deal are dealt again.
    When ranks leave or come back, what is left of the epoch is dealt again, and the loader begins again.
    With ``rebalance`` a rank has ``batch_size`` times its share: 1 if the shares are samples; with ``costs``, that
    share of what the step's samples cost.

    All ranks deal alike, from the telemetry of the merged steps, without a message. There is one step for each batch.
    Steps at the end of an epoch may have fewer samples, and some ranks none: they take part with weight 0.

    Raises ``ValueError`` for numbers that make no sense.
    """

    def __init__(
        self,
        model: StagedDataParallel,
        *,
        num_samples: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        repeat_up_to: float = 0.0,
        rebalance: Rebalance | None = None,
        costs: Costs | None = None,
    ) -> None:
        check_count("num_samples", num_samples, least=1)
        check_count("batch_size", batch_size, least=1)
        if not 0 <= repeat_up_to <= 1:
            raise ValueError(f"repeat_up_to={repeat_up_to}: must be a share of the gradient, from 0 to 1")
        self._model: Any = weakref.proxy(model)  # which holds this one by its hook
        self._batch_size = batch_size
        self._repeat_up_to = repeat_up_to
        self._rebalance = rebalance
        if rebalance is not None:
            rebalance.weighed_by_loader()
        self._ledger = Ledger(
            num_samples,
            batch_size=batch_size,
            world_size=model.world_size,
            seed=seed,
            shuffle=shuffle,
            max_repeats=_MAX_REPEATS,
            shares=self._shares(),
            costs=costs,
        )
        if rebalance is not None and costs is not None:
            rebalance.follow_work(self._ledger.work)
        self._in_hand: tuple[int, int, int] | None = None  # where the batch is from that the loop has
        self._num_made = 0  # steps with it
        self._behind = False  # this rank does not know what its peers have brought
        self._probed = False  # the loop has timed a step of its own: another batch, whose loading is timed as well
        self._num_loads = 0
        self.sampler: Sampler[list[int]] = _OwnBatches(self)
        self._hook = model.register_step_hook(self._merged)

    @property
    def number(self) -> int:
        """Epochs that are complete: the number of the running one."""
        return self._ledger.epoch

    @property
    def num_lost(self) -> int:
        """Samples that were given up, because the ranks that had them were there and brought nothing too often."""
        return self._ledger.num_lost

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The running epoch's batches of a ``DataLoader`` that has ``sampler`` as its ``batch_sampler``.

        A batch with which the loop makes no step comes again, ten times at most.
        Raises ``RuntimeError`` then, and for more than one step with a batch.
        """
        epoch = self.number
        self._model.loader_begins()
        try:
            while self.number == epoch:
                yield from self._of_one_deal(loader)
        finally:
            self._model.dealt(idle=False, weight=1.0)
            self._model.loader_is_over()

    def draw(self) -> Tensor:
        """For loops without a loader: this rank's sample numbers in the next step, at least one.

        A rank that has none is given one that does not count: ``model.idle`` is set for that step.
        """
        self._take()
        own = self._ledger.of(self._model.rank)
        return own if len(own) else self._ledger.deal.samples[:1]

    def close(self) -> None:
        """Deal no more."""
        self._hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """What a rank that comes back, or a resumed run, needs: equal on all ranks."""
        return self._ledger.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, also in the middle of a loop. Raises ``ValueError`` for the state of other data."""
        self._ledger.load_state_dict(state, self._shares())
        self._behind = False
        if self._in_hand != self._place:
            self._num_loads += 1  # the loader is to begin again
            self._model.dealt(idle=self._in_hand is not None)  # the loop holds a batch of another step

    def _shares(self) -> list[int] | None:
        """In samples; ``None``: equal ones."""
        if self._rebalance is None:
            return None
        return [self._batch_size * share for share in self._rebalance.shares]

    @property
    def _place(self) -> tuple[int, int, int]:
        return self._ledger.place(self._model.rank)

    def _of_one_deal(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Batches until what is left is dealt again, or the epoch is over."""
        ledger, loads = self._ledger, self._num_loads
        deal = ledger.position[:2]
        for batch in loader:
            self._take()
            yield batch
            num_unused = 0
            # it was not used, as if the loop caught an error; or it came too late for a step
            while not self._probed and (self._behind or not self._num_made or self._in_hand == self._place):
                num_unused = 0 if self._num_made else num_unused + 1
                if num_unused > _MAX_UNUSED:
                    raise RuntimeError(
                        f"rank {self._model.rank}: {num_unused} times the same batch, and no step with it; the other "
                        "ranks wait for that: leave a batch out inside of `with model.step():`, where a step without "
                        "a backward pass counts as skipped; or, if the model was wrapped again, make the loader again "
                        "with the new one"
                    )
                self._num_made = 0
                yield batch
            if self._num_made > 1:
                raise RuntimeError(f"{self._num_made} steps with one batch: Epochs needs one step for each")
            if ledger.position[:2] != deal or self._num_loads != loads:
                return

    def _take(self) -> None:
        self._in_hand, self._num_made, self._probed = self._place, 0, False
        count = len(self._ledger.of(self._model.rank))
        # each sample counts the same
        self._model.dealt(idle=not self._behind and not count, weight=(count or 1) / self._batch_size)

    def _merged(self, record: StepRecord) -> None:
        """After each step."""
        self._num_made, self._probed = self._num_made + 1, record.table.probed
        parts = parts_of(record, self._repeat_up_to)
        if len(parts.absent) == self._model.world_size:  # all of them for one that is no member itself
            self._behind = True
        else:
            self._ledger.merged(parts, self._shares())


class _OwnBatches(Sampler[list[int]]):
    """The batches that a rank has in the rest of the current deal."""

    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs

    def __len__(self) -> int:
        return self._epochs._ledger.deal.num_steps - self._epochs._place[2]

    def __iter__(self) -> Iterator[list[int]]:
        """Of a step in which the rank has no samples it gives one that does not count."""
        ledger, rank = self._epochs._ledger, self._epochs._model.rank
        deal = ledger.deal  # which stays as it is, however far ahead a loader fetches
        for step in range(self._epochs._place[2], deal.num_steps):
            own = deal.of(step, rank)
            yield (own if len(own) else deal.samples[:1]).tolist()
