"""The launchers of several nodes: the one that hosts the store stays until the others have ended.

Each beats in the store, so that one which dies with its machine is not waited for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from straggle.merge.wire.store import JobStore, StoreUnreachable

BEAT_S = 5.0
LOST_S = 60.0
_PREFIX = "straggle/launch"


class Nodes:
    """What this node's launcher says to the others, and what it knows of them."""

    def __init__(
        self, store: JobStore, *, node_rank: int, num_nodes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._node_rank = store, node_rank
        self._clock = clock
        now = clock()
        self._beats = {node: (0, now) for node in range(num_nodes) if node != node_rank}  # the last number, and when

    def beat(self) -> None:
        """Say that this launcher is there."""
        self._store.post(lambda store: store.add(f"{_PREFIX}/beat/{self._node_rank}", 1))

    def end(self) -> None:
        """Say that all workers of this node have ended."""
        with contextlib.suppress(StoreUnreachable):
            self._store.ask(lambda store: store.set(f"{_PREFIX}/ended/{self._node_rank}", ""))

    def others(self) -> list[int]:
        """The nodes that have not ended; one that has not beaten for a minute is left out."""
        with contextlib.suppress(StoreUnreachable):
            self._store.ask(self._look)
        now = self._clock()
        return [node for node, (_, since) in self._beats.items() if now - since < LOST_S]

    def _look(self, store: Any) -> None:
        for node, (last, _) in list(self._beats.items()):
            if store.check([f"{_PREFIX}/ended/{node}"]):
                del self._beats[node]
            elif (number := store.add(f"{_PREFIX}/beat/{node}", 0)) != last:
                self._beats[node] = (number, self._clock())
