"""A leaf: it sends its parents its part of each bucket, as far as its link comes, and takes what was merged."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from torch import Tensor

from straggle.merge.buffers import StageBuffers
from straggle.merge.groups import Group
from straggle.merge.links.leaf_wire import COMING, DONE, MERGED, PART, ROW, Message, Wire, close_all
from straggle.merge.links.patience import FirstSent
from straggle.merge.links.pending import Bucket, StepBuckets
from straggle.merge.links.ring_side import packed, unpacked


class LeafSide:
    """This rank as a leaf, whose ``parents`` are the ranks of the ring, each of some buckets.

    ``on_behind(step)`` is called by a thread of its own where all of a step is merged that this rank has not submitted:
    what it still computes for it is of no use. ``max_bytes``: of any bucket.
    """

    def __init__(self, rank: int, parents: Sequence[int], *, max_bytes: int, on_behind: Callable[[int], None]) -> None:
        self._rank, self._parents = rank, parents
        self._max_bytes = max_bytes
        self._on_behind = on_behind
        self._wires: dict[int, Wire] = {}
        self._lock = threading.Lock()  # guards what follows
        self._lost: dict[int, str] = {}  # parents that send no more, by place, and why
        self._first = FirstSent()
        self._wanted: dict[tuple[int, int], Bucket] = {}  # submitted, and not merged yet
        self._coming: dict[tuple[int, int], dict[int, bytearray]] = {}  # merged, as far as it came, by place
        self._merged: dict[tuple[int, int], bytearray] = {}  # merged, and not submitted yet
        self._parts: dict[tuple[int, int], Message] = {}  # on their way
        self._is_usual = False  # its parents waited in the last step
        self._in_time: dict[tuple[int, int], bool] = {}  # whether a merged bucket has this rank's part

    def attach(self, parent: int, connection: socket.socket) -> None:
        """A parent's connection, before the first step."""
        self._wires[parent] = Wire(
            connection,
            max_bytes=self._max_bytes,
            on_message=partial(self._came, self._parents.index(parent)),
            on_lost=partial(self._lose, self._parents.index(parent)),
        )

    def of_step(self, step: int, buffers: StageBuffers, stages: Sequence[Sequence[int]]) -> Group:
        """The group of one step; ``stages``: for each bucket the numbers of its stages."""
        with self._lock:
            first = self._first.first
        for wire in self._wires.values():
            wire.post(Message(COMING, step, first))
        return cast("Group", StepBuckets(step, buffers, stages, self._submit))

    def merged(self, step: int) -> None:
        """This rank has all of the step."""
        with self._lock:
            if self._is_usual:
                self._first.learn([self._in_time[key] for key in sorted(self._in_time) if key[0] == step])
            self._in_time = {key: own for key, own in self._in_time.items() if key[0] > step}
        for wire in self._wires.values():
            wire.post(Message(DONE, step))

    def missed(self, step: int) -> frozenset[int]:
        """The buckets of a step that are not known to have this rank's part."""
        with self._lock:
            return frozenset(number for (of, number), own in self._in_time.items() if of == step and not own)

    def close(self) -> None:
        """End, when the parents have closed their ends or take no more."""
        close_all(self._wires.values())

    # -- whoever submits, with the coordinator's lock

    def _submit(self, bucket: Bucket) -> None:
        key = bucket.step, bucket.number
        with self._lock:
            if (payload := self._merged.pop(key, None)) is not None:
                _deliver(bucket, payload)
                return
            if (problem := self._lost_for(key)) is not None:
                bucket.work.end(problem)
                return
            self._wanted[key] = bucket
            self._in_time.setdefault(key, False)
            wire = self._wires[self._parents[bucket.number % len(self._parents)]]
            if bucket.rows is not None:
                wire.post(Message(ROW, bucket.step, payload=packed([bucket.rows[self._rank]])), first=True)
            if bucket.number >= self._first.first:
                payload = packed(bucket.messages) if bucket.gives else bytearray()  # nothing to give: a header says so
                part = self._parts[key] = Message(PART, *key, payload=payload)
                wire.post(part)

    # -- the threads that receive

    def _came(self, place: int, message: Message) -> None:
        if message.kind != MERGED:
            return
        key, behind = (message.step, message.bucket), False
        with self._lock:
            if (part := self._parts.pop(key, None)) is not None:
                part.stopped = True  # it is launched: what is still to be sent of it is of no use
            self._is_usual = message.waited
            self._in_time[key] = message.flag or self._in_time.get(key, False)
            came = self._coming.setdefault(key, {})
            came[place] = message.payload
            if len(came) == len(self._parents):
                payload = bytearray().join(came[other] for other in range(len(came)))
                del self._coming[key]
                if (bucket := self._wanted.pop(key, None)) is not None:
                    _deliver(bucket, payload)
                else:
                    self._merged[key] = payload
                    behind = message.last
        if behind:
            self._on_behind(message.step)

    def _lose(self, place: int, why: str) -> None:
        """A parent sends no more: after its last message where it has gone over to another ring, or has ended."""
        with self._lock:
            self._lost[place] = f"rank {self._parents[place]}, a parent of this leaf, is lost: {why}"
            for key in list(self._wanted):
                if (problem := self._lost_for(key)) is not None:
                    self._wanted.pop(key).work.end(problem)

    def _lost_for(self, key: tuple[int, int]) -> str | None:
        """Why not all of a merged bucket comes; `None`: it may."""
        came = self._coming.get(key, {})
        return next((problem for place, problem in self._lost.items() if place not in came), None)


def _deliver(bucket: Bucket, payload: bytearray) -> None:
    tensors: list[Tensor] = unpacked(bucket.messages, payload)
    for message, merged in zip(bucket.messages, tensors, strict=True):
        message.copy_(merged)
    bucket.work.end()
