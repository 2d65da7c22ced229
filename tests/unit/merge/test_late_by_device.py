"""When a rank that is late by its device may be late, and when it has finished: by its two clocks, without ranks."""

import math

import pytest
import torch
from clock import Clock
from paced_device import PacedDevice

from straggle import FixedDeadline, LateHandling
from straggle.backward.clocks import HostTimes, Stopwatch
from straggle.backward.device_clock import DeviceClock
from straggle.merge.late.current_deadline import CurrentDeadline
from straggle.merge.late.sides import Entry, MergeSide, TrainingSide
from straggle.merge.late.stand_in import StandIn
from straggle.merge.round.submission import by_device
from straggle.merge.rows.telemetry import Row
from straggle.report import PHASES, RankNumbers

BEGAN_AT = 103.0  # the device is in the step before until then


class Told:
    """A channel: a quorum waits at once, and posts are counted."""

    rank = name = 0

    def __init__(self):
        self.posted, self.asked = [], []

    def num_finished(self, step):
        self.asked.append(step)
        return 1

    def post_doing(self, words):
        pass

    def num_collectives(self, _step):
        return 0

    def post_finished(self, step, _num_collectives=0):
        self.posted.append(step)


class Rank:
    """Enters its step at 100 s; its deadline is of 1 s, and its device has 3 s to do before that."""

    def __init__(self, quorum_s=0.0, came_late=False, deadline_s=1.0):
        self.clock = Clock()
        stopwatch = Stopwatch(self.clock)
        self.training, self.merging = TrainingSide(stopwatch), MergeSide(stopwatch)
        self.merging.merged_at -= 0.5 if came_late else 0.0
        self.training.came_late = came_late
        late_handling = LateHandling(quorum=1, late_by="device")
        self.deadline = CurrentDeadline(FixedDeadline(1.0), late_handling, 2)
        self.deadline.seconds, self.deadline.quorum_s = deadline_s, quorum_s
        self.channel = Told()
        self.stand_in = StandIn(self.training, self.merging, self.deadline, self.channel, device=torch.device("cpu"))
        self.device = PacedDevice(self.clock, self.clock.advance)
        self.device_clock = DeviceClock(self.device, self.clock, self.stand_in.limit_by_device, between_passes=False)
        self.stand_in.be_late_by(self.device_clock)
        self.device.work(3.0)
        self.device_clock.entered()
        self.training.enter(Entry(), self.clock(), self.merging)

    def at(self, moment):
        self.clock.advance(moment - self.clock())
        return self

    def acts(self):
        self.stand_in._act(pytest.fail, pytest.fail)


def test_deadline_counts_from_the_entry_of_the_device():
    assert (
        Rank().at(101.0).stand_in.limit_by_device().late_at == 102.0
    )  # it has not begun: not before a second from now
    assert Rank().at(BEGAN_AT).stand_in.limit_by_device().late_at == pytest.approx(BEGAN_AT + 1.0)


def test_deadline_of_a_rank_that_was_stood_in_for_counts_from_the_merge():
    assert Rank(came_late=True).at(BEGAN_AT).stand_in.limit_by_device().late_at == 100.5


def test_no_rank_is_expected_to_be_late_before_a_quorum_has_finished():
    assert Rank(quorum_s=2.0).at(BEGAN_AT).stand_in.limit_by_device().late_at == pytest.approx(BEGAN_AT + 2.0)
    never = Rank()
    never.deadline.seconds = math.inf
    assert never.stand_in.limit_by_device().late_at == math.inf


def test_rank_is_stopped_by_the_clock_of_its_device():
    rank = Rank(deadline_s=0.02)
    rank.at(100.5).acts()  # sleeps for 0.02 s: the device has not begun
    rank.at(BEGAN_AT).acts()
    assert rank.channel.asked == []
    rank.at(BEGAN_AT + 0.03).acts()  # asks
    rank.acts()
    assert rank.channel.asked == [0]
    assert rank.training.stops.has(0)


def test_peers_hear_that_a_rank_has_finished_when_its_device_has():
    rank = Rank()
    rank.at(BEGAN_AT).device.work(2.0)
    rank.device_clock.left()  # waits for its device, once
    assert rank.clock() == BEGAN_AT + 2.0
    rank.device_clock.submitted(HostTimes((), (), 1), complete=True)
    rank.device.work(1.0)
    rank.device_clock.left()
    with rank.merging.lock:
        assert not rank.stand_in.work_done(rank.clock(), truncated=False)
    rank.acts()
    assert rank.channel.posted == []
    rank.at(BEGAN_AT + 3.0).acts()
    assert rank.channel.posted == [0]


def test_quorum_finishes_with_the_slowest_of_so_many_ranks():
    class Rows:
        is_usual = True

        def compute_s(self):
            return [4.0, math.nan, 2.0, 3.0]

        def column(self, _name):
            return [math.nan] * 4

        def costs(self):
            return [math.nan] * 4

        def num_microbatches(self):
            return [1.0] * 4

    seen = []
    for late_by in ("device", "host"):
        deadline = CurrentDeadline(FixedDeadline(1.0), LateHandling(quorum=2, late_by=late_by), 4)
        deadline.decide(Rows())
        seen.append(deadline.quorum_s)
    assert seen == [3.0, 0.0]


def row(**changes):
    reported = {"compute_s": 0.01, **{name: changes.pop(name) for name in ("late", "idle") if name in changes}}
    return Row(
        dict.fromkeys(PHASES, 0.0), RankNumbers(**reported), busy_s=0.02, stage_s=(0.01,), merge_s=0.5, **changes
    )


def test_row_has_the_seconds_of_the_device_if_the_rank_computes():
    rank = Rank().at(BEGAN_AT)
    own = row(microbatch_s=(0.01,))
    assert by_device(own, rank.device_clock, in_step=False) is own
    assert by_device(row(idle=True), rank.device_clock, in_step=True).reported.compute_s == 0.01
    assert by_device(row(replans=True), rank.device_clock, in_step=True).reported.compute_s == 0.01
    rank.device.work(2.0)
    rank.device_clock.left()
    written = by_device(own, rank.device_clock, in_step=True)
    assert written.reported.compute_s == 2.0
    assert (written.stage_s, written.microbatch_s) == ((2.0,), (2.0,))
    assert (written.busy_s, written.merge_s) == (0.02, 0.5)  # the host's, of the first step


def test_row_of_a_late_rank_says_how_long_its_device_was_at_it():
    rank = Rank().at(BEGAN_AT + 1.25)
    for late in (row(late=True), row(cause=3)):
        compute_s = by_device(late, rank.device_clock, in_step=True).reported.compute_s
        assert compute_s == pytest.approx(1.25, rel=1e-3)
