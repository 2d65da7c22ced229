"""A rank of the ring while other ranks are leaves: it is the parent of some buckets.

Each bucket has one parent. What a leaf has sent of it by the time that the ring comes to it is added by the parent,
with its weights. Of what was merged each rank of the ring sends the leaf a part. Two threads do this, in the order of
the buckets: one adds and launches, the other one waits for the ring and hands on.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from operator import sub
from queue import SimpleQueue
from typing import cast

import torch
from torch import Tensor

from straggle.merge.buffers import StageBuffers
from straggle.merge.groups import GlooGroup, Group
from straggle.merge.links.leaf_rows import mark, missing_row, put_row
from straggle.merge.links.leaf_wire import COMING, DONE, MERGED, PART, ROW, Message, Wire, close_all
from straggle.merge.links.patience import Patience
from straggle.merge.links.pending import Bucket, StepBuckets

_CLOSE_S = 5.0
_BEHIND = 2  # steps: who is further behind is not waited for, as what it sends comes too late


class RingSide:
    """This rank's place among the ``ranks`` of the ring, which merge by ``ring``.

    A leaf that is more than ``max_lag`` steps behind is waited for. ``max_bytes``: of any bucket.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], ring: GlooGroup, *, max_lag: int, max_bytes: int, stretch: float
    ) -> None:
        self._place, self._size = ranks.index(rank), len(ranks)
        self._ring = ring
        self._max_lag, self._max_bytes = max_lag, max_bytes
        self._patience = Patience(stretch)
        self._leaves: dict[int, _Leaf] = {}
        self._came = threading.Condition()  # guards the leaves
        self._began = False
        self._problem: str | None = None
        self._launching: SimpleQueue[Bucket | None] = SimpleQueue()
        self._finishing: SimpleQueue[Bucket | None] = SimpleQueue()
        self._free = threading.Semaphore()  # one bucket at a time: the later it is launched, the more has come for it
        self._merged_at = time.monotonic()
        # of the running step: for each leaf the stages that came in time, and with what weight
        self._marks: dict[int, dict[int, float]] = {}
        self._threads = [
            threading.Thread(target=self._guarded, args=run, name=f"straggle-ring-{word}", daemon=True)
            for word, run in (
                ("launch", (self._launching, self._launch, self._finishing)),
                ("finish", (self._finishing, self._finish, None)),
            )
        ]
        for thread in self._threads:
            thread.start()

    def attach(self, leaf: int, connection: socket.socket) -> None:
        """A leaf's connection, before the first step."""
        own = self._leaves[leaf] = _Leaf(self._came)
        own.wire = Wire(
            connection,
            max_bytes=self._max_bytes,
            on_message=own.came,
            on_lost=lambda why: self._lose(f"rank {leaf}, a leaf, is lost: {why}"),
        )

    def of_step(self, step: int, buffers: StageBuffers, stages: Sequence[Sequence[int]]) -> Group:
        """The group of one step; ``stages``: for each bucket the numbers of its stages."""
        if not self._began:
            self._began = True
            with self._came:
                for leaf in self._leaves.values():
                    leaf.begin(step)
        return cast("Group", StepBuckets(step, buffers, stages, self._launching.put))

    def merged(self, step: int) -> None:  # noqa: ARG002
        """The step is merged, and all know its telemetry."""
        self._ring.forget_ended()

    def missed(self, step: int) -> frozenset[int]:  # noqa: ARG002
        """A rank of the ring has its part in all that it has merged."""
        return frozenset()

    def close(self) -> None:
        """Hand on what is merged, and end."""
        self._launching.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)
        close_all([leaf.wire for leaf in self._leaves.values()])
        self._ring.drop()

    # -- its threads

    def _guarded(
        self, queue: SimpleQueue[Bucket | None], work: Callable[[Bucket], None], then: SimpleQueue[Bucket | None] | None
    ) -> None:
        while (bucket := queue.get()) is not None:
            try:
                if self._problem is not None:
                    raise RuntimeError(self._problem)
                work(bucket)
            except Exception as error:
                self._lose(str(error))
                bucket.work.end(str(error))
                self._free.release()
            else:
                if then is not None:
                    then.put(bucket)
        if then is not None:
            then.put(None)

    def _lose(self, problem: str) -> None:
        with self._came:
            self._problem = self._problem or problem
            self._came.notify_all()

    def _launch(self, bucket: Bucket) -> None:
        if bucket.number == 0:
            self._begin(bucket.step)
        self._free.acquire()
        if bucket.number % self._size == self._place:
            self._add_parts(bucket)
        if bucket.rows is not None:
            self._write_rows(bucket.rows, bucket)
        bucket.launched = [self._ring.all_reduce(message) for message in bucket.messages]

    def _begin(self, step: int) -> None:
        with self._came:
            self._came.wait_for(
                lambda: self._problem or all(leaf.done >= step - 1 - self._max_lag for leaf in self._leaves.values())
            )
        self._patience.begin()
        self._marks = {leaf: {} for leaf in self._leaves}

    def _add_parts(self, bucket: Bucket) -> None:
        """Add what leaves sent of this bucket, if it comes in time."""
        now = time.monotonic() - self._merged_at
        wait_s = self._patience.until(bucket.number, now) - now
        step, number, leaves = bucket.step, bucket.number, self._leaves.values()
        with self._came:
            self._came.wait_for(lambda: self._problem or all(leaf.settled(step, number) for leaf in leaves), wait_s)
            parts = {rank: leaf.take(step, number) for rank, leaf in self._leaves.items()}
        for rank, part in parts.items():
            if part is not None and len(part) in (0, bucket.nbytes):
                before = bucket.weights()
                if part:
                    _add(bucket.messages, part)
                bucket.taken |= {rank}
                added = map(sub, bucket.weights(), before)
                self._marks[rank].update(zip(bucket.stages, added, strict=True))

    def _write_rows(self, rows: Tensor, bucket: Bucket) -> None:
        for rank, leaf in self._leaves.items():
            row = None
            if bucket.number % self._size == self._place:
                with self._came:
                    came = leaf.row if leaf.row is not None and len(leaf.row) == rows[rank].nbytes else None
                    current = leaf.row_of == bucket.step
                row = None if came is None else torch.frombuffer(came, dtype=rows.dtype)
                row = row if row is not None and current else missing_row(bucket.num_stages, row)
            put_row(rows, rank, row, bucket.num_stages)
            mark(rows, rank, self._marks[rank], bucket.num_stages)

    def _finish(self, bucket: Bucket) -> None:
        for work in bucket.launched:
            work.wait()
        payload = part_of(packed(bucket.messages), self._place, self._size)
        for rank, leaf in self._leaves.items():
            flag, last = rank in bucket.taken, bucket.rows is not None
            leaf.wire.post(Message(MERGED, bucket.step, bucket.number, flag, last, self._patience.waits, payload))
        if bucket.rows is not None:
            now = time.monotonic()
            self._patience.end(now - self._merged_at)
            self._merged_at = now
        bucket.work.end()
        self._free.release()


class _Leaf:
    """What a parent knows of a leaf; guarded by ``came``."""

    wire: Wire

    def __init__(self, came: threading.Condition) -> None:
        self._came = came
        self._parts: dict[tuple[int, int], bytearray] = {}
        self._launched = (-1, -1)  # the step and bucket up to which parts are of no use any more
        self._coming = (-1, 0)  # the step that it sends, and from which bucket on
        self.row: bytearray | None = None  # its last one
        self.row_of = -1
        self.done = -1  # the step that it has all of

    def begin(self, step: int) -> None:
        """The first step in which it is a leaf."""
        self.done = max(self.done, step - 1)

    def came(self, message: Message) -> None:
        """By the thread that receives."""
        with self._came:
            key = message.step, message.bucket
            if message.kind == PART and key > self._launched:
                self._parts[key] = message.payload
            elif message.kind == ROW:
                self.row, self.row_of = message.payload, message.step
            elif message.kind == COMING:
                self._coming = key
            elif message.kind == DONE:
                self.done = max(self.done, message.step)
            self._came.notify_all()

    def settled(self, step: int, number: int) -> bool:
        """Whether there is nothing to wait for."""
        if (step, number) in self._parts or self.done < step - _BEHIND:
            return True
        return self._coming[0] == step and number < self._coming[1]

    def take(self, step: int, number: int) -> bytearray | None:
        """Its part of this bucket, if that has come."""
        self._launched = step, number
        part = self._parts.pop(self._launched, None)
        for key in [key for key in self._parts if key < self._launched]:
            del self._parts[key]
        return part


def packed(messages: Sequence[Tensor]) -> bytearray:
    """A copy of what is in these, one after another."""
    payload, start = bytearray(sum(message.nbytes for message in messages)), 0
    for message in messages:
        torch.frombuffer(payload, dtype=message.dtype, count=message.numel(), offset=start).copy_(message)
        start += message.nbytes
    return payload


def part_of(payload: bytearray, place: int, size: int) -> bytearray:
    """The part of a merged bucket that the rank at ``place`` among ``size`` sends to a leaf."""
    bounds = [len(payload) * number // size for number in (place, place + 1)]
    return payload[bounds[0] : bounds[1]]


def unpacked(messages: Sequence[Tensor], payload: bytearray) -> list[Tensor]:
    """Tensors as these, of what is in ``payload``."""
    tensors, start = [], 0
    for message in messages:
        tensors.append(torch.frombuffer(payload, dtype=message.dtype, count=message.numel(), offset=start))
        start += message.nbytes
    return tensors


def _add(messages: Sequence[Tensor], payload: bytearray) -> None:
    for message, part in zip(messages, unpacked(messages, payload), strict=True):
        message.add_(part)
