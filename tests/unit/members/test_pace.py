"""How long a state that is sent to a newcomer waits for gradients."""

import pytest
from clock import Clock

from straggle.members.healed.pace import Pace


def paused(pace, clock, sent_s):
    began_at = clock()
    pace.pause(1000, sent_s)
    return clock() - began_at


@pytest.mark.parametrize(
    ("merging_s", "pressing_at", "waited"),
    [
        (0.0, 1e9, 0.0),  # no gradients are on their way
        (0.3, 1e9, 0.3),  # until they have arrived
        (1e9, 1e9, 1.2),  # gradients never end: six times what the chunk took
        (1e9, 0.0, 0.0),  # the newcomer has waited long enough
        (1e9, 0.5, 0.5),
    ],
)
def test_pause_ends_with_the_gradients_that_slow_it_down_or_after_six_times_the_chunk(merging_s, pressing_at, waited):
    clock = Clock()
    began_at = clock()
    merges = [False]
    pace = Pace(
        lambda: merges[0] and clock() < began_at + merging_s,
        lambda: clock() >= began_at + pressing_at,
        rests_s=0,
        now=clock,
        sleep=clock.advance,
    )
    assert paused(pace, clock, 0.1) == 0  # so it is known what it takes alone
    merges[0] = True
    assert paused(pace, clock, 0.2) == pytest.approx(waited, abs=0.002)


def test_state_that_gradients_do_not_slow_down_goes_in_turns_with_them():
    clock = Clock()
    pace = Pace(lambda: True, lambda: False, rests_s=0, now=clock, sleep=clock.advance)
    assert paused(pace, clock, 0.2) == pytest.approx(0.2, abs=0.002)  # nothing better is known
    assert paused(pace, clock, 0.22) == pytest.approx(0.22, abs=0.002)
    assert paused(pace, clock, 0.1) == pytest.approx(0.1, abs=0.002)
    assert paused(pace, clock, 0.2) == pytest.approx(1.2, abs=0.002)


def test_no_pause_is_as_long_as_the_newcomer_waits_for_a_chunk():
    clock = Clock()
    pace = Pace(lambda: True, lambda: False, rests_s=0, now=clock, sleep=clock.advance)
    assert paused(pace, clock, 30.0) == pytest.approx(5.0, abs=0.002)


def test_state_travels_for_a_fifth_of_the_time_until_it_has_rested_for_long_enough():
    clock = Clock()
    pace = Pace(lambda: False, lambda: False, rests_s=1.0, now=clock, sleep=clock.advance)
    assert paused(pace, clock, 0.1) == pytest.approx(0.4, abs=0.002)
    assert paused(pace, clock, 0.1) == pytest.approx(0.4, abs=0.002)
    assert paused(pace, clock, 0.1) == pytest.approx(0.2, abs=0.003)
    assert paused(pace, clock, 0.1) == 0


def test_rest_is_part_of_the_wait_for_a_gap():
    clock = Clock()
    pace = Pace(lambda: clock() < 0.3, lambda: False, rests_s=1.0, now=clock, sleep=clock.advance)
    assert paused(pace, clock, 0.1) == pytest.approx(0.4, abs=0.002)
    merges_long = Pace(lambda: True, lambda: False, rests_s=0.2, now=clock, sleep=clock.advance)
    assert paused(merges_long, clock, 0.2) == pytest.approx(0.2, abs=0.002)
    assert paused(merges_long, clock, 0.4) == pytest.approx(2.4, abs=0.002)  # slowed down, and nothing left of its rest


def test_state_that_the_newcomer_has_waited_for_long_enough_rests_no_more():
    clock = Clock()
    began_at = clock()
    pace = Pace(lambda: False, lambda: clock() >= began_at + 0.1, rests_s=9.0, now=clock, sleep=clock.advance)
    assert paused(pace, clock, 0.2) == pytest.approx(0.1, abs=0.002)
    assert paused(pace, clock, 0.2) == 0
