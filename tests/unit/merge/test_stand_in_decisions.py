"""P2 as a table: what a stand-in does in every situation of its rank. No threads, no ranks, no clock.

The step began at 100 s; its deadline is 10 s, so that peers want to know of a finished rank from 109.9 s on, and the
stand-in asks for them from 109.95 s on.
"""

import math
from dataclasses import replace

import pytest

from straggle.merge.late.lateness import (
    Ask,
    End,
    GiveBack,
    Limits,
    Post,
    Situation,
    Sleep,
    Stop,
    SubmitForStuck,
    decide,
    post_at,
)
from straggle.merge.wire.long_wait import LONG_S

LIMITS = Limits(deadline_s=10.0, after_quorum_s=0.0, grace_s=0.5, max_lag=2)
BETWEEN = Situation(merged_at=100.0, busy_since=100.0)  # the training thread has not entered the step
ENTERED = replace(BETWEEN, entered=True, clock_from=101.0, busy_since=101.0)
SUBMITTED = replace(ENTERED, submitted=True)
BEHIND = replace(ENTERED, lag=1)
NOT_STUCK = {"busy_since": math.inf}  # keeps what is said of a stuck rank out of a row

POOL = {"deadline_s": math.inf, "unentered_s": 10.0}


def case(name, now, at, expected, **limits):
    return pytest.param(now, at, replace(LIMITS, **limits), expected, id=name)


def quiet(at, **changes):
    return replace(at, **{**NOT_STUCK, **changes})


TABLE = [
    # before anything is due
    case("sleeps until peers want to know", 109.0, quiet(ENTERED), Sleep(109.9)),
    case("sleeps for a while only, to see whether the rank is stuck", 102.0, quiet(ENTERED), Sleep(102.0 + LONG_S)),
    case("the first step waits for everyone", 500.0, quiet(ENTERED), Sleep(500.0 + LONG_S), deadline_s=math.inf),
    case("between post and ask it sleeps until it asks", 109.92, quiet(BETWEEN), Sleep(109.95)),
    # asking whether a quorum waits
    case("asks shortly before the deadline of a rank that has not entered", 109.95, quiet(BETWEEN), Ask()),
    case("a rank that has entered has its own clock", 109.95, quiet(ENTERED), Sleep(110.95)),
    case("and is asked for shortly before that is over", 110.95, quiet(ENTERED), Ask()),
    case("a rank that comes back in mid-step has its peers' clock", 109.95, quiet(ENTERED, clock_from=100.0), Ask()),
    case("asks again when the deadline is over", 110.97, quiet(ENTERED, asked_at=110.96), Sleep(111.0)),
    case("and then again", 111.0, quiet(ENTERED, asked_at=110.96), Ask()),
    case("of a short step it asks later", 100.0088, quiet(BETWEEN), Sleep(100.009), deadline_s=0.01),
    case("and not twice within 2 ms", 100.0091, quiet(BETWEEN, asked_at=100.009), Sleep(100.011), deadline_s=0.01),
    case("soon after that", 111.001, quiet(ENTERED, asked_at=111.0), Sleep(111.002)),
    case("less often after half a second", 111.501, quiet(ENTERED, asked_at=111.5), Sleep(111.5 + 0.012)),
    case("at most every 22 ms", 211.001, quiet(ENTERED, asked_at=211.0), Sleep(211.022)),
    case("an answer from before a later entry does not count", 112.0, quiet(ENTERED, clock_from=111, asked_at=110.0),
         Sleep(112.0 + LONG_S)),
    # stopping and standing in
    case("is not stopped before its deadline though a quorum waits", 110.96, quiet(ENTERED, waited_since=105.0),
         Sleep(111.0)),
    case("is stopped when its deadline is over and a quorum waits", 111.0, quiet(ENTERED, waited_since=105.0), Stop()),
    case("has its grace once it is stopped", 111.1, quiet(ENTERED, waited_since=105.0, stopped=True), Sleep(111.5)),
    case("is stood in for when the grace is over", 111.5, quiet(ENTERED, waited_since=105.0, stopped=True),
         SubmitForStuck()),
    case("is stood in for even where it was not stopped in time", 111.5, quiet(ENTERED, waited_since=105.0),
         SubmitForStuck()),
    case("deadline and grace of a rank that has not entered count from the merge", 110.5,
         quiet(BETWEEN, waited_since=105.0), SubmitForStuck()),
    case("a rank that has not entered is not stopped", 110.2, quiet(BETWEEN, waited_since=105.0), Sleep(110.5)),
    case("time after the quorum is left to it", 111.0, quiet(ENTERED, waited_since=110.96), Sleep(111.96),
         after_quorum_s=1.0),
    case("is stopped when that is over", 111.96, quiet(ENTERED, waited_since=110.96), Stop(), after_quorum_s=1.0),
    case("its grace begins then", 112.0, quiet(ENTERED, waited_since=110.96, stopped=True), Sleep(112.46),
         after_quorum_s=1.0),
    case("a quorum that came late leaves the grace whole", 120.0, quiet(ENTERED, waited_since=120.0, stopped=True),
         Sleep(120.5)),
    case("with max_lag=0 it is stopped", 111.0, quiet(ENTERED, waited_since=105.0), Stop(), max_lag=0),
    case("and never stood in for", 900.0, quiet(ENTERED, waited_since=105.0, stopped=True), Sleep(900.0 + LONG_S),
         max_lag=0),
    # a rank that is behind
    case("of a rank that is behind it asks at once", 100.0, quiet(BEHIND), Ask()),
    case("and is stood in for as soon as a quorum waits", 100.3, quiet(BEHIND, waited_since=100.2), SubmitForStuck()),
    case("but for the time after the quorum", 100.3, quiet(BEHIND, waited_since=100.2), Sleep(100.7),
         after_quorum_s=0.5),
    case("asks for it less often the longer the step takes", 101.001, quiet(BEHIND, asked_at=101.0), Sleep(101.022)),
    case("at max_lag its peers wait", 900.0, quiet(BEHIND, lag=2), Sleep(900.0 + LONG_S)),
    case("at max_lag nobody submits though a quorum waits", 900.0, quiet(BEHIND, lag=2, waited_since=150.0),
         Sleep(900.0 + LONG_S)),
    case("is waited for under a deadline that waits for everyone", 100.0, quiet(BEHIND), Sleep(100.0 + LONG_S),
         deadline_s=math.inf),
    case("a rank that is about to take the step it merged itself is not stuck in it", 110.2,
         quiet(ENTERED, entered=False, taking=True, lag=1, waited_since=105.0), Sleep(110.5)),
    case("the same rank is stuck in it where it was stood in for", 110.2, quiet(ENTERED, lag=1, waited_since=105.0),
         SubmitForStuck()),
    # where the ranks draw from a pool, a rank that has not come is not waited for, though there is no deadline
    case("of a rank that has not come to a pool it asks", 109.95, quiet(BETWEEN), Ask(), **POOL),
    case("and sleeps until then", 105.0, quiet(BETWEEN), Sleep(105.0 + LONG_S), **POOL),
    case("and it is stood in for, without grace", 110.0, quiet(BETWEEN, waited_since=109.97), SubmitForStuck(),
         **POOL),
    case("one that has come has as long as it needs", 900.0, quiet(ENTERED, waited_since=109.97),
         Sleep(900.0 + LONG_S), **POOL),
    case("one that is behind has nothing to give", 100.3, quiet(BEHIND, waited_since=100.2), SubmitForStuck(), **POOL),
    case("with max_lag=0 it is waited for", 900.0, quiet(BETWEEN, waited_since=105.0), Sleep(900.0 + LONG_S),
         **POOL, max_lag=0),
    # a rank has not finished before its device has
    case("work that its device still does is not posted", 109.9, quiet(SUBMITTED, unposted=True, computes=True),
         Sleep(109.902)),
    case("and not looked for before a peer could be late", 109.0, quiet(SUBMITTED, unposted=True, computes=True),
         Sleep(109.9)),
    case("it is posted when that is over", 109.9, quiet(SUBMITTED, unposted=True), Post(True, 0)),
    case("the end of a rank is posted for those", 109.9, quiet(SUBMITTED, unposted=True), Post(True, 0), **POOL),
    case("a deadline that is over before has its grace", 109.2, quiet(BETWEEN, waited_since=105.0), Sleep(109.5),
         deadline_s=9.0, unentered_s=10.0),
    case("sleeps until a micro-batch takes too long", 101.5, quiet(ENTERED, give_back_at=102.0), Sleep(102.0), **POOL),
    case("then it puts back what it has not begun", 102.0, quiet(ENTERED, give_back_at=102.0), GiveBack(), **POOL),
    case("a late rank does so before it is stopped", 111.0, quiet(ENTERED, waited_since=105.0, give_back_at=200.0),
         GiveBack()),
    case("what is submitted is not put back", 111.0, quiet(SUBMITTED, give_back_at=102.0), Sleep(111.0 + LONG_S)),
    # where this rank has submitted everything
    case("nothing can be late before the next deadline is over", 109.91, quiet(SUBMITTED), Sleep(109.91 + LONG_S)),
    case("nor before a short one is", 109.91, quiet(SUBMITTED), Sleep(109.91 + 0.98), deadline_s=1.0),
    case("a deadline of 0 s does not keep it busy", 109.91, quiet(SUBMITTED), Sleep(109.912), deadline_s=0.0),
    case("a rank that has submitted is not late", 900.0, quiet(SUBMITTED, waited_since=105.0), Sleep(900.0 + LONG_S)),
    # what the peers learn
    case("its end is not posted before they want to know", 109.0, quiet(SUBMITTED, unposted=True), Sleep(109.9)),
    case("its end is posted when they do", 109.9, quiet(SUBMITTED, unposted=True), Post(True, 0)),
    case("after a step with a late rank its end is posted at once", 100.1,
         quiet(SUBMITTED, unposted=True, any_late=True), Post(True, 0)),
    case("peers learn that a rank is stuck in its step", 103.5, ENTERED, Post(False, 2)),
    case("or between two steps", 103.0, BETWEEN, Post(False, 3)),
    case("and for how long by now", 104.0, replace(ENTERED, posted_stuck_s=2), Post(False, 3)),
    case("once for each second", 103.6, replace(ENTERED, posted_stuck_s=3), Sleep(105.6)),
    case("and that it is not stuck any more", 103.0, replace(ENTERED, busy_since=102.9, posted_stuck_s=3),
         Post(False, 0)),
    case("a rank that waits for its peers is not stuck", 105.0, replace(SUBMITTED), Sleep(107.0)),
    case("one that is behind is, though all is submitted", 105.0, replace(SUBMITTED, lag=1), Post(False, 4)),
    case("a rank that has not begun is not stuck", 109.92, replace(BETWEEN, busy_since=-math.inf), Sleep(109.95)),
    case("both in one message", 115.0, replace(SUBMITTED, lag=1, unposted=True), Post(True, 14)),
    # the end, and pauses
    case("sleeps without limit in a pause", 900.0, quiet(ENTERED, paused=True, waited_since=105.0), Sleep(math.inf)),
    case("posts nothing in a pause", 900.0, replace(ENTERED, paused=True, unposted=True), Sleep(math.inf)),
    case("ends when the model is closed", 900.0, quiet(ENTERED, closing=True, paused=True, waited_since=1.0), End()),
]  # fmt: skip


@pytest.mark.parametrize(("now", "at", "limits", "expected"), TABLE)
def test_the_stand_in(now, at, limits, expected):
    action = decide(now, at, limits)
    if isinstance(expected, Sleep):
        assert isinstance(action, Sleep), action
        assert action.until == pytest.approx(expected.until, abs=1e-9)
    else:
        assert action == expected


@pytest.mark.parametrize(
    ("deadline_s", "any_late", "expected"),
    [
        (10.0, False, 109.9),
        (1.0, False, 100.96),
        (0.03, False, 100.026),
        (0.01, False, 100.008),  # not before most of the step is over
        (10.0, True, -math.inf),
    ],
)
def test_peers_want_to_know_of_a_finished_rank_shortly_before_one_of_them_could_be_late(deadline_s, any_late, expected):
    assert post_at(deadline_s, 100.0, any_late=any_late) == pytest.approx(expected)
