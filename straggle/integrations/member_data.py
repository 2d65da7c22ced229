"""What the loops of frameworks share if ranks may leave and come back: `MemberLoader`, and which ranks are `There`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from straggle.data.dealt_loader import KEPT, order_of
from straggle.data.epochs import Epochs
from straggle.merge.wire.groups import job_size
from straggle.parallel import StagedDataParallel
from straggle.report import StepReport


class There:
    """Which ranks make the others' steps: the lowest of them is the main process.

    A rank that was absent is there again when it has made a step itself, and was not stood in for: until then its loop
    is in a step that the others have left. All ranks know the same, and one that comes back is given it.
    """

    def __init__(self) -> None:
        self._away: set[int] = set()

    def merged(self, report: StepReport) -> list[int]:
        """Those that are there after this step, after each; none on a rank that is out, and knows of no rank."""
        came = {rank.rank for rank in report.ranks if not rank.absent and not rank.stood_in}
        self._away = (self._away | {rank.rank for rank in report.ranks if rank.absent}) - came
        return [rank.rank for rank in report.ranks if rank.rank not in self._away]

    def state_dict(self) -> dict[str, list[int]]:
        """For a rank that comes back."""
        return {"away": sorted(self._away)}

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        """That of the others."""
        self._away = set(state["away"])


class MemberLoader:
    """A training loader that deals each sample once an epoch to the ranks that are there, from `begin` on.

    ``loader`` is what one process would have; its ``batch_size`` is that of one rank. Each iteration is an epoch, as
    the loop counts them from 0: one that was complete before this process came to the job, or before its checkpoint,
    has no batches. ``place(batch)`` is called with each batch, to move it to the device.

    ``endless``: the loop counts steps, and takes as many as it wants in each iteration; an epoch of the data takes more
    of them if a rank is away. ``catches_up``: the loop is in an epoch that was complete before.
    Raises ``ValueError`` for a loader whose samples cannot be dealt.
    """

    def __init__(
        self, loader: DataLoader[Any], *, seed: int = 0, place: Callable[[Any], Any], endless: bool = False
    ) -> None:
        self._given, self._order, self._place, self._endless = loader, order_of(loader, seed), place, endless
        assert loader.batch_size is not None
        self._per_step = job_size() * loader.batch_size  # if all ranks are there
        self._num_begun = 0  # iterations
        self.catches_up = False
        self.epochs: Epochs | None = None
        self._loader: DataLoader[Any] | None = None

    def begin(self, model: StagedDataParallel) -> None:
        """Deal to the ranks of this model."""
        given, dataset = self._given, self._given.dataset
        assert given.batch_size is not None
        self.epochs = epochs = Epochs(
            model,
            num_samples=len(dataset),  # type: ignore[arg-type]
            batch_size=given.batch_size,
            seed=self._order.seed,
            shuffle=self._order.shuffle,
        )
        self._loader = DataLoader(
            dataset,
            batch_sampler=epochs.sampler,
            collate_fn=given.collate_fn,
            persistent_workers=given.num_workers > 0,
            **{name: getattr(given, name) for name in KEPT},
        )

    @property
    def dataset(self) -> Any:
        """That of the loader."""
        return self._given.dataset

    def __len__(self) -> int:
        """Steps of an epoch, if all ranks are there."""
        return -(-len(self.dataset) // self._per_step)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the running epoch, or nothing."""
        epochs, loader = self._dealt()
        while self._endless:
            yield from map(self._place, epochs.batches(loader))
        number, self._num_begun = self._num_begun, self._num_begun + 1
        self.catches_up = number < epochs.number
        if not self.catches_up:
            yield from map(self._place, epochs.batches(loader))

    def running(self) -> Iterator[Any]:
        """The rest of the running epoch, for a loop that begins in it."""
        epochs, loader = self._dealt()
        return map(self._place, epochs.batches(loader))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run, or a rank that comes back, needs; also one of another number of ranks."""
        return self._dealt()[0].state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Raises ``ValueError`` for the state of other data."""
        self._dealt()[0].load_state_dict(state)

    def _dealt(self) -> tuple[Epochs, DataLoader[Any]]:
        if self.epochs is None or self._loader is None:
            raise RuntimeError("this loader was prepared without the model: give both to one call of prepare()")
        return self.epochs, self._loader
