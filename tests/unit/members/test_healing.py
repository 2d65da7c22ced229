"""When a rank that waits for its state leaves again, because that will not come or is of no use."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from straggle.members.healing import Healing
from straggle.members.view import View

LET_IN = View(3, {0: "a"}, job="j").with_joined({1: "b"}, step=9, giver=0)


def reasons(training_step: int, takes_part_from: int) -> list[str]:
    """Why rank 1, which `LET_IN` has let in, leaves before it has its state."""
    left: list[str] = []
    membership = SimpleNamespace(
        view=LET_IN,
        spawn=lambda *_: None,
        leave=lambda why, **_: left.append(why.reason),
    )
    rank = SimpleNamespace(
        training=SimpleNamespace(step=training_step), merging=SimpleNamespace(takes_part_from=takes_part_from)
    )
    channel, member = SimpleNamespace(membership=membership), SimpleNamespace(fell_behind=False)
    parts: list[Any] = [channel, rank, SimpleNamespace(), member, SimpleNamespace(), None, None, None]
    healing = Healing(*parts)
    healing.let_in(LET_IN)
    healing.leave_if_lost()
    return left


def test_rank_that_went_on_before_it_was_let_in_leaves_again() -> None:
    """As one does that was told to end: its state would come too late, and it would wait for it for ever."""
    assert reasons(10, 9) == ["returns: it was told to end, and went on to step 10 without the state of step 9"]


@pytest.mark.parametrize(("training_step", "takes_part_from"), [(9, 9), (4, 9), (10, sys.maxsize)])
def test_rank_that_waits_for_its_state_stays(training_step: int, takes_part_from: int) -> None:
    assert reasons(training_step, takes_part_from) == []
