"""Which ranks merge in the ring in each step: changes of it, on all ranks alike.

All ranks ask the policy after each merged step. Where it wants other leaves, the ranks form the new ring in the
background, over a corner of the store, and say in their telemetry when they have. From the step after the one in which
all said so, they merge so. The group of all ranks stays as it is: back to it there is nothing to form.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from straggle.backward.stages import StagePlan
from straggle.merge.buffers import StageBuffers
from straggle.merge.channel import Channel
from straggle.merge.groups import GlooGroup, Group
from straggle.merge.links.addresses import own_address
from straggle.merge.links.leaf_rows import read_marks
from straggle.merge.links.leaf_side import LeafSide
from straggle.merge.links.leaf_wire import TOKEN_BYTES, greet, greeted
from straggle.merge.links.ring_side import RingSide
from straggle.merge.links.seen import seen_links
from straggle.merge.store import default_store
from straggle.merge.table import Table
from straggle.policies.leaves import LinkPolicy, Places

_FORM_S = 30.0  # for the ranks to meet
_SLACK_BYTES = 1 << 20  # of a bucket, beside its gradients
Side = RingSide | LeafSide
_log = logging.getLogger(__name__)


class Leaves:
    """The leaves of one wrapped model. All but `close` is called with the coordinator's lock held.

    ``num_bytes`` of gradients are merged in a step. ``on_behind(step)``: as in `LeafSide`.
    """

    def __init__(
        self, policy: LinkPolicy, channel: Channel, *, num_bytes: int, max_lag: int, on_behind: Callable[[int], None]
    ) -> None:
        self._policy, self._channel = policy, channel
        self._num_bytes, self._max_lag = num_bytes, max_lag
        self._on_behind = on_behind
        self._side: Side | None = None
        self._number = 0  # of the rings that were formed, or are
        self._forming: _Forming | None = None
        self._wanted: Places | None = None
        self.places = Places()
        self._since: dict[int, int] = {}  # from which step on each leaf is one
        self._ranks, self._generation = tuple(range(channel.world_size)), 0
        self._begins = 0  # the step from which on these are the members
        self._since_before = self._since  # and who was a leaf before

    @property
    def formed(self) -> int:
        """The number of the ring that this rank has formed last; negative: it could not."""
        return 0 if self._forming is None else self._forming.formed

    def of_step(self, step: int, buffers: StageBuffers, plan: StagePlan, everyone: Group) -> Group:
        """By which group a step is merged."""
        if self._side is None:
            return everyone
        number, stages = 0, list[range]()
        for bucket in plan.buckets():
            stages.append(range(number, number + len(bucket)))
            number += len(bucket)
        return self._side.of_step(step, buffers, stages)

    @property
    def are_there(self) -> bool:
        """Whether ranks are outside of the ring."""
        return self._side is not None

    def read(self, step: int, rows: Tensor, num_stages: int) -> None:
        """Make the merged telemetry of a step say what came in time."""
        read_marks(rows, self._since if step >= self._begins else self._since_before, num_stages)

    def missed(self, step: int) -> frozenset[int]:
        """The buckets of a step that may have been merged without this rank's part, because it is a leaf."""
        return frozenset() if self._side is None else self._side.missed(step)

    def regroup(self, ranks: Sequence[int], generation: int, step: int) -> None:
        """These are the members from ``step`` on, and all of them are in the ring: they have groups of their own."""
        if self._side is not None:
            _aside(self._side.close)
        if self._forming is not None:
            self._forming.give_up()
        self._side = self._forming = self._wanted = None
        self._ranks, self._generation, self._number = tuple(ranks), generation, 0
        if step > self._begins:
            self._begins, self._since_before = step, self._since
        self._since, self.places = {}, Places()

    def merged(self, step: int, table: Table, num_messages: int) -> None:
        """A step is merged: who is in the ring from the next one on."""
        if step < self._begins:  # some members had it complete before the others
            return
        if self._side is not None:
            self._side.merged(step)
        if self._forming is not None:
            said = table.rings_formed()
            self._look(step, self._forming, [said[rank] for rank in self._ranks])
            return
        before = self.places
        self.places = self._policy.next_places(before, seen_links(table, self._num_bytes, num_messages))
        if self.places.leaves != before.leaves:
            self._wanted, self.places = self.places, replace(before, step=self.places.step)
            self._begin(step, self._wanted)

    def close(self) -> None:
        """End what this rank still sends and takes."""
        for side in (self._side, None if self._forming is None else self._forming.side):
            if side is not None:
                side.close()

    def _begin(self, step: int, wanted: Places) -> None:
        if not wanted.leaves:
            self._switch(step, wanted, None)
            return
        self._number += 1
        self._forming = _Forming(
            self._channel,
            self._number,
            f"ring/{self._generation}/{self._number}",
            [rank for rank in self._ranks if rank not in wanted.leaves],
            wanted.leaves,
            max_lag=self._max_lag,
            max_bytes=self._num_bytes * 2 + _SLACK_BYTES,
            stretch=self._policy.stretch,
            on_behind=self._on_behind,
        )

    def _look(self, step: int, forming: _Forming, said: Sequence[int]) -> None:
        """Whether all ranks have formed the ring, as all know from the same table."""
        assert self._wanted is not None
        if -forming.number in said:
            _log.warning("rank %d, step %d: the ring without a slow link was not formed", self._channel.rank, step)
            if forming.side is not None:
                _aside(forming.side.close)
            self._forming = self._wanted = None
            self.places = replace(self.places, against={})
        elif all(number == forming.number for number in said):
            assert forming.side is not None
            self._switch(step, self._wanted, forming.side)

    def _switch(self, step: int, places: Places, side: Side | None) -> None:
        if self._side is not None:
            _aside(self._side.close)
        come, gone = places.leaves - self.places.leaves, self.places.leaves - places.leaves
        level = logging.WARNING if self._channel.rank == min(set(self._ranks) - places.leaves) else logging.INFO
        for rank in sorted(come):
            _log.log(level, "from step %d on rank %d is a leaf: its link is slow", step + 1, rank)
        for rank in sorted(gone):
            _log.log(level, "from step %d on rank %d is in the ring again", step + 1, rank)
        self._side, self.places = side, places
        self._since = {rank: self._since.get(rank, step + 1) for rank in sorted(places.leaves)}
        self._forming = self._wanted = None


class _Forming:
    """A ring that is being formed, on a thread that is left to itself. ``formed`` and ``side`` are written by it."""

    def __init__(
        self,
        channel: Channel,
        number: int,
        corner: str,
        ring: Sequence[int],
        leaves: frozenset[int],
        *,
        max_lag: int,
        max_bytes: int,
        stretch: float,
        on_behind: Callable[[int], None],
    ) -> None:
        self.number = number
        self.formed = 0
        self.side: Side | None = None
        self._channel, self._corner = channel, corner
        self._ring, self._leaves = ring, sorted(leaves)
        self._given_up = False
        self._max_lag, self._max_bytes, self._stretch = max_lag, max_bytes, stretch
        self._on_behind = on_behind
        threading.Thread(target=self._run, name="straggle-forming", daemon=True).start()

    def give_up(self) -> None:
        """The members have changed: what is formed, or will be, is of no use."""
        self._given_up = True
        if self.side is not None:
            _aside(self.side.close)

    def _run(self) -> None:
        try:
            store = dist.PrefixStore(self._corner, self._channel.connection())  # type: ignore[attr-defined]
            store.set_timeout(timedelta(seconds=_FORM_S))
            is_leaf = self._channel.rank in self._leaves
            self.side = self._as_leaf(store) if is_leaf else self._in_ring(store)
            self.formed = self.number
            if self._given_up:
                self.side.close()
        except (RuntimeError, OSError, ValueError) as error:
            _log.warning("rank %d could not form a ring: %s", self._channel.rank, error)
            self.formed = -self.number

    def _as_leaf(self, store: Any) -> LeafSide:
        side = LeafSide(self._channel.rank, self._ring, max_bytes=self._max_bytes, on_behind=self._on_behind)
        token = secrets.token_bytes(TOKEN_BYTES)
        host = own_address(default_store())
        with socket.create_server((host, 0)) as listener:
            listener.settimeout(_FORM_S)
            word = json.dumps([host, listener.getsockname()[1], token.hex()])
            store.set(f"leaf/{self._channel.rank}", word)
            missing = set(self._ring)
            while missing:
                if (found := greeted(listener, token, _FORM_S)) is not None and found[0] in missing:
                    missing.discard(found[0])
                    side.attach(*found)
        return side

    def _in_ring(self, store: Any) -> RingSide:
        rank = self._channel.rank
        connections = {leaf: self._connected(store, leaf) for leaf in self._leaves}
        ring = GlooGroup(store, self._ring.index(rank), len(self._ring), _FORM_S, self._channel.give_up_s)
        side = RingSide(rank, self._ring, ring, max_lag=self._max_lag, max_bytes=self._max_bytes, stretch=self._stretch)
        for leaf, connection in connections.items():
            side.attach(leaf, connection)
        return side

    def _connected(self, store: Any, leaf: int) -> socket.socket:
        host, port, token = json.loads(store.get(f"leaf/{leaf}"))
        return greet((host, int(port)), bytes.fromhex(token), self._channel.rank, _FORM_S)


def _aside(work: Callable[[], None]) -> None:
    """On a thread that is left to itself."""
    threading.Thread(target=work, name="straggle-leaving", daemon=True).start()
