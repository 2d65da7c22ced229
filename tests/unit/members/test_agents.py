"""What agents say of their workers is read back as it was said, from any part of the job's store."""

from __future__ import annotations

import signal

import pytest
import torch.distributed as dist

from straggle.members import agents
from straggle.members.agents import Exited


def test_nothing_is_said_of_a_worker_that_has_not_started() -> None:
    store = dist.HashStore()
    assert agents.started(store, 0) is None
    assert agents.exited(store, 0) is None


def test_word_is_the_last_one_of_that_rank() -> None:
    store = dist.HashStore()
    for count in range(3):
        agents.post_started(store, 1, count)
        agents.post_exited(store, 1, Exited(count, 1.5, code=count + 1))
    agents.post_started(store, 1, 3)
    assert agents.started(store, 1) == 3
    assert agents.exited(store, 1) == Exited(2, 1.5, code=3)
    assert agents.exited(store, 0) is None


def test_last_process_is_known_by_its_end_too() -> None:
    store = dist.HashStore()
    assert agents.last_count(store, 1) == -1
    agents.post_exited(store, 1, Exited(2, 1.5, code=1))  # it was started before the store was, which began anew
    assert agents.last_count(store, 1) == 2
    agents.post_started(store, 1, 3)
    assert agents.last_count(store, 1) == 3


def test_word_lies_at_the_root_of_the_store_whatever_part_the_reader_has() -> None:
    store = dist.HashStore()
    part = dist.PrefixStore("attempt", dist.PrefixStore("default_pg", store))
    word = Exited(0, 3.0, signal="SIGKILL")
    agents.post_exited(store, 2, word)
    assert agents.exited(part, 2) == word
    assert store.check([f"{agents.PREFIX}/exited/2"])


@pytest.mark.parametrize(
    ("status", "code", "by", "shells"),
    [(0, 0, None, 0), (3, 3, None, 3), (-signal.SIGKILL, None, "SIGKILL", 137), (-40, None, "SIG40", 168)],
)
def test_status_is_a_code_or_a_signal(status: int, code: int | None, by: str | None, shells: int) -> None:
    exited = Exited.of(status, count=4, ran_s=0.5)
    assert exited == Exited(4, 0.5, code=code, signal=by)
    assert exited.status == shells
