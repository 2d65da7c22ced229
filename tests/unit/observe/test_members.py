"""Which member writes what all know, and in which few words a change is counted."""

import pytest
from pages import a_rank, a_step

from straggle.merge.view import TOO_FAR_BEHIND
from straggle.observe.members import read_members, writer_of, writer_of_change
from straggle.report import CHANGE_KINDS, MembersReport


@pytest.mark.parametrize(("absent", "writer"), [((), 0), ((1,), 0), ((0,), 1), ((0, 1), 2), ((0, 1, 2), None)])
def test_lowest_member_writes_a_step_and_who_is_none_knows_of_no_writer(absent, writer):
    assert writer_of(a_step(5, [a_rank(rank, absent=rank in absent) for rank in range(3)])) == writer


@pytest.mark.parametrize(
    ("ranks", "joined", "writer"),
    [((0, 1, 2), (), 0), ((0, 1, 2), (0,), 1), ((0, 1, 2), (0, 1), 2), ((1, 2), (), 1), ((0, 1), (0, 1), 0)],
)
def test_who_was_a_member_before_writes_a_change(ranks, joined, writer):
    assert writer_of_change(MembersReport(3, 7, ranks, 4, joined=dict.fromkeys(joined, "came back"))) == writer


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("its process ended by SIGKILL, after 8.4 s", "ended"),
        ("ended", "ended"),
        ("no sign of life for 2 s", "silent"),
        ("was started again", "restarted"),
        ("returns: rank 1, which was to send it the state of the job, has left", "restarted"),
        (TOO_FAR_BEHIND, "restarted"),
        ("rank 2 raised in step 7, backward: ValueError('bad')", "raised"),
        ("not known", "silent"),
    ],
)
def test_reason_is_counted_as_one_of_a_few_kinds(reason, kind):
    assert MembersReport(1, 7, (0, 1), 3, left={2: reason}).kinds == (kind,)
    assert kind in CHANGE_KINDS


def test_change_in_words_says_who_and_why():
    change = MembersReport(1, 7, (0, 1), 3, left={1: "was started again"}, joined={1: "came back"})
    assert change.kinds == ("restarted", "joined")
    assert str(change) == "rank 1 left: was started again; rank 1 joined: came back (2 of 3 ranks)"


def test_end_of_a_loop_is_no_change_that_is_told():
    assert MembersReport(1, 7, (0, 1), 3, left={2: "ended"}).at_the_end
    assert not MembersReport(1, 7, (0, 1), 3, left={2: "its process ended by SIGKILL, after 3.0 s"}).at_the_end
    assert not MembersReport(1, 7, (0, 1), 3, left={2: "ended"}, joined={1: "came back"}).at_the_end


def test_run_without_changes_has_none(tmp_path):
    assert read_members(tmp_path) == []
