"""Logical ranks learn what real ranks learn."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from ranks import run_ranks, staged
from training import Stopper, random_stops

from straggle import (
    Abstain,
    Carry,
    ErrorFeedback,
    LastMerged,
    LastOwn,
    Merge,
    MovingAverage,
    OptimizerMomentum,
    Zero,
)
from straggle.lab.learning.lateness import (
    LatePattern,
    Nobody,
)
from straggle.lab.learning.learning import Setting, Treatment, learn, units_of
from straggle.lab.learning.samples import FromOnePool
from straggle.lab.learning.weighting import Count, InverseProbability
from straggle.lab.workloads.digits import Digits

RANKS, STEPS, BATCH, SEED = 4, 12, 4, 3
NUM_STAGES = 3
sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.5)


def small():
    return Digits(channels=4, depth=3)


def units(workload, num_units):
    """The parameters of each unit."""
    torch.manual_seed(SEED)
    setting = Setting(workload, sgd, FromOnePool(workload, RANKS, BATCH, seed=SEED), STEPS, num_units=num_units)
    return units_of(setting, workload.model())


def cuts(workload, num_units):
    """For each rank the number of units that it finishes in each step."""
    count = len(units(workload, num_units))
    stops = [random_stops(rank, STEPS, count, seed=SEED) for rank in range(RANKS)]
    for rank, each in enumerate(stops):
        each[0] = None
        each[4], each[5], each[7] = 2, 0, rank  # no rank comes to the end, none begins, rank 0 does not begin
    return [[count if stop is None else stop for stop in each] for each in stops]


class Given(LatePattern):
    """Each rank comes as far as it is given."""

    def __init__(self, by_rank):
        self._by_rank = by_rank
        self._step = 0

    def reached(self, _num_ranks, num_units, _generator):
        self._step += 1
        return torch.arange(num_units) < torch.tensor(self._by_rank)[:, self._step - 1, None]


def real_rank(rank, make_estimator, merge, num_units):
    """Parameters after training on a real rank, stopped by hand."""
    workload = small()
    sizes = [len(unit) for unit in units(workload, num_units)]
    torch.manual_seed(SEED)
    module = workload.model()
    stopper = Stopper(module)
    optimizer = sgd(module.parameters())
    samples = FromOnePool(workload, RANKS, BATCH, seed=SEED)
    with staged(module, estimator=make_estimator(optimizer), merge=merge, stages=num_units) as model:
        for number, stop in enumerate(cuts(workload, num_units)[rank]):
            with model.step() as step:
                stopper.arm(step, None if stop == len(sizes) else sum(sizes[:stop]))
                workload.loss(model, workload.batch(samples.indices(number)[rank])).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().numpy() for parameter in module.parameters()]


def abstain(_):
    return Abstain()


def zero(_):
    return Zero()


def last_own(_):
    return LastOwn(0.5)


def last_merged(_):
    return LastMerged(0.25)


def moving_average(_):
    return MovingAverage(0.5, 0.75)


def feedback(_):
    return ErrorFeedback(LastMerged(0.5), max_residual=2.0)


def feedback_of_zeros(_):
    return ErrorFeedback(Zero())


def carry(_):
    return Carry(0.75, max_staleness=2)


ESTIMATORS = [
    abstain,
    zero,
    last_own,
    last_merged,
    moving_average,
    OptimizerMomentum,
    feedback,
    feedback_of_zeros,
    carry,
]


@pytest.mark.parametrize("make_estimator", ESTIMATORS, ids=lambda make: make.__name__)
def test_logical_ranks_end_with_the_parameters_of_real_ranks(make_estimator):
    assert_equal_to_real_ranks(make_estimator, Merge(), None)


def test_weights_by_inverse_probability_are_those_of_real_ranks():
    merge = Merge(weighting="inverse_probability", probability_window=3, max_weight=2.5)
    assert_equal_to_real_ranks(abstain, merge, NUM_STAGES)


def assert_equal_to_real_ranks(make_estimator, merge, num_units):
    workload = small()
    setting = Setting(workload, sgd, FromOnePool(workload, RANKS, BATCH, seed=SEED), STEPS, seed=SEED)
    setting = replace(setting, num_units=num_units)
    make_weighting = (
        Count if merge.weighting == "count" else partial(InverseProbability, merge.probability_window, merge.max_weight)
    )
    stops = cuts(workload, num_units)
    learned = learn(setting, Treatment(Given(stops), make_weighting, make_estimator), chunk=3)
    real = run_ranks(real_rank, RANKS, make_estimator, merge, num_units)
    for parameters in real:
        torch.testing.assert_close(
            [p.detach() for p in learned.model.parameters()], list(map(torch.tensor, parameters))
        )
    start = learn(replace(setting, steps=0), Treatment(Nobody())).model
    pairs = zip(start.parameters(), learned.model.parameters(), strict=True)
    moved = max(float((a - b).detach().abs().max()) for a, b in pairs)
    assert moved > 0.01  # or equality shows nothing
