"""Ranks that have not all as many batches: who has no more takes part with weight 0 until all are done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar, cast

Batch = TypeVar("Batch")


class Joins:
    """How many loops over `StagedDataParallel.join` this process has begun, and how many are over for the job."""

    def __init__(self) -> None:
        self.begun = self.over = 0

    def state_dict(self) -> dict[str, int]:
        """What a rank that comes back must know."""
        return {"over": self.over}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Those that are over for the others are over here."""
        self.over = state["over"]

    def batches(
        self, loader: Iterable[Batch], rank: int, *, set_idle: Callable[[bool], None], all_idle: Callable[[], bool]
    ) -> Iterator[Batch]:
        """The batches of ``loader``, and then its last one until all ranks have no more.

        ``set_idle`` is told whether this rank has none; ``all_idle()`` says whether that was so on all ranks in the
        last step. Raises ``ValueError`` where there is not one batch.
        """
        batch, empty = None, True
        number, self.begun = self.begun, self.begun + 1
        if self.over > number:
            return
        for batch in loader:
            empty = False
            yield batch
            if self.over > number:
                return
        if empty:
            raise ValueError(f"rank {rank}: the loader is empty; give every rank at least one batch")
        set_idle(True)
        try:
            while True:
                yield cast(Batch, batch)
                if all_idle():
                    self.over = number + 1
                if self.over > number:
                    return
        finally:
            set_idle(False)
