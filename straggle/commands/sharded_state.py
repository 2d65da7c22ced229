"""Model and optimizer of a sharded run in a checkpoint, by ``torch.distributed.checkpoint``.

Each rank writes its shards. A mesh of another shape can read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

_FOLDER = "shards"
Group = dist.ProcessGroup | None


def save(new: Path, module: nn.Module, optimizer: Optimizer, group: Group = None) -> list[str]:
    """Write this rank's shards below ``new``; returns the names of the files that it answers for.

    Collective over ``group``, or all ranks. Raises ``OSError``, on all of them, if they cannot be written.
    """
    parts, place = _parts(module, optimizer), dist.get_rank(group)
    _together(lambda: state_dict_saver.save(parts, checkpoint_id=new / _FOLDER, process_group=group), OSError)
    own = sorted(path.name for path in (new / _FOLDER).glob(f"__{place}_*"))
    about_all = [".metadata"] if place == 0 else []
    return [f"{_FOLDER}/{name}" for name in (*own, *about_all)]


def load(found: Path, module: nn.Module, optimizer: Optimizer, group: Group = None) -> None:
    """Read what is this rank's of it. Collective; raises ``RuntimeError``, on all ranks, for another model's."""
    parts = _parts(module, optimizer)
    _together(lambda: state_dict_loader.load(parts, checkpoint_id=found / _FOLDER, process_group=group), RuntimeError)
    set_state_dict(module, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])


def of_this_rank(files: Iterable[str]) -> list[str]:
    """Those of a checkpoint's files with shards that this rank checks, so that each is read by one rank."""
    shards = sorted(name for name in files if name.startswith(f"{_FOLDER}/"))
    return shards[dist.get_rank() :: dist.get_world_size()]


def _parts(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    model, of_optimizer = get_state_dict(module, optimizer)
    return {"model": model, "optimizer": of_optimizer}


def _together(work: Callable[[], object], kind: type[Exception]) -> None:
    """Raise the ranks' own errors, of this kind: torch's is no ``Exception``, and has a traceback of each rank."""
    try:
        work()
    except CheckpointException as error:
        raise kind("; ".join(f"rank {rank}: {own}" for rank, (own, _) in sorted(error.failures.items()))) from None
