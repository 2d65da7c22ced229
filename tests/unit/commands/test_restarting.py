"""What becomes of a worker whose process has ended: a table of cases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from straggle.commands.launching.launcher import status_of
from straggle.commands.launching.restarting import (
    RestartRules,
    StartAgain,
    StaysDown,
    failed_again,
    job_ends,
    next_start,
)
from straggle.members.agents import DO_NOT_RESTART, Exited

RULES = RestartRules(max_restarts=3, delay_s=0.5)


def ended(code: int | None = None, *, by: str | None = None, count: int = 1, ran_s: float = 2.0) -> Exited:
    return Exited(count, ran_s, code=code, signal=by)


@pytest.mark.parametrize(
    ("exited", "restarts", "then"),
    [
        (ended(0), 0, StaysDown()),
        (ended(0), 3, StaysDown()),
        (ended(1), 0, StartAgain(0.5, 1)),
        (ended(1), 1, StartAgain(1.0, 2)),
        (ended(by="SIGKILL"), 2, StartAgain(2.0, 3)),
        (ended(by="SIGKILL"), 3, StaysDown("all its 3 restarts are used")),
        (ended(1, ran_s=59.0), 3, StaysDown("all its 3 restarts are used")),
        (ended(1, ran_s=60.0), 3, StartAgain(0.5, 1)),
        (ended(2, count=0), 0, StaysDown("its configuration is wrong, as it said")),
        (ended(2, ran_s=600.0), 3, StaysDown("its configuration is wrong, as it said")),
        (ended(DO_NOT_RESTART), 0, StaysDown("it said that the job is over")),
        (ended(DO_NOT_RESTART, ran_s=600.0), 0, StaysDown("it said that the job is over")),
    ],
)
def test_worker_is_started_again_unless_it_is_done_or_has_used_its_restarts(
    exited: Exited, restarts: int, then: StartAgain | StaysDown
) -> None:
    assert next_start(exited, restarts, RULES) == then


@pytest.mark.parametrize(
    ("exited", "ends"),
    [
        (ended(2, count=0), True),
        (ended(2, count=1), False),  # the job has begun, and goes on without it
        (ended(1, count=0), False),
        (ended(by="SIGINT", count=0), False),
        (ended(0, count=0), False),
    ],
)
def test_worker_that_is_refused_before_the_job_begins_ends_it(exited: Exited, ends: bool) -> None:
    assert job_ends(exited) is ends


def test_delay_doubles_up_to_half_a_minute() -> None:
    rules = RestartRules(max_restarts=100, delay_s=1.0)
    delays = [next_start(ended(1), restarts, rules) for restarts in range(8)]
    assert [then.delay_s for then in delays if isinstance(then, StartAgain)] == [1, 2, 4, 8, 16, 30, 30, 30]
    assert next_start(ended(1), 99, rules) == StartAgain(30.0, 100)


def test_worker_without_restarts_stays_down() -> None:
    assert next_start(ended(1), 0, RestartRules(max_restarts=0)) == StaysDown("all its 0 restarts are used")


@pytest.mark.parametrize(
    ("last", "useless"),
    [
        ([ended(1), ended(1)], True),
        ([ended(1)], True),
        ([ended(1), None], False),  # one runs
        ([ended(1), ended(0)], False),  # one is done
        ([ended(1), ended(3)], False),  # not the same error
        ([ended(1), ended(1, count=0)], False),  # the first time for one of them
        ([ended(1), ended(1, ran_s=10.0)], False),  # one came further
        ([ended(by="SIGKILL"), ended(by="SIGKILL")], False),  # from outside
        ([ended(DO_NOT_RESTART), ended(DO_NOT_RESTART)], False),  # they stay down anyway
    ],
)
def test_starting_again_is_of_no_use_where_all_have_failed_twice_in_the_same_way(
    last: list[Exited | None], useless: bool
) -> None:
    assert failed_again(last) is useless


@pytest.mark.parametrize(
    ("exits", "expected"),
    [
        ([], 0),
        ([ended(by="SIGKILL"), ended(DO_NOT_RESTART)], DO_NOT_RESTART),
        ([ended(DO_NOT_RESTART), ended(2)], 2),
        ([ended(3), ended(1)], 3),
    ],
)
def test_status_of_a_job_that_a_rank_has_ended_is_not_that_of_one_that_died(exits: list[Exited], expected: int) -> None:
    agents: Any = [SimpleNamespace(rank=rank, why="stays down", exited=own) for rank, own in enumerate(exits)]
    assert status_of(agents) == expected
