"""The thread that sends a rank's signs of life: what becomes of it where a request does not come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from straggle.merge.members.membership import Membership
from straggle.merge.members.view import Elastic

LIMIT_S = 20.0


class Cut:
    """A connection to a store whose requests do not come back while its link is cut."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.link, self.held = threading.Event(), threading.Event()
        self.link.set()

    def __getattr__(self, name: str) -> Any:
        def request(*args: Any) -> Any:
            if not self.link.is_set():
                self.held.set()
            self.link.wait()
            return getattr(self._store, name)(*args)

        return request


@pytest.fixture
def connections() -> Iterator[list[Cut]]:
    made: list[Cut] = []
    yield made
    for connection in made:
        connection.link.set()


def wait_for(number: int, membership: Membership) -> None:
    until = time.monotonic() + LIMIT_S
    while membership.num_beats < number:
        assert time.monotonic() < until, "no sign of life"
        time.sleep(0.01)


def test_rank_whose_request_does_not_come_back_beats_on_by_a_new_connection(connections: list[Cut]) -> None:
    store = dist.HashStore()

    def connect() -> Cut:
        connections.append(Cut(store))
        return connections[-1]

    membership = Membership(0, 1, Elastic(), connect=connect, exited=lambda _store, _rank: None)
    membership.begin(LIMIT_S)
    wait_for(3, membership)
    stuck = connections[-1]
    stuck.link.clear()
    assert stuck.held.wait(LIMIT_S)
    before = membership.num_beats
    membership.beat_anew()
    wait_for(before + 3, membership)
    stuck.link.set()  # what was stuck comes back, and leaves the rest to its successor
    membership.close()
    beating = [thread for thread in threading.enumerate() if thread.name == "straggle-heartbeat"]
    assert not beating
