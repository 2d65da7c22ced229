"""Ranks that are late by their devices: real ranks, each with a device that takes known times (`paced_device.py`)."""

import time

import pytest
import torch
from paced_device import PacedDevice
from queued_device import queued_device
from ranks import digest, run_forked, staged
from torch import nn
from training import features

from straggle import FixedDeadline, LateHandling

LAYERS, STAGE_S = 6, 0.005


class Work(nn.Module):
    """A layer whose backward pass is queued on a device, for ``seconds``; the host takes no time for it."""

    def __init__(self, paced, seconds):
        super().__init__()
        self.linear, self.paced, self.seconds = nn.Linear(4, 4), paced, seconds

    def forward(self, x):
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.paced.work(self.seconds()))
        return y


class Together(torch.autograd.Function):
    """Gives all weights their gradients at once, as a compiled module does."""

    @staticmethod
    def forward(ctx, work, x, *weights):
        ctx.work, ctx.x_sum, ctx.num_weights = work, x.sum(), len(weights)
        return x.sum() * sum(weight.sum() for weight in weights)

    @staticmethod
    def backward(ctx, gradient):
        ctx.work()
        return None, None, *(ctx.x_sum * gradient.expand(4, 1) for _ in range(ctx.num_weights))


class Whole(nn.Module):
    """As many stages as ``LAYERS``, whose gradients come at once, after the time of all."""

    def __init__(self, paced, seconds):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 4, bias=False) for _ in range(LAYERS))
        self.work = lambda: paced.work(LAYERS * seconds())

    def forward(self, x):
        return Together.apply(self.work, x, *(layer.weight for layer in self.layers))


def train(rank, slowness, late_handling, num_microbatches, num_steps, deadline_s, at_once=False):
    """Rank 1 is ``slowness(step)`` times as slow, and all ranks wait for their devices after each step."""
    paced, now = PacedDevice(), {"step": 0}
    torch.manual_seed(0)
    seconds = lambda: STAGE_S * slowness(rank, now["step"])  # noqa: E731
    module = Whole(paced, seconds) if at_once else nn.Sequential(*(Work(paced, seconds) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    reports, queued_s, num_waits = [], [], []
    options = {"stages": LAYERS, "deadline": FixedDeadline(deadline_s), "late_handling": late_handling}
    with queued_device(paced), staged(module, **options) as model:
        for number in range(num_steps):
            now["step"], before = number, (paced.queued_s, paced.num_waits)
            with model.step(num_microbatches=num_microbatches):
                for _ in range(num_microbatches):
                    model(features(rank, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            reports.append(model.last_report)
            queued_s.append(paced.queued_s - before[0])
            num_waits.append(paced.num_waits - before[1])
            paced.drain()
        return digest(module.parameters()), reports, queued_s, num_waits


def one_is_slow(rank, _step):
    return 20.0 if rank == 1 else 1.0


def all_are_slow_at_first(rank, step):
    return 10.0 + 2 * rank if step < 6 else 1.0


def nobody_is_slow(_rank, _step):
    return 1.0


DEVICE = LateHandling(late_by="device", grace_s=5.0)


def late_steps(reports):
    return [report.step for report in reports if report.late_ranks]


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_rank_whose_device_is_slow_is_stopped_and_its_peers_do_not_wait(num_microbatches):
    deadline_s = 0.2 * num_microbatches
    results = run_forked(train, 2, one_is_slow, DEVICE, num_microbatches, 7, deadline_s)
    assert len({parameters for parameters, *_ in results}) == 1
    (_, reports, _, peer_waits), (_, _, queued_s, num_waits) = results
    # in the first step the stages are planned, and in the second one their seconds are learned
    late = late_steps(reports[2:])
    assert len(late) >= 3  # of five: fewer only if the machine keeps the peer from its work
    assert {report.late_ranks for report in reports} <= {(), (1,)}
    assert not any(own.stood_in for report in reports for own in report.ranks)
    for step in late:  # the peers waited for no more
        assert queued_s[step] < 20 * STAGE_S * LAYERS * num_microbatches
    assert peer_waits == [1] + [0] * 6
    # at the end of the forward pass, and of stages but the last, if the rank was stopped within that
    num_stages = [round(own_s / (20 * STAGE_S)) for own_s in queued_s]
    assert num_microbatches > 1 or max(num_waits[step] - num_stages[step] for step in late) == 1
    # what ranks report is of their devices
    assert reports[2].ranks[0].compute_s >= STAGE_S * LAYERS * num_microbatches
    assert reports[late[0]].ranks[1].compute_s >= deadline_s


def test_late_by_the_host_a_slow_device_is_not_seen_and_nobody_waits():
    results = run_forked(train, 2, one_is_slow, LateHandling(grace_s=5.0), 1, 5, 0.1)
    for _, reports, _, num_waits in results:
        assert late_steps(reports) == []
        assert num_waits == [0] * 5
    assert results[1][2] == pytest.approx([20 * STAGE_S * LAYERS] * 5)


def test_moment_in_which_all_devices_are_slow_stops_nobody():
    (_, reports, _, _), (_, _, _, num_waits) = run_forked(train, 2, all_are_slow_at_first, DEVICE, 1, 10, 0.1)
    assert late_steps(reports) == []
    assert max(num_waits[2:6]) > 0  # rank 1 could be stopped: it is slower than its peer, by less than a stage


def test_rank_that_is_in_time_never_waits_for_its_device():
    for _, reports, _, num_waits in run_forked(train, 2, nobody_is_slow, DEVICE, 2, 8, 5.0):
        assert num_waits == [1] + [0] * 7  # once, for the first times
        assert late_steps(reports) == []


def test_between_micro_batches_a_slow_device_is_stopped_too():
    late_handling = LateHandling(late_by="device", grace_s=5.0, granularity="microbatch")
    results = run_forked(train, 2, one_is_slow, late_handling, 3, 5, 0.7)
    assert len({parameters for parameters, *_ in results}) == 1
    reports = results[0][1]
    late = late_steps(reports)
    assert len(late) >= 2
    # passes that were begun are complete
    assert {round(3 * reports[step].ranks[1].reach, 3) for step in late} <= {1.0, 2.0}
    assert results[0][3] == [1] + [0] * 4


def test_host_waits_for_no_stage_of_a_pass_whose_gradients_come_at_once():
    results = run_forked(train, 2, one_is_slow, DEVICE, 3, 5, 0.3, True)
    assert len({parameters for parameters, *_ in results}) == 1
    (_, reports, _, peer_waits), (_, _, queued_s, num_waits) = results
    late = late_steps(reports)
    assert len(late) >= 2
    for step in late:  # at most at the ends of its forward and its backward pass
        assert 0 < num_waits[step] <= 2 * round(queued_s[step] / (20 * STAGE_S * LAYERS))
    assert peer_waits == [1] + [0] * 4


def pause_for_long(rank):
    """Rank 0's device has 0.5 s of work in a pause between two steps; when each rank had to wait for it."""
    paced = PacedDevice()
    module, reports = nn.Linear(4, 4), []
    with queued_device(paced), staged(module, deadline=FixedDeadline(5.0), late_handling=DEVICE) as model:
        for number in range(5):
            with model.step():
                model(features(rank, number)).square().mean().backward()
            reports.append(model.last_report)
            module.zero_grad()
            paced.drain()
            if number == 2:
                with model.pause():
                    paced.work(0.5 if rank == 0 else 0.0)
        return [report.ranks[1].wait_s for report in reports]


def test_time_of_a_pause_belongs_to_no_step_of_the_device():
    for wait_s in run_forked(pause_for_long, 2):
        assert max(wait_s) < 0.3


def sleep_once(rank):
    """Rank 1 sleeps in step 2."""
    module, reports = nn.Linear(4, 4), []
    with staged(module, deadline=FixedDeadline(5.0), late_handling=DEVICE) as model:
        for number in range(4):
            with model.step():
                time.sleep(0.3 if (rank, number) == (1, 2) else 0.0)
                model(features(rank, number)).square().mean().backward()
            reports.append(model.last_report)
            module.zero_grad()
        return [report.ranks[1].compute_s for report in reports]


def test_on_the_cpu_a_rank_is_late_by_its_host_in_either_way():
    for compute_s in run_forked(sleep_once, 2):
        assert compute_s[2] >= 0.3 > compute_s[3]  # a device would tell it a step later
