"""The agents of a replica's workers, which are started again together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import IO, Any, cast

import pytest
import torch.distributed as dist

from straggle.commands.launching.agent import Agent, Worker
from straggle.commands.launching.restarting import RestartRules
from straggle.commands.launching.together import Together, deciding
from straggle.commands.launching.worker_process import Program
from straggle.members import agents
from straggle.members.agents import DO_NOT_RESTART, WRONG_CONFIGURATION, Exited
from straggle.merge.wire.store import JobStore

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


class Store:
    """A job's store in this process."""

    def __init__(self) -> None:
        self.of_job = dist.HashStore()  # type: ignore[attr-defined]

    def ask(self, request: Callable[[Any], Any]) -> Any:
        return request(self.of_job)


class Ended:
    """A worker's process that has done its work."""

    pid = 2**30  # no process has it

    def wait(self) -> int:
        return 0

    def terminate(self) -> None:
        pass

    def kill(self) -> None:
        pass


@pytest.mark.parametrize("earlier", [-1, 2])
def test_workers_of_a_replica_have_one_number_though_one_begins_before_the_other(earlier: int) -> None:
    store, together, numbers, ended = Store(), Together(LIMIT_S), SimpleQueue[str](), SimpleQueue[Any]()
    if earlier >= 0:
        agents.post_started(store.of_job, 0, earlier)

    def starter(program: Program, environment: Mapping[str, str], output: IO[bytes] | None) -> Ended:
        numbers.put(environment["TORCHELASTIC_RESTART_COUNT"])
        return Ended()

    first, second = [
        Agent(
            Worker(rank, Program("train.py"), {}, starter),
            RestartRules(0, 0.0),
            cast(JobStore, store),
            world_size=2,
            ended=ended,
            together=together,
        )
        for rank in range(2)
    ]
    first.start()
    began = numbers.get(timeout=LIMIT_S)  # it has announced its start
    second.start()
    assert (began, numbers.get(timeout=LIMIT_S)) == (str(earlier + 1), str(earlier + 1))
    assert {ended.get(timeout=LIMIT_S).rank for _ in range(2)} == {0, 1}
