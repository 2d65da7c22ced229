"""What each Lightning ``Trainer`` has where straggle is installed: a `WatchCallback`, by an entry point.

Nobody asked for it, so it stands back: it watches only ranks that wait for one another, in jobs that `watch` knows, and
only if nothing else watches them. No error of its own ends a training.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)
_MAX_STEPS = 10_000  # of a fit: about 5 MB a rank


def callbacks() -> list[Any]:
    """The entry points ``lightning.pytorch.callbacks_factory`` and ``pytorch_lightning.callbacks_factory``."""
    try:
        from straggle.integrations.lightning import WatchCallback
    except ImportError as error:  # else no Trainer could be made beside a Lightning that straggle does not know
        _log.info("trainers are not watched: %s", error)
        return []
    return [WatchCallback(folder_of, max_steps=_MAX_STEPS)]


def folder_of(trainer: Any) -> Path | None:
    """Where a trainer's ranks are watched to; ``None``: they are not.

    Beside the numbers of its logger, or in ``runs/watch`` of its ``default_root_dir``. All ranks must call this.
    """
    from straggle.integrations.lightning import WatchCallback

    own = [callback for callback in trainer.callbacks if isinstance(callback, WatchCallback)]
    asked_for = any(callback.run_dir is not folder_of for callback in own)
    if asked_for or trainer.world_size == 1 or trainer.fast_dev_run or not _can_be_watched(trainer.strategy.model):
        return None
    log_dir = trainer.log_dir if trainer.loggers else None
    folder = Path(log_dir) if log_dir else Path(trainer.default_root_dir, "runs", "watch")
    if "://" in str(log_dir or trainer.default_root_dir):  # watch writes files
        folder = Path("runs", "watch")
    from lightning_utilities.core.rank_zero import rank_zero_info

    rank_zero_info(f"straggle watches where the time of each rank goes; see: python -m straggle advise {folder}")
    return folder


def _can_be_watched(model: Any) -> bool:
    """Whether it is a job of DDP, FSDP2 or tensor parallelism that nothing watches yet."""
    from straggle.backward.hooks import ModuleHook
    from straggle.observe.watch.job import job_of
    from straggle.parallel import StagedDataParallel

    if isinstance(model, StagedDataParallel):  # it has reports of its own
        return False
    try:
        kind = job_of(model).kind
    except (TypeError, ValueError) as error:
        _log.info("this training is not watched: %s", error)
        return False
    return kind != "loop" and not any(isinstance(hook, ModuleHook) for hook in model._forward_pre_hooks.values())
