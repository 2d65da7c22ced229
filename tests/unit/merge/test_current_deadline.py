"""After which time a rank can be late, and where it never is."""

import math

import pytest

from straggle import FirstK, FixedDeadline, LateHandling
from straggle.merge.current_deadline import CurrentDeadline


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
    deadline.members(members)
    assert deadline.late_after_s == expected


def test_first_of_all_ranks_waits_for_all():
    for k, expected in ((1, 2.0), (2, math.inf)):
        deadline = CurrentDeadline(FirstK(k), LateHandling(), 2)
        deadline.seconds = 2.0
        assert deadline.late_after_s == expected
