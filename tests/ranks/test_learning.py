"""The logical ranks of the experiments learn what real ranks learn."""

from functools import partial

import pytest
import torch
from ranks import run_ranks, staged
from training import Stopper, random_stops

from experiments._logical import Setting, Treatment, from_one_pool, learn, units_of
from straggle import Abstain, Zero
from straggle.lab.workloads.digits import Digits

RANKS, STEPS, BATCH, SEED = 4, 12, 4, 3
sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.5)


def setting(num_units):
    workload = Digits(channels=4, depth=3)
    return Setting(workload, sgd, from_one_pool(workload, RANKS, BATCH, SEED), STEPS, SEED, num_units)


def units(num_units):
    """How many parameters each unit has."""
    given = setting(num_units)
    return [len(unit) for unit in units_of(given, given.workload.model())]


def cuts(num_units):
    """For each rank the number of units that it finishes in each step."""
    count = len(units(num_units))
    stops = [random_stops(rank, STEPS, count, seed=SEED) for rank in range(RANKS)]
    for rank, each in enumerate(stops):
        each[0] = None
        each[4], each[5], each[7] = 2, 0, rank  # no rank comes to the end, none begins, rank 0 does not begin
    return [[count if stop is None else stop for stop in each] for each in stops]


def as_cut(by_rank, _num_ranks, num_units, _generator):
    """Each rank comes as far as it is given."""
    for step in range(STEPS):
        yield torch.arange(num_units) < torch.tensor(by_rank)[:, step, None]


def real_rank(rank, estimator, num_units):
    """Parameters after training on a real rank, stopped by hand."""
    sizes, given = units(num_units), setting(num_units)
    torch.manual_seed(SEED)
    module = given.workload.model()
    stopper = Stopper(module)
    optimizer = sgd(module.parameters())
    with staged(module, estimator=estimator, stages=num_units) as model:
        for number, stop in enumerate(cuts(num_units)[rank]):
            with model.step() as step:
                stopper.arm(step, None if stop == len(sizes) else sum(sizes[:stop]))
                given.workload.loss(model, given.workload.batch(given.samples(number)[rank])).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().numpy() for parameter in module.parameters()]


@pytest.mark.parametrize(("estimator", "over_all"), [(Abstain(), False), (Zero(), True)], ids=["abstain", "zero"])
@pytest.mark.parametrize("num_units", [3, None])
def test_logical_ranks_end_with_the_parameters_of_real_ranks(estimator, over_all, num_units):
    learned = learn(setting(num_units), Treatment(partial(as_cut, cuts(num_units)), over_all=over_all))
    found = [parameter.detach() for parameter in learned.model.parameters()]
    for parameters in run_ranks(real_rank, RANKS, estimator, num_units):
        torch.testing.assert_close(found, list(map(torch.tensor, parameters)))
    torch.manual_seed(SEED)
    start = [parameter.detach() for parameter in setting(num_units).workload.model().parameters()]
    assert max(float((a - b).abs().max()) for a, b in zip(start, found, strict=True)) > 0.01
