"""Ranks that are stuck: the peers go on without them, and they catch up with identical parameters."""

import math
import random
import threading
import time

import pytest
import torch
from ranks import digest, run_ranks, staged
from rounds import merged_round
from torch import nn
from training import Signals, features, mlp, shared

from straggle import FixedDeadline, LastMerged, LateHandling
from straggle.backward import stages
from straggle.backward.clocks import Stopwatch
from straggle.merge.late.current_deadline import CurrentDeadline
from straggle.merge.late.sides import Entry, MergeSide, TrainingSide
from straggle.merge.late.stand_in import StandIn

PLACES = ["data", "forward", "backward", "optimizer"]


class Stuck:
    """Calls ``wait`` once, in the given place of the given step; make it before the module is wrapped."""

    def __init__(self, module, place, at_step, wait):
        self.place, self.at_step, self.wait = place, at_step, wait
        self.step = 0
        module[2].register_forward_pre_hook(lambda *_: self.reach("forward"))
        module[2].weight.register_post_accumulate_grad_hook(lambda _: self.reach("backward"))

    def reach(self, place):
        if place == self.place and self.step == self.at_step:
            self.at_step = -1
            self.wait()


def train(rank, place, at_step, until_step, num_steps, late_handling, bucket_bytes):
    """The last rank is stuck from ``at_step`` until rank 0 has merged ``until_step``."""
    stages.BUCKET_BYTES = bucket_bytes
    module = mlp(seed=rank)
    signals = Signals()
    last = rank == torch.distributed.get_world_size() - 1
    stuck = Stuck(module, place if last else None, at_step, lambda: signals.wait(f"merged {until_step}"))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    reports, num_updates = [], 0
    with staged(module, deadline=FixedDeadline(0.2), late_handling=late_handling, estimator=LastMerged()) as model:
        for number in range(num_steps):
            stuck.step = number
            stuck.reach("data")
            with model.step():
                model(features(rank, number)).square().mean().backward()
            reports.append(model.last_report)
            if rank == 0:
                signals.send(f"merged {number}")
            stuck.reach("optimizer")
            optimizer.step()
            optimizer.zero_grad()
            num_updates += 1
        return digest(module.parameters()), num_updates, reports


@pytest.mark.parametrize("bucket_bytes", [1, stages.BUCKET_BYTES], ids=["many messages", "one message"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_peers_go_on_while_a_rank_is_stuck_and_it_catches_up(world_size, place, bucket_bytes):
    first = 4 if place == "optimizer" else 3  # the step that is merged without the rank
    results = run_ranks(train, world_size, place, 3, 6, 12, LateHandling(grace_s=0.0), bucket_bytes)
    assert len({parameters for parameters, _, _ in results}) == 1
    assert {num_updates for _, num_updates, _ in results} == {12}
    stood_in = [report.step for report in results[0][2] if report.ranks[-1].stood_in]
    assert set(stood_in) >= set(range(first, 7))
    for number in range(12):
        assert len({shared(reports[number]) for _, _, reports in results}) == 1
    report = results[0][2][first]
    assert report.late_ranks == (world_size - 1,)
    assert report.ranks[-1].cause in {"optimizer": ("data", "outside"), "data": ("data",)}.get(place, (place,))
    assert (report.ranks[-1].reach > 0) == (place == "backward")


def come_back(rank, place, num_steps, pauses):
    """Rank 1 is stuck in or before step 3 until that is merged; whose clock its steps have, and when they began."""
    module, signals = mlp(), Signals()
    stuck = Stuck(module, place if rank == 1 else None, 3, lambda: signals.wait("merged 3"))
    whose = []
    with staged(module, deadline=FixedDeadline(0.2), late_handling=LateHandling(grace_s=0.0)) as model:
        training, merging = model._coordinator.training, model._coordinator.merging
        for number in range(num_steps):
            stuck.step = number
            stuck.reach("data")
            if pauses and number == 4:
                model.pause()
                resumed_from = time.monotonic()
                model.resume()
            with model.step():
                if rank == 1 and training.step == merging.step:
                    whose.append((number, "peers'" if training.clock_from == merging.merged_at else "own"))
                    if pauses and number == 4:
                        assert training.clock_from >= resumed_from
                    signals.send(f"entered {number}")
                elif rank == 0 and number != 3:
                    signals.wait(f"entered {number}")  # so that step is not merged before rank 1 has looked
                model(features(rank, number)).square().mean().backward()
            if rank == 0:
                signals.send(f"merged {number}")
            stuck.reach("optimizer")
    return whose, digest(module.parameters())


@pytest.mark.parametrize(("place", "pauses"), [("data", False), ("forward", False), ("backward", True)])
def test_clock_of_a_rank_that_was_stood_in_for_begins_with_its_peers_in_the_next_step_only(place, pauses):
    (_, parameters), (whose, same) = run_ranks(come_back, 2, place, 7, pauses)
    assert parameters == same
    assert dict(whose)[4] == "peers'"
    assert {dict(whose)[step] for step in (2, 5, 6)} == {"own"}


def overtake(rank, max_lag):
    """Rank 1 is stuck in step 2 while rank 0 goes as far as it can."""
    module = mlp()
    signals = Signals()
    reports = []
    with staged(module, deadline=FixedDeadline(0.1), late_handling=LateHandling(grace_s=0.0, max_lag=max_lag)) as model:
        for number in range(8):
            if (rank, number) == (1, 2):
                signals.wait(f"before {2 + max_lag}")
                time.sleep(0.5)  # would be enough for further steps
                still_waiting = signals.absent(f"after {2 + max_lag}")
            with model.step():
                if rank == 0:
                    signals.send(f"before {number}")
                model(features(rank, number)).square().mean().backward()
            if rank == 0:
                signals.send(f"after {number}")
            reports.append(model.last_report)
        return [report.step for report in reports if report.ranks[1].stood_in], rank == 0 or still_waiting


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_peers_wait_for_a_rank_beyond_max_lag(max_lag):
    for stood_in, waited in run_ranks(overtake, 2, max_lag):
        assert waited
        assert stood_in[:max_lag] == list(range(2, 2 + max_lag))


def enter_late(rank):
    """Rank 1 enters step 2 when its deadline is over and rank 0 waits, and works in it until it is stopped."""
    module, signals = mlp(), Signals()
    with staged(module, deadline=FixedDeadline(0.05), late_handling=LateHandling(grace_s=600.0)) as model:
        for number in range(3):
            if (rank, number) == (1, 2):
                signals.wait("before 2")
                time.sleep(0.5)  # the stand-in learns meanwhile that rank 0 waits
            with model.step():
                if rank == 0:
                    signals.send(f"before {number}")
                while (rank, number) == (1, 2):
                    model(features(rank, number))
                    time.sleep(0.01)
                model(features(rank, number)).square().mean().backward()
        return model.last_report.late_ranks, model.last_report.ranks[1].stood_in


@pytest.mark.slow
def test_rank_that_enters_after_its_deadline_is_still_stopped_before_its_grace_is_over():
    assert run_ranks(enter_late, 2) == [((1,), False)] * 2


class Told:
    """A channel that notes what is reported to the peers; ``num_waiting`` of them wait."""

    rank = name = 0

    def __init__(self, num_waiting=0):
        self.num_waiting, self.posted, self.asked = num_waiting, [], []

    def num_finished(self, step):
        self.asked.append(step)
        return self.num_waiting

    def num_collectives(self, _step):
        return 0

    def post_finished(self, step, _num_collectives=0):
        self.posted.append(step)

    def post_doing(self, words):
        self.posted.append(words)


def at_begin_of_step(clock, channel, deadline_s=1.0, grace_s=0.01):
    """A stand-in, without its thread, at the begin of a step with a deadline of ``deadline_s``, by ``clock[0]``."""
    stopwatch = Stopwatch(lambda: clock[0])
    training, merging = TrainingSide(stopwatch), MergeSide(stopwatch)
    deadline = CurrentDeadline(FixedDeadline(deadline_s), LateHandling(grace_s=grace_s, quorum=1), 2)
    deadline.seconds = deadline_s
    training.enter(Entry(), clock[0], merging)
    return StandIn(training, merging, deadline, channel, device=torch.device("cpu")), training, merging, deadline


def acts(stand_in):
    return stand_in._act(pytest.fail, pytest.fail)


def test_stand_in_asks_shortly_before_the_deadline_and_stops_the_rank_when_it_is_over():
    clock, channel = [10.0], Told(num_waiting=1)
    stand_in, training, _, _ = at_begin_of_step(clock, channel)
    clock[0] = 10.985
    assert acts(stand_in)
    assert (channel.asked, training.stops.has(0)) == ([0], False)
    clock[0] = 11.0
    assert acts(stand_in)
    assert (channel.asked, training.stops.has(0)) == ([0], True)


@pytest.mark.parametrize(("deadline_s", "grace_s", "given"), [(0.08, 0.008, None), (0.7, 0.05, None), (0.08, 0.3, 0.3)])
def test_rank_is_stood_in_for_when_the_grace_of_its_deadline_is_over(deadline_s, grace_s, given):
    clock, channel, submitted = [10.0], Told(num_waiting=1), []
    stand_in, training, _, _ = at_begin_of_step(clock, channel, deadline_s, given)
    clock[0] = 10.0 + deadline_s
    acts(stand_in)  # it asks
    acts(stand_in)
    assert training.stops.has(0)
    clock[0] = 10.0 + deadline_s + 1.001 * grace_s
    assert stand_in._act(lambda: submitted.append(clock[0]), pytest.fail)
    assert submitted == clock
    # and not before
    clock[0] = 10.0
    stand_in, _, _, _ = at_begin_of_step(clock, channel, deadline_s, given)
    clock[0] = 10.0 + deadline_s
    acts(stand_in)
    acts(stand_in)
    clock[0] = 10.0 + deadline_s + 0.9 * grace_s
    acts(stand_in)


def test_fewer_ranks_than_the_quorum_stop_nobody():
    clock, channel = [10.0], Told(num_waiting=1)
    stand_in, training, _, deadline = at_begin_of_step(clock, channel)
    deadline.of_ranks(3)
    deadline.quorum = 2
    for now in (10.985, 11.0, 11.1):
        clock[0] = now
        acts(stand_in)
    assert (channel.asked, training.stops.has(0)) == ([0, 0, 0], False)


def test_stand_in_keeps_an_answer_until_the_step_is_merged():
    clock, channel = [10.0], Told(num_waiting=1)
    stand_in, _, merging, _ = at_begin_of_step(clock, channel)
    clock[0] = 10.985
    acts(stand_in)
    with merging.lock:
        current = merged_round(merged_at=10.985)
        merging.merged(current)
        stand_in.merged(current)
    clock[0] = 11.99
    acts(stand_in)
    assert channel.asked == [0, 1]


def test_who_finishes_when_peers_want_to_know_posts_it_and_the_stand_in_posts_all_else():
    clock, channel = [10.0], Told()
    stand_in, _, merging, _ = at_begin_of_step(clock, channel)
    with merging.lock:
        assert not stand_in.work_done(10.5, truncated=False)
        assert stand_in.work_done(10.97, truncated=False)
        assert not stand_in.work_done(10.97, truncated=True)
    clock[0] = 10.97
    assert acts(stand_in)
    assert channel.posted == [0]


@pytest.mark.parametrize(("any_late", "expected"), [(False, [True, False]), (True, [True, True])])
def test_who_finishes_shortly_before_the_stand_in_looks_leaves_the_post_to_it(monkeypatch, any_late, expected):
    """A step that is over by then costs no message. After one in which some rank was late it is posted at once."""
    clock, channel, at_once = [10.0], Told(), []
    stand_in, _, merging, _ = at_begin_of_step(clock, channel)
    merging.any_late = any_late
    monkeypatch.setattr(
        stand_in._wakes, "wait", lambda _: at_once.append(stand_in.work_done(clock[0], truncated=False))
    )
    for clock[0] in (10.965, 10.9765):  # it asks at 10.98
        assert acts(stand_in)
    assert (at_once, channel.posted) == (expected, [])
    clock[0] = 10.98
    assert acts(stand_in)
    assert channel.posted == [0] * (not any_late)


def test_stand_in_says_what_the_training_thread_is_stuck_in_and_when_it_is_not_any_more():
    clock, channel = [10.0], Told()
    stand_in, training, merging, deadline = at_begin_of_step(clock, channel)
    deadline.seconds = math.inf
    clock[0] = 13.0
    acts(stand_in)
    training.enter(Entry(), 13.0, merging)
    acts(stand_in)
    assert channel.posted == ["rank 0 has been outside of a step, before step 0, for 3 s", ""]


def test_stand_in_is_woken_to_post_the_end_of_a_truncated_step_that_peers_want_to_know_of():
    clock, woken, asleep = [10.0], [], threading.Event()
    stand_in, _, merging, _ = at_begin_of_step(clock, None)

    def sleep():
        with merging.lock:
            asleep.set()
            woken.append(stand_in._wakes.wait(10.0))

    thread = threading.Thread(target=sleep)
    thread.start()
    asleep.wait()
    with merging.lock:  # free from when the thread sleeps
        stand_in.work_done(10.97, truncated=True)
    thread.join()
    assert woken == [True]


class Sleepy(nn.Module):
    """Sleeps in its backward pass on request."""

    def __init__(self):
        super().__init__()
        self.sleep_s = 0.0

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda _: time.sleep(self.sleep_s))
        return x


def chaos(rank, num_steps, seed):
    """Random short sleeps in the data, the forward and backward pass and the optimizer."""
    draw = random.Random(f"{seed} {rank}")
    module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), sleepy := Sleepy(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    digests, reports = [], []
    with staged(module, deadline=FixedDeadline(0.01), late_handling=LateHandling(grace_s=0.005), stages=2) as model:
        for number in range(num_steps):
            place = draw.choice(PLACES) if draw.random() < 0.3 else None
            seconds = draw.choice([0.01, 0.03, 0.1])
            if place == "data":
                time.sleep(seconds)
            sleepy.sleep_s = seconds if place == "backward" else 0.0
            with model.step() as step:
                if place == "forward":
                    time.sleep(seconds)
                loss = model(features(rank, number)).square().mean()
                step.log(loss=loss)
                loss.backward()
            if place == "optimizer":
                time.sleep(seconds)
            optimizer.step()
            optimizer.zero_grad()
            digests.append(digest(module.parameters()))
            reports.append(model.last_report)
        return digests, reports


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_replicas_and_reports_stay_identical_under_chaos(world_size, seed):
    results = run_ranks(chaos, world_size, 40, seed)
    assert all(digests == results[0][0] for digests, _ in results)
    for number in range(40):
        assert len({shared(reports[number]) for _, reports in results}) == 1
        assert results[0][1][number].step == number
    assert any(rank.stood_in for report in results[0][1] for rank in report.ranks)


def test_rank_that_gives_nothing_for_a_while_is_still_in_its_pause_afterwards():
    """It may be let in and healed meanwhile, by other threads; its peers do not wait for what gives nothing."""
    clock, channel, submitted = [10.0], Told(num_waiting=1), []
    stand_in, _, merging, _ = at_begin_of_step(clock, channel)
    with merging.lock:
        stand_in.pause()
        stand_in.give_nothing(True)
    assert stand_in._act(lambda: submitted.append(clock[0]), lambda _: None)
    assert submitted == clock
    with merging.lock:
        stand_in.give_nothing(False)
        assert not stand_in.watches
        stand_in.resume()
        assert stand_in.watches
