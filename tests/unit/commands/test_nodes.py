"""The launcher that hosts the store knows which of the others have ended, and which are gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from clock import Clock

from straggle.commands.launching.launcher import LOST_S, Nodes
from straggle.merge.wire.store import JobStore


@contextlib.contextmanager
def job_store() -> Iterator[JobStore]:
    store = JobStore(dist.HashStore, "a store", who="a test", without="nothing", watched=("any",))
    try:
        yield store
    finally:
        store.close()


def test_node_that_has_ended_is_not_waited_for() -> None:
    with job_store() as store:
        nodes = [Nodes(store, node_rank=rank, num_nodes=3) for rank in range(3)]
        assert nodes[0].others() == [1, 2]
        nodes[1].end()
        assert nodes[0].others() == [2]
        nodes[2].end()
        assert nodes[0].others() == []


def test_node_alone_waits_for_none() -> None:
    with job_store() as store:
        assert Nodes(store, node_rank=0, num_nodes=1).others() == []


def test_node_that_beats_is_waited_for_and_one_that_does_not_is_not() -> None:
    clock = Clock()
    with job_store() as store:
        host = Nodes(store, node_rank=0, num_nodes=3, clock=clock)
        beating = Nodes(store, node_rank=1, num_nodes=3)
        for _ in range(3):
            clock.advance(LOST_S - 1)
            beating.beat()
            found = host.others()
        assert found == [1]
        clock.advance(LOST_S)
        assert host.others() == []
        beating.beat()  # its machine was only frozen
        assert host.others() == [1]
