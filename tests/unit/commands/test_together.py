"""The agents of a replica's workers, which are started again together."""

from __future__ import annotations

import threading

import pytest

from straggle.commands.launching.together import Together, deciding
from straggle.members.agents import DO_NOT_RESTART, WRONG_CONFIGURATION, Exited

LIMIT_S = 20.0


def end(code: int | None, count: int = 0) -> Exited:
    return Exited(count, 1.0, code=code, signal="SIGKILL" if code is None else None)


@pytest.mark.parametrize(
    ("ends", "decides"),
    [
        ([end(0), end(0)], 0),
        ([end(0), end(1)], 1),
        ([end(None), end(1)], 0),  # the first is the reason, and the second followed
        ([end(None), end(DO_NOT_RESTART)], 1),
        ([end(1), end(WRONG_CONFIGURATION)], 1),
    ],
)
def test_one_end_decides_for_all_workers_of_a_replica(ends: list[Exited], decides: int) -> None:
    assert deciding(ends) is ends[decides]


class Replica:
    """Two agents; rank 1's process ends when it is killed."""

    def __init__(self, grace_s: float) -> None:
        self.together, self.killed, self.found = Together(grace_s), threading.Event(), dict[int, Exited]()
        self.together.add(0, lambda: None)
        self.together.add(1, self.killed.set)

    def ends(self, rank: int, exited: Exited) -> threading.Thread:
        def meet() -> None:
            self.found[rank] = self.together.ended(rank, exited)

        thread = threading.Thread(target=meet, daemon=True)
        thread.start()
        return thread


def test_worker_that_runs_on_is_killed_after_the_grace_and_both_follow_the_first_end() -> None:
    replica = Replica(grace_s=0.05)
    first = replica.ends(0, end(1))
    assert replica.killed.wait(LIMIT_S)
    second = replica.ends(1, end(None))
    for thread in (first, second):
        thread.join(LIMIT_S)
    assert replica.found == {0: end(1), 1: end(1)}


def test_worker_that_has_done_its_work_waits_for_the_other_and_kills_nothing() -> None:
    replica = Replica(grace_s=0.0)
    first = replica.ends(0, end(0))
    assert not replica.killed.wait(0.2)
    assert not replica.found
    replica.ends(1, end(0)).join(LIMIT_S)
    first.join(LIMIT_S)
    assert replica.found == {0: end(0), 1: end(0)}
    assert not replica.killed.is_set()


def test_they_meet_again_after_each_start() -> None:
    replica = Replica(grace_s=LIMIT_S)
    for count in range(3):
        threads = [replica.ends(rank, end(rank, count)) for rank in range(2)]
        for thread in threads:
            thread.join(LIMIT_S)
        assert replica.found == {0: end(1, count), 1: end(1, count)}


def test_launcher_that_is_told_to_end_waits_for_none() -> None:
    replica = Replica(grace_s=LIMIT_S)
    first = replica.ends(0, end(0))
    replica.together.stop()
    first.join(LIMIT_S)
    assert replica.found == {0: end(0)}
