"""Real ranks on this machine: processes in a gloo group."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def on_real_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """What ``function(rank, *args)`` returns on each rank; the function is one of a module, its result is saved."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.get_context("forkserver").set_forkserver_preload([function.__module__])  # torch is loaded once
        multiprocessing.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            _rank_main, (world_size, folder, function, args), nprocs=world_size, start_method="forkserver"
        )
        return [torch.load(Path(folder, f"rank{rank}"), weights_only=True) for rank in range(world_size)]


def _rank_main(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.save(function(rank, *args), Path(folder, f"rank{rank}"))
    dist.destroy_process_group()
