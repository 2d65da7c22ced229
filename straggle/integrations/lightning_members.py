"""What a `StagedStrategy` does for ranks that leave and come back."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from torch.utils.data import DataLoader

from straggle.integrations.member_data import MemberLoader, There
from straggle.merge.rows.step_record import StepRecord
from straggle.merge.wire.store import default_store
from straggle.parallel import StagedDataParallel

_PREPARED = "straggle/prepare_data/{what}/{node}"
_WORDS = {"limit_train_batches": 1.0, "overfit_batches": 0.0, "reload_dataloaders_every_n_epochs": 0}
_PREPARES = timedelta(days=1)
_BY_ITSELF = {
    *("Timer", "GradientAccumulationScheduler", "LearningRateFinder", "BatchSizeFinder"),
    *("StochasticWeightAveraging", "WeightAveraging", "BackboneFinetuning"),
}


class LightningMembers:
    """The members of a fit: its data follow them, and the place in it goes to a process that comes late.

    One of them is the main process: the lowest that is in the others' steps, and before the first one rank 0.
    Raises ``ValueError`` for what would count batches or decide on one rank alone.
    """

    def __init__(self, trainer: Any, set_main: Callable[[bool], None]) -> None:
        check_trainer(trainer)
        self._trainer, self._set_main = trainer, set_main
        self._model: StagedDataParallel | None = None
        self._data: _RunningEpoch | None = None
        self._loaded: Mapping[str, Any] | None = None  # of the data, from a checkpoint
        self._num_before: int | None = None  # batches of this epoch that others had before this process came
        self._there = There()
        self.is_main = self._comes_late = False
        set_main(False)  # whether this process comes late is known when the model is wrapped
        trainer._accelerator_connector.use_distributed_sampler = False

    def prepare_data(self) -> None:
        """Lightning's ``prepare_data``, after which all wait in the store: a process that comes late finds it done."""
        trainer, store = self._trainer, default_store()
        own = trainer.strategy.node_rank
        what = "/".join(type(holder).__qualname__ for holder in (trainer.lightning_module, trainer.datamodule))
        prepared = [_PREPARED.format(what=what, node=node) for node in dict.fromkeys((own, 0))]
        if trainer.local_rank == 0 and not store.check(prepared[:1]):
            with _without_barriers():
                type(trainer._data_connector).prepare_data(trainer._data_connector)
            store.set(prepared[0], "")
        store.wait(prepared, _PREPARES)

    def before_wrapping(self) -> None:
        """Loggers choose their folders before the main process makes its own."""
        for logger in self._trainer.loggers:
            _ = logger.version

    def wrapped(self, model: StagedDataParallel, loaded: Mapping[str, Any] | None) -> None:
        """The model is there; ``loaded`` is the state of the data in a checkpoint."""
        for metric in self._trainer.lightning_module.modules():
            if hasattr(metric, "distributed_available_fn"):  # of torchmetrics
                metric.distributed_available_fn = _alone  # each rank evaluates all of the data
        self._model, self._loaded, self._comes_late = model, loaded, model.comes_late
        if model.rank == 0 and not model.comes_late:
            self._become(main=True)
            if (bar := self._trainer.progress_bar_callback) is not None:
                bar.enable()  # Lightning has put it off where no process was the main one yet

    def process_dataloader(self, loader: object) -> object:
        """That which is trained on has its samples dealt; others have all of their data on each rank."""
        if not self._trainer.training:
            return loader
        if not isinstance(loader, DataLoader) or self._data is not None:
            raise ValueError("members=: samples are dealt from one torch DataLoader: train_dataloader() gives one")
        self._data = _RunningEpoch(loader, self._trainer.fit_loop, self._begins_epoch)
        return self._data

    def begin(self) -> None:
        """The fit begins: deal the data and, in a process that comes late, go on where the others are."""
        trainer, model, data = self._trainer, self._model, self._data
        assert model is not None
        if data is None:
            raise ValueError("members=: there is no train_dataloader whose samples could be dealt")
        data.begin(model)
        if self._loaded is not None:
            data.dealt.load_state_dict(self._loaded)
        loop = trainer.fit_loop
        # how many batches an epoch has depends on who is there; none is fetched before a step is merged
        loop.max_batches, loop._combined_loader.limits, loop._data_fetcher.prefetch_batches = math.inf, [math.inf], 0
        if trainer.val_check_interval == 1.0:
            trainer.val_check_batch = math.inf
        iter(loop._data_fetcher)
        model.register_step_hook(self._merged)
        named = {f"optimizer{number}": own for number, own in enumerate(trainer.strategy.optimizers)}
        named |= {f"scheduler{number}": own.scheduler for number, own in enumerate(trainer.lr_scheduler_configs)}
        model.register_state(**named, loader=data.dealt, fit=self)

    def _merged(self, record: StepRecord) -> None:
        model, data = self._model, self._data
        assert model is not None
        assert data is not None
        self._become(main=model.rank == min(self._there.merged(record.report), default=-1))
        self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = data.is_over

    def _become(self, *, main: bool) -> None:
        if main and not self.is_main and self._model is not None and self._model.last_report is not None:
            for logger in self._trainer.loggers:
                if type(logger).__name__ == "CSVLogger" and logger._experiment is None:
                    logger._version = logger._get_next_version()  # it would delete the file of another process
        self.is_main = main
        self._set_main(main)

    def _begins_epoch(self) -> None:
        """Its first batch comes: count those that the others had before."""
        if self._num_before is not None:
            number, self._num_before, self._comes_late = self._num_before, None, False
            _count(self._trainer.fit_loop.epoch_loop.batch_progress.current, number)

    def state_of_data(self) -> dict[str, Any] | None:
        """For a checkpoint."""
        return None if self._data is None or self._model is None else self._data.dealt.state_dict()

    # -- the place in the fit, for a process that comes late: read between two steps

    def state_dict(self) -> dict[str, Any]:
        """Epochs, batches and steps that are complete, and what callbacks and loggers know."""
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        return {
            "epoch": trainer.fit_loop.epoch_progress.current.processed,
            "batches": loop.batch_progress.current.completed,
            "total_batches": loop.batch_progress.total.completed,
            "steps": loop.global_step,
            "logged_steps": loop._batches_that_stepped,
            "there": self._there.state_dict(),
            "folders": [callback.dirpath for callback in trainer.checkpoint_callbacks],
            "versions": [logger.version for logger in trainer.loggers],
            "callbacks": {own.state_key: own.state_dict() for own in self._callbacks()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there, also in the middle of an epoch."""
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        epochs = trainer.fit_loop.epoch_progress
        _count(epochs.current, state["epoch"])
        _count(epochs.total, state["epoch"])
        _count(loop.batch_progress.current, state["batches"])
        _count(loop.batch_progress.total, state["total_batches"])
        self._num_before = state["batches"] if self._comes_late else None
        _count(loop.automatic_optimization.optim_progress.optimizer.step.total, state["steps"])
        loop._batches_that_stepped = state["logged_steps"]
        self._there.load_state_dict(state["there"])
        for callback, folder in zip(trainer.checkpoint_callbacks, state["folders"], strict=True):
            callback.dirpath = folder
        for logger, version in zip(trainer.loggers, state["versions"], strict=True):
            if getattr(logger, "_experiment", None) is None and hasattr(logger, "_version"):
                logger._version = version
        for own in self._callbacks():
            if known := state["callbacks"].get(own.state_key):
                own.load_state_dict(known)

    def _callbacks(self) -> list[Any]:
        return [own for own in self._trainer.callbacks if own is not self._trainer.strategy._in_fit]


class _RunningEpoch:
    """The loader of a fit: each iteration is the rest of the epoch that Lightning counts, also if that is moved on."""

    def __init__(self, loader: DataLoader[Any], fit_loop: Any, begins: Callable[[], None]) -> None:
        self._given, self._fit_loop, self._begins = loader, fit_loop, begins
        self.dealt = MemberLoader(loader, place=lambda batch: batch)  # Lightning moves batches by itself
        self._deals = False

    def begin(self, model: StagedDataParallel) -> None:
        """Deal to the ranks of this model."""
        self.dealt.begin(model)
        self._deals = True

    @property
    def dataset(self) -> Any:
        """That of the loader."""
        return self._given.dataset

    @property
    def is_over(self) -> bool:
        """Whether the epoch that Lightning counts is complete."""
        assert self.dealt.epochs is not None
        return self.dealt.epochs.number > int(self._fit_loop.epoch_progress.current.processed)

    def __len__(self) -> int:
        """Before the fit, for schedules: steps of an epoch if all ranks are there. In it, ``TypeError``: unknown."""
        if self._deals:
            raise TypeError("an epoch has as many batches as the ranks that are there need")
        return len(self.dealt)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the running epoch."""
        self._begins()
        while not self.is_over:
            yield from self.dealt.running()


def check_trainer(trainer: Any) -> None:
    """Raises ``ValueError`` for what would wait for absent ranks, count batches, or decide on one rank alone."""
    if (call := trainer.state.fn.value) != "fit":
        raise ValueError(
            f"Trainer with members=, and its {call}(): each rank would have all of the data; give that call to another "
            "Trainer, with devices=1"
        )
    if (number := trainer.accumulate_grad_batches) > 1:
        raise ValueError(
            f"accumulate_grad_batches={number}, and members=: samples are dealt from step to step, in one batch each; "
            "leave it out, and give train_dataloader() a larger batch_size"
        )
    if not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            "automatic_optimization=False, and members=: steps and optimizers of the module's own are not known to the "
            "others; use one optimizer with automatic optimization, or a loop of your own"
        )
    for word, plain in _WORDS.items():
        if (given := getattr(trainer, word)) != plain:
            raise ValueError(
                f"{word}={given}, and members=: an epoch is each sample once; leave it out, and give a smaller data set"
            )
    for callback in trainer.callbacks:
        kinds = {kind.__name__ for kind in type(callback).__mro__}
        if found := sorted(kinds.intersection(_BY_ITSELF)):
            raise ValueError(
                f"{found[0]}, and members=: it decides or changes the model on each rank by itself, and a rank that "
                "comes back does not have its state; leave it out"
            )


def _alone() -> bool:
    """Whether a metric is of several ranks."""
    return False


def _count(progress: Any, completed: int) -> None:
    """So many are complete; what is on its way stays so."""
    before = progress.completed if not hasattr(progress, "processed") else progress.processed
    for name in ("ready", "started", "processed", "completed"):
        if hasattr(progress, name):
            setattr(progress, name, completed + max(0, getattr(progress, name) - before))


@contextlib.contextmanager
def _without_barriers() -> Iterator[None]:
    """In the block ``prepare_data`` makes no group of all ranks: one that comes late would wait in it for ever."""
    from lightning.pytorch.trainer.connectors import data_connector

    before = data_connector._InfiniteBarrier
    data_connector._InfiniteBarrier = contextlib.nullcontext
    try:
        yield
    finally:
        data_connector._InfiniteBarrier = before
