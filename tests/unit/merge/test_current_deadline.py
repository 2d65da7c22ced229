"""After which time a rank can be late, and where it never is."""

import math

import pytest
import torch
from telemetry_rows import row_of

from straggle import Deadline, FirstK, FixedDeadline, LateHandling, NextDeadline, Shadow
from straggle.merge.late.current_deadline import CurrentDeadline
from straggle.merge.rows.table import Table


@pytest.mark.parametrize(
    ("quorum", "members", "expected"),
    [
        (None, 4, 2.0),
        (3, 4, 2.0),
        (4, 4, math.inf),
        (3, 3, math.inf),
        (3, 2, math.inf),
        (None, 2, 2.0),
        (None, 1, math.inf),
    ],
)
def test_no_rank_is_late_where_the_quorum_is_of_all_members(quorum, members, expected):
    deadline = CurrentDeadline(FixedDeadline(2.0), LateHandling(quorum=quorum), 4)
    deadline.seconds = 2.0
    deadline.of_ranks(members)
    assert deadline.late_after_s == expected


def test_first_of_all_ranks_waits_for_all():
    for k, expected in ((1, 2.0), (2, math.inf)):
        deadline = CurrentDeadline(FirstK(k), LateHandling(), 2)
        deadline.seconds = 2.0
        assert deadline.late_after_s == expected


def table_of(**fields):
    """Of two ranks without stages."""
    row = row_of(compute_s=1.0, busy_s=1.0, **fields)
    return Table(torch.stack([row.encode()] * 2), 0)


def test_policy_sees_that_work_is_dealt_if_it_is_said():
    told, alone = (CurrentDeadline(FixedDeadline(2.0), LateHandling(), 2) for _ in range(2))
    told.work_is_dealt()
    for deadline in (told, alone):
        deadline.decide(table_of())
    assert (told.history.dealt, alone.history.dealt) == (True, False)
    assert told.history.last(1).dealt


def test_whether_all_take_as_long_counts_from_a_step_on_that_no_rank_merges_before_it_has_heard():
    deadline = CurrentDeadline(FixedDeadline(2.0), LateHandling(max_lag=3), 2)
    deadline.work_is_dealt()
    seen = []
    for step in range(14):
        deadline.decide(table_of())
        seen.append(deadline.history.evenly)
        if step in (2, 7):  # a rank's merges may be three steps ahead of the word about step 2
            deadline.work_is_dealt(evenly=step == 7, after=step)
    assert seen == [True] * 6 + [False] * 5 + [True] * 3


class Grows(Deadline):
    def decide(self, history):
        n = history.num_steps
        return NextDeadline(0.1 * n, predicted_drop=0.01 * n, after_quorum_s=0.2 * n)


@pytest.mark.parametrize("policy", [Grows, lambda: Shadow(Grows())], ids=["enforced", "shadow"])
@pytest.mark.parametrize("late_by", ["host", "device"])
def test_peer_that_is_given_the_history_and_what_is_decided_goes_on_as_its_giver(policy, late_by):
    giver, peer = (CurrentDeadline(policy(), LateHandling(late_by=late_by), 2) for _ in range(2))
    peer.decide(table_of())  # a step that it merged before it had the state
    for _ in range(3):
        giver.decide(table_of())
    peer.restore(giver.history, giver.decided)
    assert (peer.after_quorum_s, peer.rules) == (pytest.approx(0.6), giver.rules)
    for _ in range(2):
        assert [repr(own) for own in peer.decided.items()] == [repr(own) for own in giver.decided.items()]
        for deadline in (giver, peer):
            deadline.decide(table_of())
