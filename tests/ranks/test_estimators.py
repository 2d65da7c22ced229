"""What fills in for gradients that were not computed, in a merge of real ranks."""

import pytest
import torch
from ranks import run_ranks, staged
from torch import nn
from training import Chain, Stopper, grads

from straggle import Abstain, Estimate, LastMerged, LastOwn, MovingAverage, OptimizerMomentum, Zero

NUM_LAYERS = 4


@pytest.fixture
def parameter():
    return nn.Parameter(torch.tensor([7.0, 7.0]))


def merge(rank, estimator, steps, num_microbatches=1):
    """Gradients of each step and its report; ``steps`` has per step the input and after how many gradients to stop."""
    module = Chain(NUM_LAYERS)
    stopper = Stopper(module)
    results = []
    if estimator is None:
        estimator = OptimizerMomentum(optimizer := torch.optim.SGD(module.parameters(), lr=0.0, momentum=0.5))
    with staged(module, estimator=estimator, stages=NUM_LAYERS) as model:
        for inputs, stops in steps:
            with model.step(num_microbatches) as step:
                stopper.arm(step, stops[rank])
                for _ in range(num_microbatches):
                    model(inputs[rank]).backward()
            results.append((grads(module), model.last_report))
            if isinstance(estimator, OptimizerMomentum):
                optimizer.step()
            model.zero_grad()
    return results


def layers_of(gradients):
    """Each layer's gradient divided by its scale: one number, as all of its elements are equal."""
    return [None if g is None else (g / (i + 1)).unique().tolist() for i, g in enumerate(gradients)]


# rank 0 computes everything, rank 1 only the last two of four layers in the second step
SECOND_STEP = [([8.0, 4.0], [None, None]), ([2.0, 10.0], [None, 2])]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (Abstain(), 2.0),
        (Zero(), (2 + 0) / 2),
        (LastOwn(0.5), (2 + 0.5 * 4) / 1.5),
        (LastMerged(0.5), (2 + 0.5 * 6) / 1.5),
        (MovingAverage(0.9, 0.5), (2 + 0.5 * 6) / 1.5),
        (None, (2 + 0.5 * 3) / 1.5),  # SGD's buffer after one step is 6, which is (1 - 0.5) * 6 as a mean
        (LastMerged(0.0), 2.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_late_rank_contributes_its_estimate_with_its_weight(estimator, expected):
    for results in run_ranks(merge, 2, estimator, SECOND_STEP):
        gradients, report = results[1]
        assert layers_of(gradients) == [pytest.approx([expected])] * 2 + [pytest.approx([6.0])] * 2
        stands_in = isinstance(estimator, (Zero, LastOwn, MovingAverage)) or estimator is None
        stands_in |= isinstance(estimator, LastMerged) and estimator.weight > 0
        assert [stage.estimated for stage in report.stages] == [False, False, stands_in, stands_in]
        weight = 1 + (getattr(estimator, "weight", 1.0 if isinstance(estimator, Zero) else 0.5) if stands_in else 0)
        assert [stage.weight for stage in report.stages] == pytest.approx([2, 2, weight, weight])
        assert report.ranks[1].reach == pytest.approx((4 + 5) / (2 + 3 + 4 + 5))  # an estimate is not reach


# no rank reaches the first two layers in the third step; the merged gradients before it are 6 and 2
NOBODY = [([8.0, 4.0], [None, None]), ([1.0, 3.0], [None, None]), ([9.0, 9.0], [2, 2])]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (Abstain(), None),
        (Zero(), 0.0),
        (LastOwn(0.5), (1 + 3) / 2),
        (LastMerged(0.5), 2.0),
        (LastMerged(0.0), 2.0),
        (MovingAverage(0.75, 0.5), 0.75 * 6 + 0.25 * 2),
        (MovingAverage(0.75, 0.0), 0.75 * 6 + 0.25 * 2),
        (None, (0.5 * 6 + 2) * 0.5),
    ],
    ids=lambda value: f"{type(value).__name__}({getattr(value, 'weight', '')})",
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradient_nobody_computed_is_the_estimate_on_every_rank(estimator, expected, world_size):
    steps = (
        [(inputs, stops) for inputs, stops in NOBODY]
        if world_size == 2
        else [([6.0], [None]), ([2.0], [None]), ([9.0], [2])]
    )
    for results in run_ranks(merge, world_size, estimator, steps):
        first = None if expected is None else pytest.approx([expected])
        assert layers_of(results[2][0]) == [first] * 2 + [pytest.approx([9.0])] * 2


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_estimate_fills_the_microbatches_that_are_missing(weight):
    # rank 1 finishes its first of two micro-batches, and two gradients of the second; its last own sum is 4 + 4
    steps = [([8.0, 4.0], [None, None]), ([2.0, 10.0], [None, NUM_LAYERS + 2])]
    for results in run_ranks(merge, 2, LastOwn(weight), steps, 2):
        half = (2 + 2 + 10 + weight / 2 * 8) / (1 + 0.5 + weight / 2)
        whole = (2 + 2 + 10 + 10) / 2
        assert layers_of(results[1][0]) == [pytest.approx([half])] * 2 + [pytest.approx([whole])] * 2


class Ones(Abstain.__base__):
    """A user's own estimator."""

    def contribution(self, parameter):
        return Estimate(torch.ones_like(parameter), 1.0)


def test_users_own_estimator_is_used():
    for results in run_ranks(merge, 2, Ones(), [([8.0, 4.0], [None, 0])]):
        gradients = results[0][0]
        torch.testing.assert_close(
            gradients, [torch.full((2 + i,), ((i + 1) * 8.0 + 1) / 2) for i in range(NUM_LAYERS)]
        )
