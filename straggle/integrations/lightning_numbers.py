"""The numbers of an epoch, by `LightningModule.log`: each rank has those of all ranks, in one order.

At an epoch's end Lightning reduces each number by a collective, on the ranks that logged it. A rank that was late in
all steps of the epoch came to no ``self.log``: its peers would wait for it there, or meet it in that of another
number.
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import torch.distributed as dist

from straggle.extras import needs_extra

with needs_extra("lightning"):
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        from pytorch_lightning import Callback
        from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
    else:
        from lightning.pytorch import Callback
        from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

Plain: TypeAlias = dict[str, Any]
_WORDS = ["fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph"]
_WORDS += ["add_dataloader_idx", "dataloader_idx", "metric_attribute"]


class SameNumbers(Callback):
    """Comes before all other callbacks: they may ask for a number, for which ranks meet."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Tell each other what was logged; a number that this rank has not is one to which it adds nothing."""
        results = trainer.fit_loop.epoch_loop._results
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, {key: _plain(own) for key, own in results.items() if _waits(own)})
        ordered: dict[str, Plain] = {key: plain for of_rank in told for key, plain in of_rank.items()}
        for key, plain in ordered.items():
            own = results.pop(key, None)
            if own is None:
                own = _made(plain, trainer.strategy, pl_module)
            if not _waits(own):
                own._update_count = max(1, own._update_count)  # else it warns that nothing was logged
                own.has_reset, own._computed = False, None  # else it would be an earlier epoch's, without its peers
            results[key] = own  # behind those before: a dict keeps the order


def _waits(own: Any) -> bool:
    """Whether all ranks meet for it."""
    sync = own.meta.sync
    return bool(own.meta.on_epoch and not own.has_reset and sync.group is None and (sync.should or not own.is_tensor))


def _plain(own: Any) -> Plain:
    """What it takes to make one like it."""
    sync, words = own.meta.sync, {word: getattr(own.meta, word) for word in _WORDS}
    return {"words": words, "is_tensor": own.is_tensor, "sync": (sync.should, sync.rank_zero_only)}


def _made(plain: Plain, strategy: Any, pl_module: Any) -> Any:
    """A number to which nothing was added."""
    meta = _Metadata(**plain["words"])
    should, rank_zero_only = plain["sync"]
    meta.sync = _Sync(fn=strategy.reduce, _should=should, rank_zero_only=rank_zero_only)
    own = _ResultMetric(meta, plain["is_tensor"])
    own.has_reset = True
    if not plain["is_tensor"]:
        own.value = pl_module.get_submodule(meta.metric_attribute)
    return own.to(strategy.root_device)
