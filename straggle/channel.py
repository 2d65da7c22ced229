"""How the ranks of one model talk: process groups and a corner of the job's store that belong to straggle alone.

Nothing here interleaves with the collectives of the user's own process groups.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

_SLICE = timedelta(seconds=1)
_POLL_S = 50e-6
LONG_S = 2.0  # a rank that takes longer for something says what it is doing, or for whom it waits

_log = logging.getLogger(__name__)


class PeerFailed(RuntimeError):
    """A rank ended in an error or could not be reached; says which one, in which step and stage."""


class Channel:
    """Two process groups (gradients; control, always on the CPU by gloo) and a store, for one wrapped model.

    Raises ``RuntimeError`` where there is no process group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, *, give_up_s: float) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "straggle needs a process group: launch with torchrun and call torch.distributed.init_process_group() "
                "before StagedDataParallel(model)"
            )
        parent = process_group or dist.group.WORLD
        ranks = dist.get_process_group_ranks(parent)
        timeout = timedelta(seconds=give_up_s)
        self.give_up_s = give_up_s
        self.rank = dist.get_rank(parent)
        self.world_size = len(ranks)
        backend = dist.get_backend(parent)
        self._queued = backend != "gloo"  # collectives run on the device's own queue, not on the host
        self.gradients = dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
        self.control = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
        store = dist.distributed_c10d._get_default_store()
        prefix = f"straggle/{self.gradients.group_name}"
        # a client serves one request at a time: what the stand-in asks for often has a connection of its own
        self._store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        self._evidence = dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
        self._counted: deque[int] = deque()  # steps whose counter this rank began
        self._counting = threading.Lock()

    # -- all ranks together

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's ``value``."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with rank 0's."""
        dist.broadcast(tensor, group=self.gradients, group_src=0)

    def of_rank0(self, numbers: Tensor) -> Tensor:
        """Rank 0's ``numbers``, on the CPU; overwrites this rank's."""
        dist.broadcast(numbers, group=self.control, group_src=0)
        return numbers

    # -- evidence that peers wait

    def post_finished(self, step: int) -> None:
        """Count this rank among those that have finished their own work for ``step``; from any thread.

        Who begins a step's counter removes it, when it begins one that is 32 steps or more later.
        """
        with self._counting:
            if self._evidence.add(f"finished/{step}", 1) > 1:
                return
            self._counted.append(step)  # the first one cleans up, once no rank asks for a step that far back
            while self._counted[0] <= step - 32:
                self._evidence.delete_key(f"finished/{self._counted.popleft()}")

    def num_finished(self, step: int) -> int:
        """How many ranks have finished their own work for ``step``."""
        return int(self._evidence.add(f"finished/{step}", 0))

    # -- failures

    def post_doing(self, words: str) -> None:
        """Leave word of what this rank has been doing for so long; empty: it is not stuck any more."""
        self._evidence.set(f"doing/{self.rank}", words)

    def post_failure(self, message: str) -> None:
        """Leave word of this rank's failure for its peers."""
        self._store.set(f"failure/{self.rank}", message)
        self._store.add("failures", 1)

    def wait(self, work: dist.Work, step: int, what: str, give_up_s: float | None = None) -> None:
        """Wait for a collective of ``step``; raises `PeerFailed` when a peer failed or ``give_up_s`` is over.

        A long wait is logged once, with the ranks that it is for and what they are doing.
        """
        began_at = time.monotonic()
        give_up_at = began_at + (give_up_s or self.give_up_s)
        told = None
        while not self._ended(work, what):
            if time.monotonic() > give_up_at or self._failures() or self._store.add("survivors", 0) > 0:
                raise PeerFailed(self.explain(what))
            waited_s = time.monotonic() - began_at
            if told is None and waited_s > LONG_S:
                told = self._note_waiting(step)
            elif told == 1 and waited_s > 2 * LONG_S:  # one rank says it for all, and says it once
                told = 0
                _log.warning("%s: waiting for %s", what, self._waited_for(step))
        if self._queued:
            work.wait()  # makes this thread's stream wait, and raises what went wrong

    def _ended(self, work: dist.Work, what: str) -> bool:
        """Wait a second at the most for a collective to end."""
        if self._queued:  # nccl would take the end of a short wait for a failure, and abort
            until = time.monotonic() + _SLICE.total_seconds()
            while not work.is_completed() and time.monotonic() < until:
                time.sleep(_POLL_S)
            return work.is_completed()
        try:
            work.wait(_SLICE)
        except RuntimeError:
            if not work.is_completed():
                return False
            try:
                work.wait()  # it failed, or it ended just when the time was over
            except RuntimeError as error:
                raise PeerFailed(self.explain(what)) from error
        return True

    def _note_waiting(self, step: int) -> int:
        """Tell the peers that this rank waits in ``step``; how many have told so by now, this one included."""
        self._store.set(f"waiting/{step}/{self.rank}", "")
        return int(self._store.add(f"waiting/{step}", 1))

    def _waited_for(self, step: int) -> str:
        """The ranks that do not wait in ``step``, and what they are doing, as far as they say."""
        others = [rank for rank in range(self.world_size) if not self._store.check([f"waiting/{step}/{rank}"])]
        return f"ranks {others}{self._doing(others)}"

    def _doing(self, ranks: Sequence[int]) -> str:
        return "".join(f"; {word}" for word in self._words(f"doing/{rank}" for rank in ranks) if word)

    def explain(self, what: str, patience_s: float = 2.0) -> str:
        """Why ``what`` failed: the failures that ranks left word of, or else the ranks that no longer answer."""
        until = time.monotonic() + patience_s
        try:
            self._store.set(f"survivor/{self.rank}", "")
            self._store.add("survivors", 1)  # who waits for this rank, and not for the one that is gone, learns of it
            while not (failures := self._failures()):
                missing = [rank for rank in range(self.world_size) if not self._store.check([f"survivor/{rank}"])]
                if not missing or time.monotonic() > until:
                    gone = f"no answer from ranks {missing}{self._doing(missing)}" if missing else "connection lost"
                    # who gave up first knows best: by now the lost ranks may be back, and end as well
                    return f"{what}: {self._store.compare_set('given up', '', gone).decode()}"
                time.sleep(0.05)
        except RuntimeError as error:  # the store died with its host
            return f"{what}: the job's store does not answer either ({error})"
        return f"{what}: " + "; ".join(failures)

    def _failures(self) -> list[str]:
        if self._store.add("failures", 0) == 0:
            return []
        return self._words(f"failure/{rank}" for rank in range(self.world_size))

    def _words(self, keys: Iterable[str]) -> list[str]:
        """What ranks left under those of these keys that there are."""
        return [self._store.get(key).decode() for key in keys if self._store.check([key])]
