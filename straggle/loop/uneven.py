"""Ranks that have not all as many batches: who has no more takes part with weight 0 until all are done.

A rank fetches one batch ahead, so that it knows which one is its last, and says so in that batch's step. The ranks of a
replica run their passes together, so they must have as many; they compare that with each merged step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

from straggle.merge.late.sides import TrainingSide
from straggle.merge.round.round import Round

Batch = TypeVar("Batch")
_END = object()


class Joins:
    """The loops over `StagedDataParallel.join` that this process has begun, and how many are over for the job.

    A batch that a loop takes between two steps is of the next one, and one that it takes in a step is of that.
    ``ranks``: those of this rank's replica, if they are several: `tell` and `told` are called with each merged step.
    """

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        self.begun = self.over = 0
        self._ranks = ranks
        self._had = 0  # own batches of the loop that was begun last
        self._of_replica: Sequence[Sequence[float]] = ()  # what its ranks told with the last merged step
        self._runs = False
        self._step = -1  # for which batches were taken last,
        self._num_own = self._num_taken = 0  # how many of these are this rank's, and how many were taken
        self._had_own = True  # the last one was

    def state_dict(self) -> dict[str, int]:
        """What a rank that comes back must know."""
        return {"over": self.over}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Those that are over for the others are over here."""
        self.over = state["over"]

    def batches(
        self, loader: Iterable[Batch], training: TrainingSide, rank: int, out_of_data: Callable[[], None]
    ) -> Iterator[Batch]:
        """The batches of ``loader``, and then its last one until no rank has more.

        ``out_of_data()`` is called if that is taken in an open step. Raises ``ValueError`` if there is not one batch.
        """
        # counted before the first batch: ranks match their loops by this number
        number, self.begun, self._had = self.begun, self.begun + 1, 0
        training.no_data_for(self.begun)
        if self.over > number:
            return
        source, batch = iter(loader), None
        if (following := next(source, _END)) is _END:
            raise ValueError(f"rank {rank}: the loader is empty; give every rank at least one batch")
        # before the first batch: a step that begins in between asks for its share
        self._runs = True
        training.no_data_for(number)
        try:
            while self.over <= number:
                own = following is not _END
                if own:
                    batch, following = following, next(source, _END)
                # said with the last batch, not after it: peers must know in that step that this rank has no more
                if following is _END:
                    training.no_data_for(number + 1)
                self._take(training.step, own=own)
                if not own and training.entered_at is not None:
                    out_of_data()
                yield cast(Batch, batch)
        finally:
            if self.begun == number + 1:  # one that a loop has left open may be closed in the next one
                self._runs = False
                training.no_data_for(number + 1)

    def _take(self, step: int, *, own: bool) -> None:
        if step != self._step:
            self._step, self._num_own, self._num_taken = step, 0, 0
        self._num_own += own
        self._num_taken += 1
        self._had += own
        self._had_own = own

    def share_of(self, step: int) -> float:
        """Which share of the batches that were taken for this step is this rank's own; 0: it has no data for it."""
        if not self._runs or step != self._step:
            return float(self._had_own or not self._runs)
        return self._num_own / self._num_taken

    def merged(self, current: Round) -> None:
        """A step is merged, in which all ranks may have said that they have no more.

        Raises ``ValueError``, on all ranks of a replica, if they have not as many batches.
        """
        if self._ranks:
            self._check_replica()
        if self._runs:
            self.over = max(self.over, self._over(current))

    # -- in a replica of several ranks

    def tell(self, current: Round, joins_over: int) -> Sequence[float]:
        """What this rank tells those of its replica: loops that are over by its merge, and where its own loop is.

        ``joins_over``: the loops for which it has no more data.
        """
        return float(current.table.joins_over()), float(self.begun), float(self._had), float(joins_over)

    def told(self, of_replica: Sequence[Sequence[float]]) -> None:
        """What all of its ranks have told."""
        self._of_replica = of_replica

    def _over(self, current: Round) -> int:
        """If a rank was stood in for in the merge of one shard, and not of another, their rows need not be the same."""
        of_all = self._of_replica
        return int(min(over for over, *_ in of_all)) if of_all else current.table.joins_over()

    def _check_replica(self) -> None:
        loops = [tuple(map(int, own)) for _, *own in self._of_replica]
        if len(set(loops)) <= 1:
            return
        said = (
            f"rank {rank} has had {had} in loop {begun}{' and has no more' * (over >= begun)}"
            for rank, (begun, had, over) in zip(self._ranks, loops, strict=True)
        )
        raise ValueError(
            f"model.join(loader): ranks {[*self._ranks]} shard one copy of the model, run their passes together, and "
            f"have not as many batches: {', '.join(said)}. Give all ranks of a replica the same number, such as by "
            "DistributedSampler(drop_last=True) over them; replicas may have different numbers"
        )


def own_passes(num_microbatches: int, share: float) -> int:
    """For how many of a step's backward passes a rank has data that has this share of the step's batches."""
    return max(1, round(share * num_microbatches)) if share else 0
