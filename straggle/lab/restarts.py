"""A part of the job's store that no earlier attempt of torchrun's has written.

torchrun's agent hosts one store for all attempts, and gloo leaves its addresses there under the same keys each time. A
restarted worker finds the addresses of the dead workers, and its connections are refused.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_POLL_S = 0.01


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
