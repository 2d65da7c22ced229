"""How long a rank is waited for: by where it is, and by its signs of life."""

import math

import pytest

from straggle.merge.wire.patience import Awaited, Heard, Patience, Sign, judged, place_in_replica, verdict

USUAL = Patience(give_up_s=300.0, group_s=1800.0)
SHORT_GROUP = Patience(give_up_s=300.0, group_s=60.0)


@pytest.mark.parametrize(
    ("place", "waited_s", "named_s", "expected"),
    [
        ("inside", 3.9, 0.0, "wait"),
        ("inside", 4.0, 0.0, "name"),
        ("inside", 63.9, 4.0, "wait"),
        ("inside", 64.0, 4.0, "name"),
        ("inside", 299.0, 290.0, "wait"),
        ("inside", 300.0, 290.0, "give up"),
        (None, 299.0, 290.0, "wait"),
        (None, 300.0, 290.0, "give up"),
        ("outside", 4.0, 0.0, "name"),
        ("outside", 300.0, 290.0, "wait"),
        ("outside", 1799.0, 1730.0, "name"),
        ("outside", 1800.0, 1799.0, "give up"),
        ("paused", 4.0, 0.0, "name"),
        ("paused", 1e6, 1e6 - 61, "name"),
        ("paused", 1e6, 1e6 - 59, "wait"),
    ],
)
def test_a_rank_is_waited_for_by_where_it_is_and_named_all_the_while(place, waited_s, named_s, expected):
    assert verdict(place, waited_s, USUAL, named_s) == expected


def test_a_rank_outside_of_a_step_is_not_given_up_before_one_inside():
    assert verdict("outside", 299.0, SHORT_GROUP, 290.0) == "wait"
    assert verdict("outside", 300.0, SHORT_GROUP, 290.0) == "give up"


@pytest.mark.parametrize(
    ("awaited", "waited_s", "why"),
    [
        ([Awaited(1, "outside")], 1000.0, ""),
        ([Awaited(1, "outside")], 1800.0, "rank 1 is alive and outside of a step: given up after 1800 s, the process"),
        ([Awaited(1, "inside", 300.0)], 300.0, "rank 1 is in a step: given up after give_up_s=300 (LateHandling)"),
        ([Awaited(1, None)], 300.0, "rank 1 gives no sign of life: given up after give_up_s=300"),
        # who comes back from a long evaluation has the time for its step
        ([Awaited(1, "inside", 3.0)], 1500.0, ""),
        ([Awaited(1, None, 20.0)], 1500.0, ""),
        ([Awaited(1, "paused"), Awaited(2, "outside", 5.0)], 1e6, ""),
        ([Awaited(1, "paused"), Awaited(2, "inside", 400.0)], 1e6, "rank 2 is in a step: given up"),
        ([], 300.0, "given up after give_up_s=300"),
        ([], 299.0, ""),
    ],
)
def test_a_wait_is_in_vain_if_one_of_its_ranks_is_given_up(awaited, waited_s, why):
    then, said = judged(awaited, waited_s, USUAL)
    assert (then == "give up") == bool(why)
    assert said.startswith(why) if why else not said


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("inside", "rank 3 is in a step; the limit is give_up_s=300 (LateHandling)"),
        (None, "rank 3 gives no sign of life; the limit is give_up_s=300 (LateHandling)"),
        (
            "outside",
            "rank 3 is alive and outside of a step; the limit is 1800 s, the process group's own limit "
            "(init_process_group(timeout=...))",
        ),
        ("paused", "rank 3 is in model.pause(), for which there is no limit"),
    ],
)
def test_words_say_where_a_rank_is_and_which_limit_there_is(place, words):
    assert Awaited(3, place).words(USUAL) == words


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        (("inside", 50.0), [Awaited(1, "outside", 40.0)], ("outside", 40.0)),
        (("inside", 50.0), [Awaited(1, "inside", 40.0), Awaited(2, "paused", 60.0)], ("paused", 60.0)),
        (("inside", 50.0), [Awaited(1, "inside", 40.0)], ("inside", 50.0)),
        (("inside", 50.0), [Awaited(1, None)], ("inside", 50.0)),
        (("outside", 50.0), [Awaited(1, "paused", 40.0)], ("outside", 50.0)),
    ],
)
def test_rank_in_a_step_waits_for_those_that_shard_its_copy(own, others, expected):
    assert place_in_replica(own, others) == expected


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_rank_gives_signs_of_life_while_its_word_changes():
    clock = Clock()
    heard = Heard(10.0, clock)
    assert heard.of(0, 4, "") == Awaited(4, None)
    for number in range(30):
        clock.now += 1.0
        assert heard.of(0, 4, Sign(number, "outside", float(number)).word()) == Awaited(4, "outside", float(number))
    last = Sign(29, "outside", 29.0).word()
    clock.now += 9.0
    assert heard.of(0, 4, last) == Awaited(4, "outside", 38.0)
    clock.now += 1.0
    assert heard.of(0, 4, last) == Awaited(4, None, 10.0)  # and is waited for from its last sign on


def test_a_word_of_a_rank_that_was_gone_before_is_no_sign_of_life():
    clock = Clock()
    heard, old = Heard(10.0, clock), Sign(7, "paused", 3.0).word()
    heard.of(0, 0, old)
    clock.now += 10.0
    assert heard.of(0, 0, old) == Awaited(0, None, math.inf)


def test_silence_that_counts_is_no_longer_than_ranks_are_waited_for():
    assert [Patience(give_up_s, 0.0).silent_s for give_up_s in (1.0, 5.0, 300.0)] == [2.0, 5.0, 10.0]
