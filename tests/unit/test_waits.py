"""What waits: it ends with what it waits for, at its limit, and never later."""

import threading

import pytest

from straggle.waits import NowAndThen, end_of, until


class Clock:
    """Time passes only by pauses."""

    def __init__(self):
        self.now, self.pauses = 0.0, []

    def __call__(self):
        return self.now

    def pause(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


@pytest.mark.parametrize(("found_at", "limit_s", "found", "ends_at"), [(2.0, 9.0, True, 2.0), (9.0, 3.0, False, 3.0)])
def test_what_is_looked_for_is_found_at_the_next_look_or_the_limit_is_over(found_at, limit_s, found, ends_at):
    clock = Clock()
    answer = until(lambda: clock.now >= found_at, every_s=0.5, limit_s=limit_s, clock=clock, pause=clock.pause)
    assert (answer, clock.now) == (found, ends_at)


def test_what_is_there_already_is_found_without_a_pause_also_after_the_limit():
    clock = Clock()
    assert until(lambda: "there", every_s=1.0, limit_s=-1.0, clock=clock, pause=clock.pause) == "there"
    assert not clock.pauses


def test_pauses_become_longer_up_to_the_longest():
    clock = Clock()
    until(lambda: len(clock.pauses) == 5, every_s=1.0, most_s=5.0, clock=clock, pause=clock.pause)
    assert clock.pauses == [1.0, 2.0, 4.0, 5.0, 5.0]


@pytest.mark.parametrize("limit", [{}, {"limit_s": 60.0}])
def test_threads_that_end_are_waited_for_with_a_limit_and_without(limit):
    event = threading.Event()
    threads = [threading.Thread(target=event.wait) for _ in range(2)]
    assert end_of(threads)  # none of them was started
    for thread in threads:
        thread.start()
    assert not end_of(threads, 0.01)
    event.set()
    assert end_of([*threads, threading.current_thread()], **limit)


def test_what_is_done_now_and_then_is_due_at_once_unless_it_is_to_begin_later():
    now = NowAndThen(1000.0)
    assert [now.is_due(), now.is_due()] == [True, False]
    assert not NowAndThen(0.0, after_s=1000.0).is_due()
