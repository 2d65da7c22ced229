"""What became of the members between two views, when those between them were not seen."""

from straggle.members.view import DONE, STARTED_AGAIN, Change, Leaving, View

ENDED = Leaving("ended", "its process ended")
SILENT = Leaving("silent", "no sign of life for 2 s")
FIRST = View(0, {0: "a", 1: "b", 2: "c"})


def test_changes_to_the_next_view_are_those_that_it_names():
    following = FIRST.without({2: ENDED})
    assert following.changes_since(FIRST, {}) == (Change.left(2, ENDED),)


def test_changes_over_a_view_that_was_not_seen_are_all_there():
    second = FIRST.without({0: ENDED}).without({1: SILENT})
    expected = (Change.left(0, ENDED), Change.left(1, SILENT))
    assert second.changes_since(FIRST, {(0, False): expected[0]}) == expected
    assert second.changes_since(FIRST, {}) == (Change(0, False, "not known"), expected[1])


def test_rank_whose_loop_was_over_in_a_view_that_was_not_seen_has_that_reason():
    second = FIRST.without({1: DONE}).without({2: DONE})
    assert second.changes_since(FIRST, {}) == (Change.left(1, DONE), Change.left(2, DONE))


def test_rank_that_was_started_again_left_and_joined():
    following = FIRST.with_joined({1: "d"}, step=3, giver=0)
    assert following.changes_since(FIRST, {}) == (
        Change.left(1, STARTED_AGAIN),
        Change(1, True, "came back"),
    )


def test_rank_that_came_and_left_unseen_has_not_changed():
    second = FIRST.without({2: ENDED}).with_joined({2: "c"}, step=3, giver=0)
    assert second.changes_since(FIRST, {}) == ()
