"""For whom a job waits, from what its ranks say of themselves."""

import pytest

from straggle.stuck.states import RankState, blind_words, duration, finding, named, silent_words


def state(kind="stuck", quiet_s=12.0, line="load (train.py:41)", step=120, **others):
    where = f"in {line[:-1]}: x = next(it))"
    return RankState(
        kind, step, others.pop("entered", True), others.pop("busy_s", quiet_s), quiet_s, where, line, **others
    )


WAITS = state("waits", 11.0, "step (train.py:50)")
STUCK = state()
BARRIER = state("collective", 12.0, "evaluate (train.py:60)", 119, entered=False, collective="nccl:barrier number 7")


def test_a_rank_that_others_wait_for_says_where_it_is():
    found = finding(3, {3: STUCK, 0: WAITS, 1: WAITS, 2: WAITS}, range(4), 10.0)
    assert found.words == (
        "rank 3 has been in step 120 for 12 s, in load (train.py:41: x = next(it)); ranks 0, 1, 2 wait for it"
    )
    assert (found.ranks, found.waiting, found.is_waited_for) == ((3,), (0, 1, 2), True)


def test_the_lowest_of_several_at_the_same_line_says_it_for_all():
    states = {0: WAITS, 1: STUCK, 2: STUCK}
    assert finding(1, states, range(3), 10.0).words.startswith("ranks 1, 2 have been in step 120 for 12 s, in load")
    assert finding(1, states, range(3), 10.0).words.endswith("; rank 0 waits for them")
    assert finding(2, states, range(3), 10.0)._replace(words="") == finding(2, states, range(3), 10.0)
    other = {**states, 2: state(line="save (train.py:70)")}
    assert finding(2, other, range(3), 10.0).words.startswith("rank 2 has been")


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({1: STUCK}, None),  # the others are at work
        ({1: STUCK, 0: state(quiet_s=3.0)}, None),
        ({1: STUCK, 0: STUCK}, False),  # all of them, and nobody waits: an evaluation
        ({1: STUCK, 0: WAITS}, True),
        ({1: state(lag=3)}, True),
        ({1: STUCK, 0: state("inside")}, None),  # it may be in a step of another model
    ],
)
def test_a_rank_is_reported_if_it_is_waited_for_or_all_ranks_stand_still(states, expected):
    found = finding(1, states, range(2), 10.0)
    assert (None if found is None else found.is_waited_for) == expected


def test_who_stands_still_with_all_others_learns_of_pause():
    assert "no rank goes on (an evaluation" in finding(0, {0: STUCK, 1: STUCK}, range(2), 10.0).words


def test_a_rank_that_is_stood_in_for_says_how_far_the_others_are():
    found = finding(1, {1: state(lag=3)}, range(2), 10.0)
    assert found.words.endswith("; the others go on without it, by 3 merged steps so far")


def test_ranks_in_a_collective_that_others_have_not_begun_name_these():
    found = finding(0, {0: BARRIER, 2: BARRIER, 3: WAITS}, range(4), 10.0)
    assert found.words == (
        "ranks 0, 2 have been before step 119 for 12 s, in evaluate (train.py:60: x = next(it)), a collective of the "
        "loop's own (nccl:barrier number 7) that ranks 1, 3 have not begun"
    )
    assert finding(2, {0: BARRIER, 2: BARRIER, 3: WAITS}, range(4), 10.0).words == ""


def test_members_in_a_collective_name_the_rank_that_left_and_what_to_write():
    left = "; rank 1 is no member, and it needs all processes that its group began with: write step.log(loss=loss) and"
    words = finding(0, {0: BARRIER, 2: BARRIER}, [0, 2], 10.0, left=[1]).words
    assert f"a collective of the loop's own (nccl:barrier number 7){left}" in words
    assert f"that rank 2 has not begun{left}" in finding(0, {0: BARRIER}, [0, 2], 10.0, left=[1]).words


def test_a_collective_that_all_have_begun_is_the_networks():
    assert finding(0, {0: BARRIER, 1: BARRIER}, range(2), 10.0).words.endswith("does not end: the network is in doubt")


@pytest.mark.parametrize("quiet_s", [12.0, 6.0])
def test_a_rank_in_a_collective_leaves_the_word_to_one_that_is_stuck_outside_of_it(quiet_s):
    states = {0: BARRIER, 1: state(quiet_s=quiet_s)}
    assert finding(0, states, range(2), 10.0) is None
    assert finding(1, {**states, 1: STUCK}, range(2), 10.0).waiting == (0,)


def test_a_long_step_with_a_short_stop_says_both():
    assert state(busy_s=60.0).since == "been in step 120 for 60 s, the last 12 s of it"
    assert state(busy_s=13.0, entered=False).since == "been before step 120 for 12 s"


def test_silent_ranks_are_named_with_what_it_can_be():
    assert silent_words([3], [0, 1], 7, 12.3) == (
        "ranks 0, 1 have waited for rank 3 in step 7 for 12 s; it gives no word of itself: its process is stopped, "
        "something holds its GIL, or its host is gone"
    )
    assert "they give no word of themselves" in silent_words([2, 3], [0], 7, 12.3)
    assert blind_words(12.0).startswith(" (now: for 12 s nothing ran in this process")


def test_states_come_back_from_the_store_as_they_were():
    assert RankState.of_json(BARRIER.as_json()) == BARRIER


def test_words_for_ranks_and_seconds():
    assert [named([3]), named([0, 1]), named(range(9))] == ["rank 3", "ranks 0, 1", "9 ranks (the first of them 0)"]
    assert [duration(0.46), duration(12.4)] == ["0.5 s", "12 s"]
