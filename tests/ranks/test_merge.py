"""The weighted mean: which ranks it is over, and that it is the same on all of them."""

import math

import pytest
import torch
from ranks import digest, run_ranks, staged
from torch import nn
from training import Chain, Stopper, features, grads, mlp, random_stops, shared

from straggle import Abstain, LastMerged, LastOwn, MovingAverage, OptimizerMomentum, Zero
from straggle.backward import stages

WORLD_SIZES = [1, 2, 3, 4]
NUM_LAYERS = 5
ESTIMATORS = {
    "abstain": lambda _: Abstain(),
    "zero": lambda _: Zero(),
    "last own": lambda _: LastOwn(),
    "last merged": lambda _: LastMerged(),
    "moving average": lambda _: MovingAverage(),
    "momentum": lambda optimizer: OptimizerMomentum(optimizer),
}


def merge_chain(rank, stops, num_microbatches, bucket_bytes=None, plan=None):
    """Gradients and report of every step, where ``stops[step][rank]`` tells after how many gradients this rank stops.

    The input of micro-batch ``m`` is ``10 * rank + m + 1``.
    """
    if bucket_bytes is not None:
        stages.BUCKET_BYTES = bucket_bytes
    module = Chain(NUM_LAYERS)
    stopper = Stopper(module)
    results = []
    with staged(module, stages=plan) as model:
        for stop in stops:
            with model.step(num_microbatches=num_microbatches) as step:
                stopper.arm(step, stop[rank])
                for microbatch in range(num_microbatches):
                    model(10.0 * rank + microbatch + 1).backward()
            results.append((grads(module), model.last_report))
            for parameter in module.parameters():
                parameter.grad = None
    return results


def merge_all(rank, cases):
    return [merge_chain(rank, *case) for case in cases]


def passes_of(stop, layer, num_microbatches):
    """How many micro-batches of the layer's gradient are finished after ``stop`` gradients in all."""
    if stop is None:
        return num_microbatches
    whole, rest = divmod(stop, NUM_LAYERS)
    return whole + (NUM_LAYERS - 1 - layer < rest)


def expected_gradient(stops, layer, num_microbatches):
    """``sum of S_r / sum of (c_r / n)``, where ``S_r`` sums the ``c_r`` micro-batches of rank ``r``; None for none."""
    passes = [passes_of(stop, layer, num_microbatches) for stop in stops]
    if not any(passes):
        return None
    total = sum((layer + 1) * (10.0 * rank + m + 1) for rank, count in enumerate(passes) for m in range(count))
    return torch.full((2 + layer,), total / sum(count / num_microbatches for count in passes))


def random_plan(world_size, num_microbatches, num_steps=12):
    ranks = [random_stops(rank, num_steps, NUM_LAYERS * num_microbatches) for rank in range(world_size)]
    return [list(stops) for stops in zip(*ranks, strict=True)]


def check_gradients(world_size, cases):
    """Of the cases, each of which is what `merge_chain` is given."""
    for (stops, num_microbatches, *_), *results in zip(cases, *run_ranks(merge_all, world_size, cases), strict=True):
        for gradients_and_reports, stop in zip(zip(*results, strict=True), stops, strict=True):
            expected = [expected_gradient(stop, layer, num_microbatches) for layer in range(NUM_LAYERS)]
            for gradients, _ in gradients_and_reports:
                torch.testing.assert_close(gradients, expected)
            assert len({digest(gradients) for gradients, _ in gradients_and_reports}) == 1


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_merged_gradient_is_the_mean_over_the_ranks_that_computed_it(world_size):
    check_gradients(world_size, [(random_plan(world_size, number), number) for number in (1, 3)])


def test_merged_gradient_is_the_same_mean_where_each_stage_is_a_message():
    plans = (None, 2, ["layers.1", "layers.3"])
    check_gradients(3, [(random_plan(3, number), number, 1, plan) for plan in plans for number in (1, 2)])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gradient_nobody_computed_is_none_on_every_rank(world_size):
    for results in run_ranks(merge_chain, world_size, [[2] * world_size], 1):
        gradients, report = results[0]
        assert [gradient is None for gradient in gradients] == [True, True, True, False, False]
        assert report.late_ranks == tuple(range(world_size))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_report_tells_reach_weights_and_late_ranks_alike_on_every_rank(world_size):
    cases = [
        (random_plan(world_size, number), number, None, [f"layers.{i}" for i in range(NUM_LAYERS)]) for number in (1, 2)
    ]
    for (stops, num_microbatches, *_), *everyone in zip(cases, *run_ranks(merge_all, world_size, cases), strict=True):
        for reports, stop in zip(zip(*everyone, strict=True), stops, strict=True):
            assert len({shared(report) for _, report in reports}) == 1
            check_report(reports[0][1], stop, num_microbatches)


def check_report(report, stop, num_microbatches):
    numel = [2 + layer for layer in range(NUM_LAYERS)]
    shares = [
        [passes_of(own, layer, num_microbatches) / num_microbatches for layer in range(NUM_LAYERS)] for own in stop
    ]
    reaches = [sum(s * n for s, n in zip(share, numel, strict=True)) / sum(numel) for share in shares]
    assert [stage.name for stage in report.stages] == [f"layers.{i}" for i in reversed(range(NUM_LAYERS))]
    assert [rank.reach for rank in report.ranks] == pytest.approx(reaches)
    assert report.dropped_share == pytest.approx(1 - sum(reaches) / len(stop))
    assert report.late_ranks == tuple(rank for rank, reach in enumerate(reaches) if reach < 1)
    weights = [sum(share[layer] for share in shares) for layer in reversed(range(NUM_LAYERS))]
    assert [stage.weight for stage in report.stages] == pytest.approx(weights)
    assert not any(stage.estimated for stage in report.stages)
    causes = [None if reach == 1 else "forward" if not reach else "backward" for reach in reaches]
    assert [rank.cause for rank in report.ranks] == causes
    for rank, share in zip(report.ranks, shares, strict=True):
        assert [math.isnan(seconds) for seconds in rank.stage_s] == [one < 1 for one in reversed(share)]


def merge_rarely_used(rank, used_by, num_microbatches, stop):
    """Merge a parameter that the graph uses only on some ranks, where rank 0 stops after ``stop`` gradients."""
    module = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("first", "second", "rare")})

    def used(x):
        return module["second"](module["first"](x))

    module.forward = lambda x, rare: module["rare"](used(x)) if rare else used(x)
    stopper = Stopper(module)
    with staged(module) as model:
        nn.init.ones_(module["first"].weight)
        nn.init.ones_(module["second"].weight)
        with model.step(num_microbatches=num_microbatches) as step:
            stopper.arm(step, stop if rank == 0 else None)
            for _ in range(num_microbatches):
                model(torch.tensor([[rank + 1.0]]), rank in used_by).backward()
        return module["rare"].weight.grad, model.last_report.late_ranks


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_parameter_that_a_rank_does_not_use_is_a_zero_in_the_mean(world_size):
    for gradient, late in run_ranks(merge_rarely_used, world_size, [0], 1, None):
        torch.testing.assert_close(gradient, torch.tensor([[1 / world_size]]))
        assert late == ()


def test_parameter_that_no_rank_uses_has_no_gradient_and_makes_nobody_late():
    assert run_ranks(merge_rarely_used, 2, [], 1, None) == [(None, ())] * 2


def test_whole_microbatches_of_a_late_rank_count_for_parameters_it_did_not_use():
    # rank 0 has finished one of two micro-batches for sure: half a zero, beside the 2 and 2 of rank 1
    for gradient, late in run_ranks(merge_rarely_used, 2, [1], 2, 3):
        torch.testing.assert_close(gradient, torch.tensor([[(0 + 2 + 2) / (0.5 + 1)]]))
        assert late == (0,)


def log_scalars(rank):
    with staged(Chain()) as model:
        with model.step() as step:
            step.log(loss=float(rank), **({"rare": torch.tensor(10.0 * rank)} if rank > 0 else {}))
            model(1.0).backward()
        return dict(model.last_report.scalars)


def test_scalars_come_back_as_means_over_the_ranks_that_gave_them():
    assert run_ranks(log_scalars, 3) == [{"loss": 1.0, "rare": 15.0}] * 3


def train(rank, estimator, num_steps, optimizer_class=torch.optim.AdamW):
    """Train with random stops; digests of the parameters along the way, and how often this rank was late."""
    module = mlp(seed=rank)
    stopper = Stopper(module)
    stops = random_stops(rank, num_steps, len(list(module.parameters())))
    momentum = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
    optimizer = optimizer_class(module.parameters(), lr=0.01, **momentum)
    digests, late = [], 0
    with staged(module, estimator=ESTIMATORS[estimator](optimizer)) as model:
        for number, stop in enumerate(stops):
            with model.step() as step:
                stopper.arm(step, stop)
                model(features(rank, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            late += rank in model.last_report.late_ranks
            if number % 20 == 19:
                digests.append(digest(module.parameters()))
    return digests, late


def train_all(rank, *how):
    return {estimator: train(rank, estimator, *how) for estimator in ESTIMATORS}


@pytest.mark.parametrize("world_size", [2, 3])
def test_replicas_stay_identical_when_ranks_stop_at_random(world_size):
    results = run_ranks(train_all, world_size, 40)
    for estimator in ESTIMATORS:
        assert all(own[estimator][0] == results[0][estimator][0] for own in results), estimator
        assert all(own[estimator][1] > 9 for own in results), estimator


def test_replicas_of_four_ranks_stay_identical_over_many_steps():
    results = run_ranks(train_all, 4, 40, torch.optim.SGD)
    for estimator in ESTIMATORS:
        assert all(own[estimator][0] == results[0][estimator][0] for own in results), estimator
