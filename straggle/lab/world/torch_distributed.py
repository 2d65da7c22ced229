"""`torch.distributed` in a simulated world: torch's own code, whose groups and stores are the world's.

What torch holds once in a process (the default group, all groups, their names, what FSDP2 knows of modules) there is
for each process of the world then. So a loop's own collectives, device meshes and FSDP2 run on ranks that are threads.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import _composable_state, device_mesh, distributed_c10d

from straggle import world
from straggle.lab.world.groups import Network, gloo_of
from straggle.lab.world.nccl import nccl_of
from straggle.lab.world.process import HeldByProcess
from straggle.lab.world.scheduler import Thread
from straggle.lab.world.store import PrefixStore, Store

_HELD = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag", "pg_coalesce_state")


class _Groups:
    """What torch knows of the groups of one process: its ``_World``."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.group_count = 0
        self.comms: list[Any] = []
        for name in _HELD:
            setattr(self, name, {})

    @property
    def pg_config_info(self) -> list[Any]:
        """For torch's flight recorder, which there is none of."""
        return []


class _GroupsOfProcess:
    """The same, of the process whose thread asks."""

    def __init__(self, real: Any) -> None:
        object.__setattr__(self, "_real", real)
        object.__setattr__(self, "_own", world.OfProcess(_Groups))

    def _here(self) -> Any:
        return self._own.here if isinstance(threading.current_thread(), Thread) else self._real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._here(), name, value)


def _backend_for_meshes(group: Any = None) -> str:
    """So that meshes of two ranks are two, as caches of DTensor are told them apart by their threads."""
    name = str(dist.get_backend(group))
    return "threaded" if isinstance(threading.current_thread(), Thread) else name


@contextmanager
def entered(network: Network) -> Iterator[None]:
    """In this block, threads of the world have this network's groups and stores from `torch.distributed`."""
    gloo = gloo_of(network)
    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    own: dict[str, Any] = {"ProcessGroupGloo": gloo, "PrefixStore": PrefixStore}
    as_seen: dict[str, Any] = {}
    if network.backend != "gloo":
        as_seen = {"get_backend_config": lambda _group=None: network.backend, "ProcessGroupNCCL2": nccl_of(network)}
    states = _composable_state._module_state_mapping
    with (
        patch.multiple(distributed_c10d, _world=_GroupsOfProcess(distributed_c10d._world), **own),
        patch.multiple(dist, **own),
        patch.multiple(dist, create=True, **as_seen) if as_seen else nullcontext(),
        patch.object(distributed_c10d, "ReconfigureOptions", SimpleNamespace, create=True),
        patch.object(device_mesh, "get_backend", _backend_for_meshes),
        patch.object(_composable_state, "_module_state_mapping", HeldByProcess(states, WeakKeyDictionary)),
        patch.object(sys, "excepthook", sys.excepthook),  # to which init_process_group adds the rank
    ):
        isolate(True)
        try:
            yield
        finally:
            isolate(False)


def begin(network: Network, rank: int, start: int, limit_s: float = 1800.0) -> None:
    """``init_process_group`` of a process: ``start`` tells it from others that this rank had.

    As with gloo's lazy connections, nobody waits for the others here. It is a group of gloo, whatever the ranks see.
    """
    corner = PrefixStore(f"default/{start}", Store(network.server))
    dist.init_process_group(
        "gloo", store=corner, rank=rank, world_size=network.num_ranks, timeout=timedelta(seconds=limit_s)
    )
