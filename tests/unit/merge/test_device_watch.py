"""When a device is stuck, by its marks: this rank's own, or what a peer's does not merge."""

import contextlib
import math

import pytest
from clock import Clock

from straggle.merge.late.device_watch import DeviceWatch

GIVE_UP_S = 60.0


class Queue:
    """A device whose marks become ready in their order, as far as `finish` says."""

    is_queued = True

    def __init__(self):
        self.num_marks = self.num_ready = self.num_asked = self.num_again = 0

    def mark(self, again=None):
        self.num_marks, self.num_again = self.num_marks + 1, self.num_again + (again is not None)
        return self.num_marks

    def own_queue(self):
        return contextlib.nullcontext()

    def after_queue(self, queue):
        """All is in one."""

    def ready(self, mark):
        self.num_asked += 1
        return mark <= self.num_ready

    def finish(self, count=math.inf):
        self.num_ready = min(self.num_marks, self.num_ready + count)


class Peers:
    """What the watch asks of a channel."""

    name, give_up_s = 1, GIVE_UP_S
    has_trouble = False

    def explain(self, what):
        return f"{what}: rank 0 is gone"

    def device_is_watched(self, own_failure):
        """As a channel would ask why peers may have given this rank up."""


class Rank:
    """A rank with buckets "c" and "a, b", and a watch without its thread."""

    def __init__(self):
        self.clock, self.queue, self.peers, self.steps = Clock(), Queue(), Peers(), 0
        self.watch = DeviceWatch(self.queue, self.peers, tell=None, clock=self.clock)

    def submit(self, between_s=1.0):
        """A step whose buckets come after so long each."""
        queued = self.watch.begin(self.steps, ["c", "a, b"])
        self.steps += 1
        for bucket in range(2):
            self.clock.advance(between_s)
            queued.launches(bucket)
        queued.submitted()
        return queued

    def step(self, between_s=1.0):
        queued = self.submit(between_s)
        queued.comes_after()
        return queued

    def sees(self):
        found = self.watch.look()
        return None if found is None else (found.queued.step, found.stages, found.own)


@pytest.fixture
def rank():
    return Rank()


def test_device_that_does_not_finish_its_own_gradients_is_stuck_after_give_up_s_in_their_first_bucket(rank):
    rank.step()
    rank.queue.finish()
    rank.step()
    rank.queue.finish(1)
    rank.clock.advance(GIVE_UP_S - 0.125)
    assert rank.sees() is None
    rank.clock.advance(0.125)
    assert rank.sees() == (1, "a, b", True)


def test_buckets_that_follow_one_another_at_once_are_named_together(rank):
    rank.step(between_s=0.001)
    assert rank.queue.num_marks == 3  # the first step's first bucket follows nothing
    rank.queue.finish()
    rank.step(between_s=0.001)
    assert rank.queue.num_marks == 5
    rank.clock.advance(GIVE_UP_S)
    assert rank.sees() == (1, "c, a, b", True)


def test_device_that_finished_its_own_gradients_waits_for_a_peer_which_has_a_moment_to_say_why(rank):
    rank.step()
    rank.queue.finish(2)
    rank.clock.advance(GIVE_UP_S)
    assert rank.sees() is None
    rank.clock.advance(1.0)
    assert rank.sees() == (0, "c, a, b", False)
    assert rank.watch.own_failure() is None


def test_device_that_is_only_slow_is_not_stuck(rank):
    for _ in range(10):
        rank.step()
        rank.clock.advance(GIVE_UP_S - 1)
        assert rank.sees() is None
        rank.queue.finish()


def test_host_far_ahead_of_a_device_that_goes_on_is_no_failure(rank):
    for _ in range(5):
        rank.step()
    for _ in range(5):
        rank.clock.advance(GIVE_UP_S / 6)
        rank.queue.finish(3)
        assert rank.sees() is None
    rank.clock.advance(10 * GIVE_UP_S)
    assert rank.sees() is None


def test_long_pause_after_a_step_is_no_failure_and_asks_the_device_once(rank):
    rank.step()
    rank.queue.finish()
    rank.clock.advance(100 * GIVE_UP_S)
    assert rank.sees() is None
    asked = rank.queue.num_asked
    rank.clock.advance(100 * GIVE_UP_S)
    assert rank.sees() is None
    assert rank.queue.num_asked == asked


def test_device_is_not_asked_before_give_up_s(rank):
    rank.step()
    rank.clock.advance(GIVE_UP_S - 0.125)
    rank.sees()
    assert rank.queue.num_asked == 0


def test_step_that_was_submitted_for_a_training_thread_in_the_driver_shows_that_its_device_is_stuck(rank):
    rank.submit()
    rank.clock.advance(GIVE_UP_S)
    assert rank.sees() == (0, "c", True)
    rank.queue.finish()
    assert rank.sees() is None  # the thread may come late for its merge


def test_steps_that_are_over_or_passed_over_are_forgotten_and_their_marks_used_again(rank):
    first = rank.step()
    failed, last = rank.submit(), rank.step()
    assert list(rank.watch.steps) == [first, failed, last]
    rank.queue.finish()
    ahead = rank.submit()  # by the stand-in, for a step that the training thread is to take
    assert rank.queue.num_again == 0
    newest = rank.step()
    assert list(rank.watch.steps) == [newest]
    assert ahead.merged_at == math.inf
    rank.step()
    assert rank.queue.num_again == 3


def test_after_a_peer_has_failed_what_it_does_not_merge_is_given_up_in_seconds(rank):
    rank.step()
    rank.queue.finish(2)
    rank.peers.has_trouble = True
    assert rank.sees() is None
    rank.clock.advance(5.0)
    assert rank.sees() is None
    rank.clock.advance(1.0)
    assert rank.sees() == (0, "c, a, b", False)
    rank.queue.finish()
    assert rank.sees() is None


def test_own_gradients_have_half_of_give_up_s_after_a_peer_has_failed(rank):
    rank.step()
    rank.peers.has_trouble = True
    rank.sees()
    rank.clock.advance(GIVE_UP_S / 2 - 0.125)
    assert rank.sees() is None
    rank.clock.advance(0.125)
    assert rank.sees() == (0, "c", True)


def test_rank_says_that_its_device_may_be_why_peers_gave_up_once_it_is_stuck_for_half_as_long(rank):
    rank.step()
    rank.queue.finish(1)
    rank.clock.advance(GIVE_UP_S / 2 - 0.125)
    assert rank.watch.own_failure() is None
    rank.clock.advance(0.125)
    assert rank.watch.own_failure().startswith("rank 1, step 0, stage a, b: its device has not finished")
    rank.queue.finish(1)
    assert rank.watch.own_failure() is None


def test_error_of_the_device_is_left_to_the_training_thread(rank):
    def failed(_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    rank.step()
    rank.queue.ready = failed
    rank.clock.advance(2 * GIVE_UP_S)
    assert rank.sees() is None


def test_what_was_queued_since_the_last_step_is_watched_after_a_peer_has_failed(rank):
    rank.step()
    rank.queue.finish()
    rank.peers.has_trouble = True
    assert rank.sees() is None
    rank.clock.advance(GIVE_UP_S / 2)
    assert rank.sees() == (1, "(not submitted)", True)
    rank.queue.finish()
    assert rank.sees() is None
