"""Views, who is silent, and who leads: pure decisions. What a step comes to is in `test_repair.py`."""

import json

import pytest

from straggle import Elastic
from straggle.members.views.view import DONE, OF_A_SPARE, STARTED_AGAIN, WATCHED, Change, Leaving, Silence, View, leader

SILENT = Leaving("silent", "no sign of life")
VIEW = View(3, {0: "0-a", 2: "1-b", 3: "0-c"}, (Change(1, False, "ended"), Change(2, True, "came back")), 7, 0)


@pytest.mark.parametrize(("world_size", "least"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (8, 5)])
def test_more_than_half_of_the_ranks_go_on_where_nothing_else_is_said(world_size, least):
    assert Elastic().least(world_size) == least


def test_min_ranks_counts_where_it_is_given():
    assert Elastic(min_ranks=1).least(4) == 1
    assert Elastic(min_ranks=4).least(4) == 4
    with pytest.raises(ValueError, match="min_ranks=5: there are only 4 ranks"):
        Elastic(min_ranks=5).least(4)


# -- views


@pytest.mark.parametrize(
    "view", [VIEW, View(0, {0: "x"}), View(1, {}), VIEW.without({0: Leaving("silent", 'no sign of life, "2" s')})]
)
def test_view_is_read_as_it_was_written(view):
    assert View.decode(view.encode(), 4) == view


def test_views_of_equal_members_are_written_alike():
    assert View(1, {1: "b", 0: "a"}).encode() == View(1, {0: "a", 1: "b"}).encode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no view",
        "{}",
        "[]",
        "null",
        "7",
        '"text"',
        "[1, {}, [], 0, 0]",
        '[1, {}, [], 0, 0, [], [], 0, "", false]',
        '["x", {}, [], 0, 0, [], [], [], [], [], "", false]',
        '[null, {}, [], 0, 0, [], [], [], [], [], "", false]',
        '[1, [], [], 0, 0, [], [], [], [], [], "", false]',
        '[1, {"x": "a"}, [], 0, 0, [], [], [], [], [], "", false]',
        '[1, {}, [["x", true, "", "silent"]], 0, 0, [], [], [], [], [], "", false]',
        '[1, {}, [[1, true, "", "because"]], 0, 0, [], [], [], [], [], "", false]',
        '[1, {}, [[1, true]], 0, 0, [], [], [], [], [], "", false]',
        '[1, {}, 5, 0, 0, [], [], [], [], [], "", false]',
        '[1, {}, [5], 0, 0, [], [], [], [], [], "", false]',
        "[1, {}, [], 0, 0, 0]",
        '[1e400, {}, [], 0, 0, [], [], [], [], [], "", false]',
        "[" * 5000,
    ],
)
def test_what_is_no_view_is_a_value_error(text):
    with pytest.raises(ValueError, match="has no view of its members, but"):
        View.decode(text, 4)


@pytest.mark.parametrize(("generation", "rank"), [(-1, 0), (1, 4), (1, -1)])
def test_view_of_another_job_is_a_value_error(generation, rank):
    with pytest.raises(ValueError, match="in a job of 4 ranks"):
        View.decode(json.dumps([generation, {rank: "a"}, [], 0, 0, [], [], [], [], [], "", False]), 4)


def test_members_leave_with_their_reasons():
    view = VIEW.without({2: DONE, 1: SILENT, 0: SILENT})
    changes = (Change.left(0, SILENT), Change.left(2, DONE))
    assert view == View(4, {3: "0-c"}, changes, VIEW.step, ended=frozenset({2}), before=VIEW.changes[:1])
    assert view.joined == frozenset()


def test_ranks_join_from_a_step_on():
    view = VIEW.with_joined({1: "2-d"}, step=9, giver=3)
    assert view.members == {**VIEW.members, 1: "2-d"}
    assert (view.generation, view.step, view.giver, view.joined) == (4, 9, 3, {1})
    assert view.changes == (Change(1, True, "came back"),)


def test_newer_incarnation_puts_the_older_one_of_its_rank_out():
    view = VIEW.with_joined({2: "2-d"}, step=9, giver=0)
    assert view.members[2] == "2-d"
    assert view.changes == (Change.left(2, STARTED_AGAIN), Change(2, True, "came back"))
    assert view.joined == {2}


def test_view_for_nobody_is_a_new_generation():
    view = VIEW.with_joined({}, step=9, giver=0)
    assert (view.generation, view.members, view.joined) == (4, VIEW.members, frozenset())


def test_job_is_not_short_of_ranks_whose_loops_are_over():
    view = View(1, dict.fromkeys(range(4), "x")).without({0: DONE}).without({2: DONE})
    assert view.ended == {0, 2}
    assert not view.shortfall(3, with_returning=False)
    assert not view.without({1: DONE}).shortfall(3, with_returning=False)
    assert not view.without({1: SILENT}).shortfall(3, with_returning=True)
    assert view.without({1: SILENT}).shortfall(4, with_returning=True)
    assert not view.without({1: SILENT}).is_done
    assert view.without({1: SILENT, 3: DONE}).is_done
    back = view.with_joined({0: "y"}, step=7, giver=1)
    assert back.ended == {2}
    assert View.decode(back.encode(), 4) == back


def test_job_is_short_of_ranks_that_return_only_after_a_moment():
    view = View(1, dict.fromkeys(range(4), "x")).without({0: SILENT}).without({3: Leaving("returns", "too late")})
    assert view.returning == {3}
    assert not view.shortfall(3, with_returning=True)
    assert view.shortfall(3, with_returning=False)
    back = view.with_joined({3: "y"}, step=7, giver=1)
    assert (back.returning, View.decode(back.encode(), 4)) == (frozenset(), back)


@pytest.mark.parametrize("size", range(1, 9))
def test_each_member_is_watched_by_those_before_it_in_the_ring(size):
    view = View(1, {3 * place: "x" for place in range(size)})  # a job whose other ranks are absent
    watched = {rank: view.watched_by(rank) for rank in view.ranks}
    for rank, others in watched.items():
        following = [(rank // 3 + step) % size * 3 for step in range(1, size)]
        assert list(others) == following[:WATCHED]
    watchers = [sum(rank in others for others in watched.values()) for rank in view.ranks]
    assert watchers == [min(WATCHED, size - 1)] * size


@pytest.mark.parametrize(("healing", "leads"), [((), 0), ((0,), 2), ((0, 2), 3), ((0, 2, 3), 0), ((3,), 0), ((1,), 0)])
def test_lowest_member_that_has_its_state_leads(healing, leads):
    assert leader(VIEW, healing) == leads


def test_changes_of_views_that_a_rank_has_missed_are_seen():
    first = View(1, {0: "0-a", 1: "0-b", 2: "0-c"})
    second = first.without({1: SILENT})
    third = second.without({2: DONE})
    fourth = third.with_joined({1: "1-d", 3: "0-e"}, step=7, giver=0)
    assert second.changes_since(first, {}) == (Change.left(1, SILENT),)
    assert third.changes_since(first, {}) == (Change.left(1, SILENT), Change.left(2, DONE))
    assert third.again().changes_since(first, {}) == third.changes_since(first, {})
    assert View.decode(third.encode(), 4).before == (Change.left(1, SILENT),)
    assert fourth.changes_since(first, {})[0] == Change(1, False, "not known", "restarted")
    heard = {(1, False): Change.left(1, SILENT)}
    assert fourth.changes_since(first, heard) == (
        Change.left(1, SILENT),
        Change.left(2, DONE),
        Change(1, True, "came back"),
        Change(3, True, "came back"),
    )
    assert fourth.changes_since(fourth, heard) == ()
    both_done = first.without({1: DONE}).without({2: DONE})
    assert both_done.changes_since(first, {}) == (Change.left(1, DONE), Change.left(2, DONE))
    again = first.with_joined({1: "1-d"}, step=3, giver=0)  # it was started again
    assert again.changes_since(first, {}) == (Change.left(1, STARTED_AGAIN), Change(1, True, "came back"))
    unseen = second.with_joined({1: "0-b"}, step=3, giver=0)
    assert unseen.changes_since(first, {}) == ()


# -- silence


def looked(silence, *looks):
    """What is silent for longer than 1 s after these looks: (now, the signs of the members)."""
    for now, signs in looks:
        silence.look(now, signs)
    return silence.longer_than(1.0)


def every(interval_s, begin, end, signs):
    return [(begin + n * interval_s, signs) for n in range(round((end - begin) / interval_s) + 1)]


def test_member_without_a_new_sign_is_silent_after_that_time():
    signs = {1: "a", 2: "b"}
    assert looked(Silence(0.25), *every(0.25, 10.0, 11.0, signs)) == ()  # not longer than 1 s
    assert looked(Silence(0.25), *every(0.25, 10.0, 11.25, signs)) == (1, 2)


def test_each_sign_ends_a_silence():
    before, after = every(0.25, 10.0, 11.25, {1: "a", 2: "b"}), every(0.25, 11.5, 12.25, {1: "a", 2: "c"})
    assert looked(Silence(0.25), *before, *after) == (1,)
    assert looked(Silence(0.25), *before, *after, *every(0.25, 12.5, 12.75, {1: "a", 2: "c"})) == (1, 2)


def test_who_looks_first_knows_of_no_silence():
    assert looked(Silence(0.25), (1000.0, {1: "a"})) == ()


def test_own_stop_is_not_the_silence_of_others():
    silence = Silence(0.25)
    assert looked(silence, *every(0.25, 0.0, 1.0, {1: "a"})) == ()
    assert looked(silence, (60.0, {1: "a"})) == ()  # it was stopped for a minute
    assert looked(silence, *every(0.25, 60.25, 61.0, {1: "a"})) == ()
    assert looked(silence, (61.25, {1: "a"})) == (1,)


def test_slow_look_is_no_stop():
    looks = every(1.0, 0.0, 2.0, {1: "a"})  # four intervals late each time
    assert looked(Silence(0.25), *looks) == (1,)


def test_member_that_is_watched_no_more_is_forgotten():
    silence = Silence(0.25)
    assert looked(silence, *every(0.25, 0.0, 1.25, {1: "a"}), (1.5, {2: "b"})) == ()
    assert looked(silence, (1.75, {1: "a", 2: "b"})) == ()  # it has come back: its time begins again


def test_spare_that_took_a_place_is_said_to_have():
    view = VIEW.with_joined({1: f"2{OF_A_SPARE}x", 5: "1-y"}, step=9, giver=0)
    assert {own.rank: own.reason for own in view.changes if own.joined} == {
        1: "a spare took its place",
        5: "came back",
    }
