"""A leaf that has nothing to give sends a header, and its parent takes that for all of its part."""

from __future__ import annotations

import socket
from queue import SimpleQueue

import pytest
import torch
import torch.distributed as dist
from training import mlp

from straggle.backward.stages import plan_stages
from straggle.merge.buffers import FULL, NOTHING, Share, StageBuffers
from straggle.merge.groups import GlooGroup
from straggle.merge.links.leaf_side import LeafSide
from straggle.merge.links.leaf_wire import DONE, MERGED, PART, TOKEN_BYTES, Message, Wire, greet, greeted
from straggle.merge.links.ring_side import RingSide

BYTES = 1 << 20


def buffers_of(value: float, num_state: int = 0) -> StageBuffers:
    model = mlp()
    buffers = StageBuffers(plan_stages(model, 1), list(model.parameters()), 2, num_state=num_state)
    for view in buffers.views:
        view.fill_(value)
    return buffers


def ends() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = greet(listener.getsockname(), bytes(TOKEN_BYTES), 0, 5.0)
        other = greeted(listener, bytes(TOKEN_BYTES), 5.0)
    assert other is not None
    return one, other[1]


@pytest.mark.parametrize(
    ("share", "changes", "is_sent"), [(NOTHING, 0.0, False), (FULL, 0.0, True), (NOTHING, 1.0, True)]
)
def test_a_leaf_sends_its_part_where_that_has_any_weight(share: Share, changes: float, is_sent: bool) -> None:
    buffers, (parents, leafs) = buffers_of(1.0, num_state=3), ends()
    buffers.state.fill_(changes)
    leaf = LeafSide(1, [0], max_bytes=BYTES, on_behind=lambda _: None)
    received: SimpleQueue[Message] = SimpleQueue()
    wire = Wire(parents, max_bytes=BYTES, on_message=received.put, on_lost=lambda _: None)
    leaf.attach(0, leafs)
    buffers.all_reduce(0, dict.fromkeys(range(len(buffers.views)), share), leaf.of_step(0, buffers, [range(1)]))
    while (message := received.get(timeout=10)).kind != PART:
        pass
    assert (len(message.payload) > 0) == is_sent
    wire.close()
    leaf.close()


def test_a_parent_merges_a_header_as_nothing() -> None:
    buffers, (leafs, parents) = buffers_of(3.0), ends()
    ring = RingSide(0, [0], GlooGroup(dist.HashStore(), 0, 1, 5.0, 5.0), max_lag=0, max_bytes=BYTES, stretch=1.2)
    ring.attach(1, parents)
    received: SimpleQueue[Message] = SimpleQueue()
    wire = Wire(leafs, max_bytes=BYTES, on_message=received.put, on_lost=lambda _: None)
    for step in (0, 1):
        # the parent begins a step when the leaf has all of the one before, and has its part by then
        wire.post(Message(PART, step + 1))
        wire.post(Message(DONE, step))
        for work in buffers.all_reduce(0, {}, ring.of_step(step, buffers, [range(1)])):
            work.wait()
        message = received.get(timeout=10)
        assert message.kind == MERGED
    assert message.flag
    assert all(torch.equal(view, torch.full_like(view, 3.0)) for view in buffers.views)
    wire.close()
    ring.close()
