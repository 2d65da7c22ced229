"""Slow ranks get less of a step, and the merged gradient is that of all samples."""

from __future__ import annotations

import itertools
import logging
import time

import pytest
import torch
from ranks import digest, run_forked, staged
from torch import nn
from training import Stopper, features, grads, mlp

from straggle import QuantileDeadline, Rebalance
from straggle.commands.saved.checkpoint import Checkpoint
from straggle.lab.faults import Fault, FaultInjector, Slowdown


def merged_by_shares(rank, shares):
    """The merged gradient where each rank takes its share of 24 samples, and that of one process over all of them."""
    module = mlp()
    x = features(0, 0, rows=24)
    with staged(module) as model:
        rebalance = Rebalance(model, total=24)
        rebalance.replay([(0, shares)])
        first, count = rebalance.share()
        with model.step() as step:
            step.weight = count
            model(x[first : first + count]).square().mean().backward()
    alone = mlp()
    alone(x).square().mean().backward()
    close = [torch.allclose(a, b, atol=1e-6) for a, b in zip(grads(module), grads(alone), strict=True)]
    return close, digest(grads(module))


@pytest.mark.parametrize("shares", [(24,), (20, 4), (1, 17, 6), (6, 6, 6, 6)])
def test_merged_gradient_is_that_of_one_process_on_all_samples(shares):
    results = run_forked(merged_by_shares, len(shares), shares)
    assert all(all(close) for close, _ in results)
    assert len({gradients for _, gradients in results}) == 1


def with_and_without_shares(rank):
    reports = []
    with staged(mlp()) as model:
        for _ in range(2):
            with model.step():
                model(features(0, 0, rows=4)).square().mean().backward()
            reports.append(model.last_report)
            Rebalance(model, total=4)
    return [report.dealt for report in reports]


def test_report_says_from_when_on_work_is_dealt_out():
    assert run_forked(with_and_without_shares, 2) == [[False, True]] * 2


def merged_by_microbatches(rank, shares):
    module = mlp()
    x = features(0, 0, rows=4 * sum(shares)).split(4)
    with staged(module) as model:
        rebalance = Rebalance(model, total=sum(shares))
        rebalance.replay([(0, shares)])
        first, count = rebalance.share()
        with model.step(num_microbatches=count) as step:
            step.weight = count
            for part in x[first : first + count]:
                (model(part).square().mean() / count).backward()
    alone = mlp()
    alone(torch.cat(x)).square().mean().backward()
    return [torch.allclose(a, b, atol=1e-6) for a, b in zip(grads(module), grads(alone), strict=True)]


@pytest.mark.parametrize("shares", [(5, 1), (2, 4, 1)])
def test_micro_batches_can_be_shifted_instead(shares):
    assert all(map(all, run_forked(merged_by_microbatches, len(shares), shares)))


def truncated(rank):
    """Rank 1 has 4 of 24 samples and stops after two gradients: the others' samples make up for it where it stopped."""
    module = mlp()
    stopper = Stopper(module)
    x = features(0, 0, rows=24)
    with staged(module) as model:
        rebalance = Rebalance(model, total=24)
        rebalance.replay([(0, (12, 4, 8))])
        first, count = rebalance.share()
        with model.step() as step:
            step.weight = count
            stopper.arm(step, 2 if rank == 1 else None)
            model(x[first : first + count]).square().mean().backward()
        names = [name for name, _ in module.named_parameters()]
        whole, others = mlp(), mlp()
        whole(x).square().mean().backward()
        others(torch.cat([x[:12], x[16:]])).square().mean().backward()
        expected = [(whole if name.startswith("4.") else others).get_parameter(name).grad for name in names]
        same = [torch.allclose(a, b, atol=1e-6) for a, b in zip(grads(module), expected, strict=True)]
        return same, model.last_report.ranks[1].weight


def test_late_rank_counts_by_the_samples_that_it_has():
    for same, weight in run_forked(truncated, 3):
        assert all(same)
        assert weight == 4.0


def without_weight(rank, caplog_level):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("straggle.data.rebalance").addHandler(handler)
    module = nn.Linear(4, 2)
    with staged(module) as model:
        rebalance = Rebalance(model, total=8)
        rebalance.load_state_dict(rebalance.state_dict() | {"shares": (6, 2)})
        for number in range(3):
            with model.step():
                model(features(rank, number)).sum().backward()
    return [message for message in messages if "step.weight is not set" in message]


def test_who_forgets_the_weight_is_warned_once():
    warnings = run_forked(without_weight, 2, logging.WARNING)
    assert len(warnings[0]) == 1


class Napping(nn.Module):
    """Layers that sleep for each sample, forward and backward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(Nap(), nn.Linear(4, 4)) for _ in range(4)))

    def forward(self, x):
        return self.layers(x)


class Nap(nn.Module):
    def forward(self, x):
        time.sleep(0.0002 * len(x))
        if x.requires_grad:
            x.register_hook(lambda gradient: time.sleep(0.0004 * len(gradient)))
        return x


class SlowForATime(Fault):
    """Four times as slow while ``on``."""

    def __init__(self, rank):
        self.ranks, self.on, self._slowdown = frozenset([rank]), False, Slowdown(4.0)

    def delay_s(self, moment):
        return self._slowdown.delay_s(moment) if self.on else 0.0


def with_a_slow_rank(rank, deadline):
    """Rank 3 becomes four times as slow, and recovers: the shares before, when it has less, and when it has more again.

    And the samples merged in the steps, and the parameters. How many steps it takes depends on how busy the machine is.
    """
    torch.manual_seed(0)
    module, fault = Napping(), SlowForATime(3)
    with (
        FaultInjector(module, {"slow": fault}, rank=rank) as injector,
        staged(module, deadline=deadline) as model,
    ):
        rebalance = Rebalance(model, total=128, min_share=4)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        numbers, weights = itertools.count(), set()

        def train(slow, num_steps, enough):
            fault.on = slow
            for number in itertools.islice(numbers, num_steps):
                first, count = rebalance.share()
                injector.step(number)
                with model.step() as step:
                    step.weight = count
                    model(features(0, number, rows=128)[first : first + count]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                weights.add(sum(part.weight for part in model.last_report.ranks))
                if enough(rebalance.shares):  # which are the same on all ranks
                    break
            return rebalance.shares

        before = train(False, 40, lambda _: False)
        less = train(True, 200, lambda shares: shares[3] < min(0.8 * before[3], *shares[:3]))
        more = train(False, 200, lambda shares: shares[3] > less[3])
        return [before, less, more], weights, digest(module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("deadline", [None, QuantileDeadline(0.5, 1.2)])
def test_real_rank_that_becomes_slow_gets_less_and_more_again_once_it_recovers(deadline):
    results = run_forked(with_a_slow_rank, 4, deadline, timeout_s=200)
    assert len({repr(seen) for seen, _, _ in results}) == 1
    assert len({parameters for _, _, parameters in results}) == 1
    before, slow, after = results[0][0]
    assert slow[3] < 0.8 * before[3]
    assert slow[3] < min(slow[:3])
    assert after[3] > slow[3]


def saved_and_loaded(rank, directory):
    module = mlp()
    checkpoint = Checkpoint(directory / "checkpoint")
    with staged(module) as model:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        rebalance = Rebalance(model, total=24)
        changed = {"shares": (20, 4), "schedule": [(0, (12, 12)), (3, (20, 4))]}
        rebalance.load_state_dict(rebalance.state_dict() | changed)
        checkpoint.save(3, model, optimizer, {"rebalance": rebalance})
    with staged(module) as model:
        rebalance = Rebalance(model, total=24)
        checkpoint.load(model, optimizer, {"rebalance": rebalance})
        return rebalance.shares, rebalance.schedule


def test_checkpoint_has_the_shares(tmp_path):
    assert run_forked(saved_and_loaded, 2, tmp_path) == [((20, 4), [(0, (12, 12)), (3, (20, 4))])] * 2
