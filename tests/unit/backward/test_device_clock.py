"""When a host waits for its device, and what a rank reports by it: one rank, and a device whose pace is given."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from clock import Clock
from paced_device import PacedDevice
from queued_device import queued_device
from torch import nn

from straggle import StagedBackward
from straggle.backward.clocks import HostTimes, Limit
from straggle.backward.device_clock import DeviceClock, LearnedSeconds, expected_end

FORWARD_S, STAGE_S, NUM_STAGES = 1.0, 0.5, 4
WHOLE_S = FORWARD_S + NUM_STAGES * STAGE_S
MERGE_S = 0.25
HOST_S = 0.001  # that the host takes to queue a segment


@dataclass
class Rank:
    """Its loop, and what is known of its peers: they finish after ``peers_s``, and are late after ``deadline_s``."""

    deadline_s: float = 4.0
    peers_s: float = WHOLE_S
    num_passes: int = 1
    between_passes: bool = False
    slowness: float = 1.0
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self):
        self.device = PacedDevice(self.clock, self.clock.advance)
        self.device_clock = DeviceClock(self.device, self.clock, self.limit, between_passes=self.between_passes)
        self.ahead_s = []  # by which the host was ahead of the device, after each segment
        self.step(first=True)

    def limit(self):
        began_at = self.device_clock.began_at(self.clock())
        return Limit(began_at + max(self.deadline_s, self.peers_s), self.num_passes)

    def segment(self, seconds, over):
        self.clock.advance(HOST_S)
        self.device.work(self.slowness * seconds)
        over()
        self.ahead_s.append(self.device.free_at - self.clock())

    @property
    def late(self):
        return self.clock() >= self.limit().late_at

    def passes(self):
        """Queue the passes of a step, until the rank is late; how many segments there were."""
        clock = self.device_clock
        for _ in range(self.num_passes):
            if self.late:
                return
            self.segment(FORWARD_S, clock.forward_over)
            for _ in range(NUM_STAGES):
                if self.late and not self.between_passes:
                    return
                self.segment(STAGE_S, clock.stage_over)
            clock.pass_over()

    def step(self, *, first=False):
        """How often the host waited in it, how many segments were queued, and what is reported."""
        before, self.ahead_s = self.device.num_waits, []
        self.device_clock.entered()
        entered_at = self.clock()
        self.passes()
        self.device_clock.left()
        whole = (1 + NUM_STAGES) * self.num_passes
        host = HostTimes((self.clock() - entered_at,) * NUM_STAGES, (), self.num_passes)
        times = self.device_clock.submitted(host, complete=len(self.ahead_s) == whole)
        self.device.work(MERGE_S)
        self.device_clock.placed()
        if not first:
            self.clock.advance(HOST_S)
        return self.device.num_waits - before, len(self.ahead_s), times

    def steps(self, number):
        waits, queued, _ = zip(*(self.step() for _ in range(number)), strict=True)
        return list(waits), list(queued)


def test_rank_that_is_not_expected_to_be_late_never_waits_for_its_device_and_runs_ahead_by_whole_steps():
    rank = Rank()
    assert rank.device.num_waits == 1  # for the times of the first step
    assert rank.steps(10) == ([0] * 10, [1 + NUM_STAGES] * 10)
    assert rank.device.free_at - rank.clock() > 9 * WHOLE_S


def test_slow_device_throttles_its_host_from_the_second_step_on_and_is_stopped():
    rank = Rank(slowness=4.0)
    for _ in range(5):
        waits, queued, _ = rank.step()
        assert waits > 0
        assert queued < 1 + NUM_STAGES
        assert 4 * STAGE_S <= max(rank.ahead_s) <= 4 * max(FORWARD_S, STAGE_S) + MERGE_S


def test_host_does_not_wait_where_nothing_is_left_to_stop():
    rank = Rank(slowness=4.0, deadline_s=4 * WHOLE_S - STAGE_S)  # late only when all is queued
    assert rank.steps(3) == ([1 + NUM_STAGES] * 3, [1 + NUM_STAGES] * 3)  # not at the end of the pass


def test_slow_device_throttles_no_host_in_a_moment_in_which_all_devices_are_slow():
    rank = Rank()
    rank.slowness, rank.peers_s = 4.0, 4 * WHOLE_S
    assert rank.steps(6) == ([0] * 6, [1 + NUM_STAGES] * 6)


def test_rank_that_becomes_slow_is_throttled_when_a_second_slow_step_was_seen():
    rank = Rank()
    rank.steps(4)
    rank.device.drain()
    rank.slowness = 4.0
    seen = []
    for _ in range(4):  # the loop waits for its device, as one that reads its loss
        seen.append(rank.step()[0] > 0)
        rank.device.drain()
    assert seen == [False, False, True, True]


def test_rank_that_becomes_fast_is_throttled_no_more():
    rank = Rank(slowness=4.0)
    rank.steps(5)
    rank.slowness = 1.0
    waits, queued = rank.steps(12)
    assert waits[0] > 0
    assert waits[-6:] == [0] * 6
    assert queued[-10:] == [1 + NUM_STAGES] * 10


def test_micro_batches_are_segments_too():
    rank = Rank(num_passes=3, slowness=4.0, deadline_s=15.0, peers_s=3 * WHOLE_S)
    waits, queued = rank.steps(4)
    assert min(waits) > 0
    assert max(queued) < 3 * (1 + NUM_STAGES)
    assert min(queued) > 1 + NUM_STAGES


def test_another_number_of_micro_batches_takes_time_in_proportion():
    rank = Rank(num_passes=2, deadline_s=2.2 * WHOLE_S)
    assert rank.steps(4)[0] == [0] * 4
    rank.num_passes = 3
    rank.peers_s = 2.5 * WHOLE_S
    assert rank.step()[0] > 0


def test_between_micro_batches_the_host_waits_only_where_it_can_be_stopped():
    rank = Rank(num_passes=3, slowness=4.0, deadline_s=15.0, peers_s=3 * WHOLE_S, between_passes=True)
    for _ in range(3):
        waits, queued, _ = rank.step()
        assert (waits, queued) == (2, 2 * (1 + NUM_STAGES))


def test_rank_reports_the_newest_step_that_its_device_is_through_with():
    rank = Rank()
    for number in range(1, 4):
        rank.slowness = float(number)
        rank.peers_s = math.inf
        reported = rank.step()[2]
        assert reported.compute_s == pytest.approx(max(1, number - 1) * WHOLE_S, abs=2 * HOST_S)
        rank.device.drain()
    assert reported.busy_s == pytest.approx(2 * WHOLE_S, abs=2 * HOST_S)
    assert reported.merge_s == pytest.approx(MERGE_S)
    assert reported.stage_s == pytest.approx((2 * WHOLE_S,) * NUM_STAGES, abs=2 * HOST_S)


def test_rank_that_was_cut_short_reports_this_step():
    rank = Rank(slowness=4.0)
    for _ in range(3):
        _, _, reported = rank.step()
        rank.device.drain()
        assert 4.0 <= reported.compute_s <= 4.0 + 4 * FORWARD_S


def test_nothing_is_known_of_a_step_that_the_device_has_not_begun():
    rank = Rank()
    rank.step()
    rank.device_clock.entered()
    assert rank.device_clock.submitted(HostTimes((), (), 1), complete=False) is None
    assert rank.device_clock.began_at(rank.clock()) == rank.clock()


def test_rank_has_finished_its_work_only_when_its_device_has():
    rank = Rank()
    clock = rank.device_clock
    clock.entered()
    assert not clock.is_done
    rank.passes()
    clock.left()
    assert not clock.is_done
    rank.device.drain()
    assert clock.is_done


def test_ends_of_stages_and_micro_batches_are_the_device_s():
    rank = Rank(peers_s=math.inf)
    rank.device.drain()
    clock, entered_at, stage_s, microbatch_s = rank.device_clock, rank.clock(), [], []
    clock.entered()
    for _ in range(2):
        rank.segment(FORWARD_S, clock.forward_over)
        for _ in range(NUM_STAGES):
            rank.segment(STAGE_S, clock.stage_over)
            stage_s.append(rank.clock() - entered_at)
        clock.pass_over()
        rank.clock.advance(HOST_S)  # until the loop comes to its next forward pass
        microbatch_s.append(rank.clock() - entered_at)
    host = HostTimes((*stage_s[-NUM_STAGES:-1], math.nan), tuple(microbatch_s), 2)
    clock.left()
    clock.submitted(host, complete=True)
    clock.placed()
    rank.device.drain()
    clock.entered()
    reported = clock.submitted(host, complete=True)
    ends_s = [HOST_S + WHOLE_S + FORWARD_S + STAGE_S * number for number in (1, 2, 3)]
    assert reported.stage_s[:-1] == pytest.approx(ends_s)
    assert math.isnan(reported.stage_s[-1])
    assert reported.microbatch_s == pytest.approx([HOST_S + WHOLE_S, HOST_S + 2 * WHOLE_S])


def test_clock_of_a_step_begins_with_the_device():
    rank = Rank(peers_s=math.inf)
    rank.steps(3)
    free_at = rank.device.free_at
    rank.device_clock.entered()
    rank.passes()
    rank.clock.advance(free_at + FORWARD_S + HOST_S - rank.clock())
    assert free_at <= rank.device_clock.began_at(rank.clock()) <= free_at + 2 * HOST_S


def test_host_that_is_ahead_sees_when_its_device_begins_with_the_step_before():
    rank = Rank(peers_s=math.inf)
    rank.device.drain()
    rank.step()
    begins_at = rank.device.free_at
    rank.step()  # which the device has not begun when the host leaves it
    rank.device_clock.entered()
    began_at = rank.device.free_at
    rank.clock.advance(begins_at + FORWARD_S + 2 * HOST_S - rank.clock())
    assert rank.device_clock.began_at(rank.clock()) == rank.clock()
    rank.clock.advance(10 * WHOLE_S)
    assert rank.device_clock.began_at(rank.clock()) == pytest.approx(began_at, abs=5 * HOST_S)


def test_step_after_a_pause_begins_with_its_end():
    rank = Rank(peers_s=math.inf)
    for _ in range(2):
        rank.device.work(100.0)
        rank.device_clock.begin_now()
        rank.step()
        rank.device.drain()
    assert rank.step()[2].busy_s == pytest.approx(WHOLE_S, abs=2 * HOST_S)


def test_times_are_those_of_as_much_work():
    clock = Rank(peers_s=math.inf)
    clock.device.drain()
    (_, _, times) = clock.step()
    half = times.expected(HostTimes((1.0, 1.0), (0.5, 1.0, 1.5), 3))
    assert half.compute_s == pytest.approx(3 * times.compute_s)
    assert half.stage_s == (half.compute_s,) * 2  # there were others
    assert half.microbatch_s == pytest.approx([half.compute_s * part / 3 for part in (1, 2, 3)])
    costly = times._replace(cost=2.0).expected(HostTimes((), (), 1, 3.0))
    assert costly.compute_s == pytest.approx(1.5 * times.compute_s)


# -- decisions


@pytest.mark.parametrize(
    ("now", "reached_at", "rest", "expected"),
    [
        (10.0, 10.0, [], 10.0),
        (10.0, 10.0, [1.0, 2.0], 13.0),
        (10.5, 10.0, [1.0, 2.0], 13.0),  # half of a segment is done
        (11.5, 10.0, [1.0, 2.0], 13.5),  # a segment that takes longer may be over at any moment
        (15.0, 10.0, [], 15.0),
    ],
)
def test_end_of_a_step_is_expected_from_what_is_left(now, reached_at, rest, expected):
    assert expected_end(now, reached_at, rest) == expected


def test_one_step_of_three_does_not_change_what_is_learned():
    learned = LearnedSeconds()
    assert learned.rest("", 1, 0, 0.0) == []
    for seconds in ([1.0, 2.0], [1.0, 2.0], [9.0, 9.0]):
        learned.add("fp", seconds, 1, complete=True)
    assert learned.rest("f", 1, 0, 0.0) == [1.0, 2.0]
    learned.add("f", [9.0], 1, complete=False)
    assert learned.rest("f", 1, 0, 0.0) == [9.0, 2.0]
    assert learned.rest("f", 1, 1, 5.0) == [2.0]


def test_other_segments_are_learned_from_complete_steps_only():
    learned = LearnedSeconds()
    learned.add("fp", [1.0, 2.0], 1, complete=True)
    learned.add("f", [7.0], 2, complete=False)
    learned.add("fs", [7.0, 7.0], 1, complete=False)
    assert learned.rest("fp", 1, 0, 0.0) == [1.0, 2.0]
    learned.add("fsp", [4.0] * 3, 1, complete=True)
    assert learned.rest("f", 1, 0, 0.0) == [4.0] * 3


def test_rest_of_a_step_of_other_segments_is_known_as_a_whole():
    learned = LearnedSeconds()
    learned.add("fp", [1.0, 2.0], 1, complete=True)
    assert learned.rest("fp", 2, 1, 1.5) == [4.5]
    assert learned.rest("ff", 1, 1, 0.5) == [2.5]
    assert learned.rest("fs", 1, 2, 4.0) == [0.0]


# -- by itself, with a budget


def test_host_of_a_staged_backward_with_a_budget_is_one_stage_ahead():
    clock = Clock()
    paced = PacedDevice(clock, clock.advance)
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    for layer in module:
        layer.weight.register_hook(lambda gradient: paced.work(STAGE_S) or gradient)
    ahead_s = []
    with queued_device(paced):
        watched = StagedBackward(module, stages=6, on_stage=lambda _: ahead_s.append(paced.free_at - clock()))
        for budget_s, num_waits in ((None, 0), (1e6, 5)):
            ahead_s.clear()
            watched.backward(module(torch.ones(1, 4)).sum(), budget_s=budget_s)
            assert paced.num_waits == num_waits
            paced.drain()
    assert max(ahead_s) == pytest.approx(STAGE_S)
