"""What became of the members between two views, when those between them were not seen."""

from straggle.merge.view import ENDED, Change, View

FIRST = View(0, {0: "a", 1: "b", 2: "c"})


def test_changes_to_the_next_view_are_those_that_it_names():
    following = FIRST.without({2: "its process ended"})
    assert following.changes_since(FIRST, {}) == (Change(2, False, "its process ended"),)


def test_changes_over_a_view_that_was_not_seen_are_all_there():
    second = FIRST.without({0: "its process ended"}).without({1: "no sign of life for 2 s"})
    expected = (Change(0, False, "its process ended"), Change(1, False, "no sign of life for 2 s"))
    assert second.changes_since(FIRST, {(0, False): "its process ended"}) == expected
    assert second.changes_since(FIRST, {}) == (Change(0, False, "not known"), expected[1])


def test_rank_whose_loop_was_over_in_a_view_that_was_not_seen_has_that_reason():
    second = FIRST.without({1: ENDED}).without({2: ENDED})
    assert second.changes_since(FIRST, {}) == (Change(1, False, ENDED), Change(2, False, ENDED))


def test_rank_that_was_started_again_left_and_joined():
    following = FIRST.with_joined({1: "d"}, step=3, giver=0)
    assert following.changes_since(FIRST, {}) == (
        Change(1, False, "was started again"),
        Change(1, True, "came back"),
    )


def test_rank_that_came_and_left_unseen_has_not_changed():
    second = FIRST.without({2: "its process ended"}).with_joined({2: "c"}, step=3, giver=0)
    assert second.changes_since(FIRST, {}) == ()
