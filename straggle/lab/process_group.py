"""The job's process group: its device and its backend, and a part of the store that no earlier attempt has written.

torchrun's agent hosts one store for all attempts, and gloo leaves its addresses there under the same keys each time. A
restarted worker finds the addresses of the dead workers, and its connections are refused.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

_POLL_S = 0.01


@contextmanager
def process_group(*, elastic: bool = False) -> Iterator[torch.device]:
    """The job's process group, by torchrun's environment or alone; yields the device of this rank.

    nccl if every rank of this machine has a GPU, gloo on the CPU otherwise. ``elastic``: gloo in any case, and in
    the part of the store that a rank finds again when it is started again by itself.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    backend = "nccl" if on_gpu and not elastic else "gloo"
    if on_gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        store, rank, world_size = next(rendezvous("env://"))
        if not elastic:
            store = fresh_store(store, rank, world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's ``value``."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def fresh_store(store: Any, rank: int, world_size: int, *, timeout: timedelta = timedelta(minutes=10)) -> Any:
    """``store`` below a prefix on which the ranks of this attempt agree, whatever other attempts have left in it.

    Each rank asks under a name of its own, drawn now; rank 0 answers every one that it finds, and is done when each
    rank has said that it has this answer. So an answer of an earlier attempt reaches no rank. How often this node was
    restarted would be no such prefix: the agents of several nodes count differently.

    Raises ``RuntimeError`` if a rank does not appear within ``timeout``.
    """
    meeting: Any = dist.PrefixStore("straggle/attempt", store)  # type: ignore[attr-defined]
    own = uuid.uuid4().hex
    if rank == 0:
        _gather(meeting, own, set(range(1, world_size)), time.monotonic() + timeout.total_seconds())
        attempt = own
    else:
        meeting.set(f"asks/{rank}", own)
        meeting.wait([f"answer/{own}"], timeout)
        attempt = meeting.get(f"answer/{own}").decode()
        meeting.set(f"{attempt}/{rank}", "")
    return dist.PrefixStore(f"straggle/attempt/{attempt}", store)  # type: ignore[attr-defined]


def _gather(meeting: Any, attempt: str, missing: set[int], until: float) -> None:
    """Answer every rank that asks, until all ranks have the answer."""
    answered = set[str]()
    while missing:
        for rank in sorted(missing):
            if not meeting.check([f"asks/{rank}"]):
                continue
            asks = meeting.get(f"asks/{rank}").decode()
            if asks not in answered:
                meeting.set(f"answer/{asks}", attempt)
                answered.add(asks)
            if meeting.check([f"{attempt}/{rank}"]):
                missing.discard(rank)
        if missing and time.monotonic() > until:
            raise RuntimeError(f"rank 0, before the first step: ranks {sorted(missing)} have not come to the store")
        if missing:
            time.sleep(_POLL_S)
