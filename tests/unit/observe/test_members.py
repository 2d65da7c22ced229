"""Which member writes what all know, and in which few words a change is counted."""

import pytest
from pages import a_rank, a_step

from straggle.observe.members import read_members, writer_of_change
from straggle.report import CHANGE_KINDS, LEAVING_KINDS, MembersReport


@pytest.mark.parametrize(("absent", "writer"), [((), 0), ((1,), 0), ((0,), 1), ((0, 1), 2), ((0, 1, 2), None)])
def test_lowest_member_writes_a_step_and_who_is_none_knows_of_no_writer(absent, writer):
    assert a_step(5, [a_rank(rank, absent=rank in absent) for rank in range(3)]).lowest_rank == writer


@pytest.mark.parametrize(
    ("ranks", "joined", "writer"),
    [((0, 1, 2), (), 0), ((0, 1, 2), (0,), 1), ((0, 1, 2), (0, 1), 2), ((1, 2), (), 1), ((0, 1), (0, 1), 0)],
)
def test_who_was_a_member_before_writes_a_change(ranks, joined, writer):
    assert writer_of_change(MembersReport(3, 7, ranks, 4, joined=dict.fromkeys(joined, "came back"))) == writer


@pytest.mark.parametrize(
    ("kind", "counted"),
    [
        ("done", "ended"),
        ("ended", "ended"),
        ("silent", "silent"),
        ("raised", "raised"),
        ("restarted", "restarted"),
        ("returns", "restarted"),
        ("slow", "slow"),
        ("link", "link"),
        ("notice", "notice"),
    ],
)
def test_leaving_is_counted_as_one_of_a_few_kinds_whatever_the_words(kind, counted):
    assert MembersReport(1, 7, (0, 1), 3, left={2: "ended"}, left_kinds={2: kind}).kinds == (counted,)
    assert counted in CHANGE_KINDS
    assert kind in LEAVING_KINDS


def test_change_in_words_says_who_and_why():
    change = MembersReport(
        1, 7, (0, 1), 3, left={1: "was started again"}, joined={1: "came back"}, left_kinds={1: "restarted"}
    )
    assert change.kinds == ("restarted", "joined")
    assert str(change) == "rank 1 left: was started again; rank 1 joined: came back (2 of 3 ranks)"


def test_end_of_a_loop_is_no_change_that_is_told():
    done = {"left": {2: "ended"}, "left_kinds": {2: "done"}}
    assert MembersReport(1, 7, (0, 1), 3, **done).at_the_end
    assert not MembersReport(1, 7, (0, 1), 3, left={2: "ended"}, left_kinds={2: "ended"}).at_the_end
    assert not MembersReport(1, 7, (0, 1), 3, joined={1: "came back"}, **done).at_the_end


def test_run_without_changes_has_none(tmp_path):
    assert read_members(tmp_path) == []
