"""The numbers of an epoch, by `LightningModule.log`: each rank has those of all ranks, in one order.

At an epoch's end Lightning reduces each number by a collective, on the ranks that logged it. A rank that was late in
all steps of the epoch came to no ``self.log``: its peers would wait for it there, or meet it in that of another
number.

Not held: torchmetrics with lists that are not concatenated (``dist_reduce_fx=None``), and metrics made of others.
"""

from __future__ import annotations

import sys
from functools import reduce
from typing import Any, TypeAlias

import torch

from straggle.extras import needs_extra
from straggle.merge.rows.step_record import StepRecord
from straggle.parallel import StagedDataParallel

with needs_extra("lightning"):
    from torchmetrics.utilities import dim_zero_cat

    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        from pytorch_lightning import Callback
        from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
    else:
        from lightning.pytorch import Callback
        from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

Plain: TypeAlias = dict[str, Any]
_WORDS = ["fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"]
_WORDS += ["add_dataloader_idx", "dataloader_idx", "metric_attribute"]
_REDUCTIONS = [torch.mean, torch.sum, torch.max, torch.min, sum, max, min]


class SameNumbers(Callback):
    """Comes before all other callbacks: they may ask for a number, for which ranks meet."""

    _model: StagedDataParallel

    def __init__(self) -> None:
        self._all_came = True

    def begin(self, model: StagedDataParallel) -> None:
        """A fit begins with this model."""
        self._model, self._all_came = model, True
        model.register_step_hook(self._merged)

    def _merged(self, record: StepRecord) -> None:
        table = record.table  # that of all ranks, who decide alike
        self._all_came = self._all_came and (table.is_usual or all(table.finished_ranks()))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """If not all ranks came to all of the epoch, tell each other what was logged; then all have one order."""
        results = trainer.fit_loop.epoch_loop._results
        if not self._all_came or self._model.open_step is not None:
            self._share(results, trainer, pl_module)
        self._all_came = True
        for key in sorted(key for key, own in results.items() if _waits(own)):
            results[key] = own = results.pop(key)  # behind those before: a dict keeps the order
            if own.is_tensor and own.meta.is_mean_reduction:
                # Lightning reduces it by mean, too, and integers are rounded: 15 and 0 samples would be 7 on each rank
                own.cumulated_batch_size = own.cumulated_batch_size.to(own.value.dtype)

    def _share(self, results: Any, trainer: Any, pl_module: Any) -> None:
        """A number that this rank has not is one to which it adds nothing."""
        told = self._model._channel.gather(
            {key: _plain(own) for key, own in results.items() if _waits(own)}, "numbers of an epoch"
        )
        for key in {key for of_rank in told for key in of_rank}:
            of_all = [of_rank[key] for of_rank in told if key in of_rank]
            if (own := results.get(key)) is None:
                own = results[key] = _made(of_all[0], trainer.strategy, pl_module)
            if own.is_tensor:
                own.value = own.value.to(reduce(torch.promote_types, (_dtype(plain["dtype"]) for plain in of_all)))
            else:
                _fill_lists(own.value, {name: like for plain in of_all for name, like in plain["lists"].items()})
            if not _waits(own):
                own._update_count = max(1, own._update_count)  # else it warns that nothing was logged
                own.has_reset, own._computed = False, None  # else it would be an earlier epoch's, without its peers


def _waits(own: Any) -> bool:
    """Whether all ranks meet for it."""
    sync = own.meta.sync
    of_all = sync.group is None and not sync.rank_zero_only
    return bool(own.meta.on_epoch and not own.has_reset and of_all and (sync.should or not own.is_tensor))


def _plain(own: Any) -> Plain:
    """What it takes to make one like it, as JSON can hold it."""
    words = {word: getattr(own.meta, word) for word in _WORDS}
    return {
        "words": {word: value if isinstance(value, str | int | None) else bool(value) for word, value in words.items()},
        "reduction": _REDUCTIONS.index(own.meta.reduce_fx),
        "is_tensor": own.is_tensor,
        "should": bool(own.meta.sync.should),
        "dtype": _name(own.value.dtype) if own.is_tensor else None,
        "lists": {} if own.is_tensor else _lists(own.value),
    }


def _lists(metric: Any) -> dict[str, tuple[str, list[int]]]:
    """Concatenate the states that are lists; dtype of each, and its shape behind the first dimension."""
    found = {}
    for name, state in _states(metric):
        if state:
            setattr(metric, name, [joined := dim_zero_cat(state)])
            found[name] = (_name(joined.dtype), list(joined.shape[1:]))
    return found


def _fill_lists(metric: Any, likes: dict[str, tuple[str, list[int]]]) -> None:
    """Where this rank's list is empty, put what peers can gather with theirs: torchmetrics wants as many dimensions."""
    for name, state in _states(metric):
        if not state and name in likes:
            dtype, shape = likes[name]
            setattr(metric, name, [torch.empty((0, *shape), dtype=_dtype(dtype), device=metric.device)])


def _states(metric: Any) -> list[tuple[str, list[torch.Tensor]]]:
    joined = [name for name, how in metric._reductions.items() if how is dim_zero_cat]
    return [(name, state) for name in joined if isinstance(state := getattr(metric, name), list)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _made(plain: Plain, strategy: Any, pl_module: Any) -> Any:
    """A number to which nothing was added."""
    meta = _Metadata(**plain["words"], reduce_fx=_REDUCTIONS[plain["reduction"]])
    meta.sync = _Sync(fn=strategy.reduce, _should=plain["should"])
    own = _ResultMetric(meta, plain["is_tensor"])
    own.has_reset = True
    if not plain["is_tensor"]:
        own.value = pl_module.get_submodule(meta.metric_attribute)
    return own.to(strategy.root_device)
