"""`LateLoader`: a loader of which a late rank loads nothing for the steps that it has missed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sized
from typing import Generic, TypeVar, cast, final

from straggle.merge.rows.step_record import StepRecord
from straggle.parallel import StagedDataParallel
from straggle.policies.deadline import check_count

Batch = TypeVar("Batch")


@final
class LateLoader(Generic[Batch]):
    """The batches of ``loader``, of which one that comes too late for its step is this rank's batch of a later one.

    >>> for x, y in straggle.LateLoader(model, loader):
    ...     with model.step():
    ...         criterion(model(x), y).backward()

    Under a deadline the peers of a rank that loads slowly go on without it. A plain loader has it load a batch for each
    step that it missed, so it takes part in none, and its peers wait for it after ``LateHandling.max_lag`` steps. This
    one gives it the same batch again, whose blocks end at once, until it is in time for a step.

    All ranks make as many steps as ``loader`` has batches, or ``num_steps``. ``num_left``: the batches of the last
    iteration with which this rank was in no step, because it missed as many; `Epochs` and `DealtLoader`, which
    need no `LateLoader`, deal them to all ranks. Put what fetches ahead inside of it: ``LateLoader(model, ahead)``.

    Raises ``ValueError`` for a loader without a length if ``num_steps`` is not given.
    """

    def __init__(self, model: StagedDataParallel, loader: Iterable[Batch], *, num_steps: int | None = None) -> None:
        if num_steps is not None:
            check_count("num_steps", num_steps)
        self._model, self._loader, self._num_steps = model, loader, num_steps
        try:
            len(self)
        except TypeError:
            raise ValueError(
                f"this {type(loader).__name__} has no length, and a late rank must end with the others: give num_steps="
            ) from None
        self._in_hand: list[Batch] = []  # that the loop has taken since the last step
        self._again: deque[Batch] = deque()  # of steps that were missed
        self.num_left = 0

    def __len__(self) -> int:
        """The batches of an iteration, those that come again included."""
        return len(cast(Sized, self._loader)) if self._num_steps is None else self._num_steps

    def __iter__(self) -> Iterator[Batch]:
        """``len(self)`` batches, or fewer if the loader has fewer."""
        hook = self._model.register_step_hook(self._merged)
        self._in_hand, self._again, self.num_left = [], deque(), 0
        batches = iter(self._loader)
        self._model.loader_begins()
        try:
            for _ in range(len(self)):
                if self._again:
                    batch = self._again.popleft()
                    self.num_left += 1
                elif (batch := next(batches, cast(Batch, self))) is self:
                    return
                self._in_hand.append(batch)
                yield batch
            self.num_left += len(self._again)  # one that it had in hand in the last step, and that came too late for it
        finally:
            self._model.loader_is_over()
            hook.remove()

    def _merged(self, record: StepRecord) -> None:
        """After each step: a step in which all ranks have done their work costs one look."""
        table = record.table
        if not table.is_usual and not table.probed and self._model.rank in table.missed_ranks() | table.absent_ranks():
            self._again.extendleft(reversed(self._in_hand))
        elif not self._in_hand:  # another step with the same batch
            self._again.clear()
        self._in_hand = []
