"""Ranks as processes of this machine in a gloo group, for benchmarks: no torchrun, and results return.

They are forked from a server that has loaded torch once. This process serves the job's store, as torchrun's agent does;
gloo uses the loopback device.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes

HOST = "127.0.0.1"
_PRELOAD = ["torch", "torch._dynamo", "straggle"]  # the first optimizer imports the second


def serve_store() -> TCPStore:
    """A job's store; its socket is for IPv4 only, because with a mixed one it asks a name server for each client."""
    listener = socket.create_server((HOST, 0), backlog=2048)
    port = listener.getsockname()[1]
    return TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 86400.0) -> list[Any]:
    """What ``function(rank, *args)`` returns on each rank: tensors, numbers, strings and containers of them.

    The function is defined in a module, and finds the process group initialized. An error on one rank ends all ranks,
    and is raised here with its traceback. Raises ``RuntimeError`` if they do not end within ``timeout_s``.
    """
    server = serve_store()
    multiprocessing.get_context("forkserver").set_forkserver_preload([*_PRELOAD, function.__module__])
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, server.port, folder, function, args)
        started = start_processes(  # type: ignore[no-untyped-call]
            _rank_main, arguments, nprocs=world_size, join=False, daemon=True, start_method="forkserver"
        )
        until = time.monotonic() + timeout_s
        while not started.join(max(0.0, until - time.monotonic())):
            if time.monotonic() >= until:
                for process in started.processes:
                    process.kill()
                raise RuntimeError(f"the ranks did not end within {timeout_s:g} s")
        return [torch.load(Path(folder, f"rank{rank}"), weights_only=True) for rank in range(world_size)]


def _rank_main(
    rank: int, world_size: int, port: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=TCPStore(HOST, port), rank=rank, world_size=world_size)
    torch.save(function(rank, *args), Path(folder, f"rank{rank}"))
    dist.barrier()
    dist.destroy_process_group()
