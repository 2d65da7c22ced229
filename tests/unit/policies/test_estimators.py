"""What fills in for gradients that were not computed: each policy's formula, alone and in a merge."""

import pytest
import torch
from torch import nn

from straggle import Abstain, LastMerged, LastOwn, MovingAverage, OptimizerMomentum, Zero
from straggle.policies.estimators import FillIn

FIRST, SECOND = torch.tensor([1.0, 2.0]), torch.tensor([5.0, -2.0])


@pytest.fixture
def parameter():
    return nn.Parameter(torch.tensor([7.0, 7.0]))


def gradient_of(estimate):
    return None if estimate is None else (estimate.gradient.tolist(), estimate.weight)


def observe_all(estimator, parameter):
    estimator.observe(parameter, FIRST, merged=False)
    estimator.observe(parameter, 10 * FIRST, merged=True)
    estimator.observe(parameter, SECOND, merged=False)
    estimator.observe(parameter, 10 * SECOND, merged=True)


@pytest.mark.parametrize(
    ("estimator", "contribution", "substitute"),
    [
        (Abstain(), None, None),
        (Zero(), ([0.0, 0.0], 1.0), None),
        (LastOwn(0.25), ([5.0, -2.0], 0.25), None),
        (LastMerged(0.25), ([50.0, -20.0], 0.25), [50.0, -20.0]),
        (MovingAverage(0.75, 0.25), ([20.0, 10.0], 0.25), [20.0, 10.0]),  # 0.75 * 10 + 0.25 * 50, 0.75 * 20 - 0.25 * 20
    ],
    ids=lambda value: type(value).__name__,
)
def test_estimate_is_the_formula_of_what_was_observed(estimator, contribution, substitute, parameter):
    observe_all(estimator, parameter)
    assert gradient_of(estimator.contribution(parameter)) == contribution
    substituted = estimator.substitute(parameter)
    assert (None if substituted is None else substituted.tolist()) == substitute


@pytest.mark.parametrize(
    "estimator", [LastOwn(), LastMerged(), MovingAverage()], ids=lambda value: type(value).__name__
)
def test_nothing_stands_in_before_anything_was_observed_and_what_is_kept_is_a_copy(estimator, parameter):
    assert estimator.contribution(parameter) is None
    assert estimator.substitute(parameter) is None
    lent = FIRST.clone()
    estimator.observe(parameter, lent, merged=not estimator.watches_own)
    lent.zero_()
    assert estimator.contribution(parameter).gradient.tolist() == FIRST.tolist()
    assert list(estimator.memory) == [parameter]


def test_only_the_estimator_of_own_gradients_watches_them():
    estimators = (Abstain, Zero, LastOwn, LastMerged, MovingAverage, OptimizerMomentum)
    assert [estimator for estimator in estimators if estimator.watches_own] == [LastOwn]


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_adams_first_moment_is_used_without_its_bias(make, parameter):
    optimizer = make([parameter], lr=0.1, betas=(0.8, 0.9))
    estimator = OptimizerMomentum(optimizer, 0.25)
    assert estimator.contribution(parameter) is None
    for gradient in (FIRST, SECOND):
        parameter.grad = gradient.clone()
        optimizer.step()
    expected = (0.2 * 0.8 * FIRST + 0.2 * SECOND) / (1 - 0.8**2)
    torch.testing.assert_close(estimator.substitute(parameter), expected)
    assert estimator.contribution(parameter).weight == 0.25
    assert estimator.memory == {}


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_sgds_buffer_is_scaled_to_a_mean(dampening, parameter):
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.75, dampening=dampening)
    estimator = OptimizerMomentum(optimizer)
    for gradient in (FIRST, SECOND):
        parameter.grad = gradient.clone()
        optimizer.step()
    expected = (0.75 * FIRST + (1 - dampening) * SECOND) * (1 - 0.75) / (1 - dampening)
    torch.testing.assert_close(estimator.substitute(parameter), expected)


def test_an_estimator_is_shown_merged_gradients_where_it_observes_them_in_whichever_way():
    by_attribute, seen = Abstain(), []
    by_attribute.observe = lambda parameter, gradient, *, merged: seen.append((parameter, gradient, merged))
    assert not FillIn(Abstain()).reads_merged
    assert FillIn(LastMerged()).reads_merged
    fill_in, parameter, gradient = FillIn(by_attribute), nn.Parameter(torch.zeros(1)), torch.ones(1)
    assert fill_in.reads_merged
    fill_in.merged(parameter, gradient)
    assert seen == [(parameter, gradient, True)]
