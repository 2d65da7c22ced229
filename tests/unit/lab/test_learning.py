"""Logical ranks learn what real ranks learn, and rules for who is late mean what they say."""

from functools import partial
from itertools import islice

import pytest
import torch
from ranks import digest
from torch import nn

from straggle import (
    FixedDeadline,
    LateHandling,
    WaitForAll,
)
from straggle.commands.config import load
from straggle.commands.config_keys import ConfigurationError
from straggle.lab.learning.lateness import (
    ByDeadline,
    DropWhole,
    Nobody,
    OtherRanks,
    OtherRanksPerUnit,
    PoissonReach,
    SameRanks,
    SameReach,
    UniformReach,
)
from straggle.lab.learning.learning import Setting, Treatment, learn, units_of
from straggle.lab.learning.logical import LogicalRanks
from straggle.lab.learning.samples import FromOnePool, OfTheirOwn
from straggle.lab.learning.weighting import InverseProbability
from straggle.lab.simulate.delays import Delays, NoDelay, SlowRanks
from straggle.lab.simulate.units import Work
from straggle.lab.workloads.digits import Digits
from straggle.merge.options import inverse_probability
from straggle.observe.intervals import difference_interval, mean_interval

RANKS, STEPS, BATCH, SEED = 4, 12, 4, 3
sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.5)


def small():
    return Digits(channels=4, depth=3)


def units(workload, num_units):
    """The parameters of each unit."""
    torch.manual_seed(SEED)
    setting = Setting(workload, sgd, FromOnePool(workload, RANKS, BATCH, seed=SEED), STEPS, num_units=num_units)
    return units_of(setting, workload.model())


# -- who is late


def share(lateness, steps=400, num_ranks=6, num_units=6):
    """In which share of the steps each rank finishes each unit."""
    drawn = islice(lateness.steps(num_ranks, num_units, torch.Generator().manual_seed(0)), steps)
    return torch.stack(list(drawn)).float().mean(0)


def test_the_same_ranks_are_late_in_every_step_and_reach_a_layer_as_often_as_they_should():
    uniform = share(SameRanks(4, UniformReach()), 4000)
    assert uniform[:2].unique().tolist() == [1.0]
    assert uniform[2:].mean(0).tolist() == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6], abs=0.02)
    poisson = share(SameRanks(6, PoissonReach(3)), 4000).mean(0)
    assert poisson.tolist() == pytest.approx([1, 0.950, 0.801, 0.577, 0.353, 0.185], abs=0.02)
    assert share(SameRanks(1, SameReach(0.5)))[5].tolist() == [1, 1, 1, 0, 0, 0]


def test_other_ranks_are_late_in_each_step_or_for_each_unit():
    for lateness in (OtherRanks(2), OtherRanksPerUnit(2)):
        assert share(lateness, 2000).flatten().tolist() == pytest.approx([4 / 6] * 36, abs=0.05)
    step, unit = (next(kind(2).steps(6, 50, torch.Generator())) for kind in (OtherRanks, OtherRanksPerUnit))
    assert step.sum(0).tolist() == unit.sum(0).tolist() == [4] * 50
    assert len(step.unique(dim=1).T) == 1
    assert len(unit.unique(dim=1).T) > 1


def test_a_late_ranks_whole_gradient_is_dropped():
    reached = share(DropWhole(SameRanks(2, SameReach(0.5))))
    assert reached.tolist() == [[1.0] * 6] * 4 + [[0.0] * 6] * 2


def test_ranks_are_late_by_a_deadline_as_in_the_simulation_of_its_times():
    lateness = ByDeadline(FixedDeadline(1.0), SlowRanks(NoDelay(), 0.25, 2.0))
    first, *later = islice(lateness.steps(4, 4, torch.Generator().manual_seed(0)), 5)
    assert bool(first.all())  # all ranks are waited for in the first step
    # at twice the time the forward pass and the first of four stages take 2/3 + 2 * 1/6, all of the deadline
    assert all(sorted(reached.sum(1).tolist()) == [1, 4, 4, 4] for reached in later)


def test_a_deadline_that_nobody_passes_changes_nothing():
    workload = small()
    setting = Setting(workload, sgd, FromOnePool(workload, RANKS, BATCH, seed=0), 5)
    plain, under = (learn(setting, Treatment(kind)) for kind in (Nobody(), ByDeadline(FixedDeadline(1.5), NoDelay())))
    assert digest(plain.model.parameters()) == digest(under.model.parameters())
    assert plain.losses == under.losses


class Recorded(Delays):
    """Has units of its own, as a trace does."""

    def units(self, units):  # noqa: ARG002
        return Work(1.0, num_stages=4).units("stage")

    def steps(self, base_s, ranks, generator):  # noqa: ARG002
        while True:
            yield base_s.expand(ranks, -1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: share(SameRanks(7)), "late=7: of 6 ranks"),
        (lambda: OtherRanksPerUnit(-1), "late=-1: must be an integer"),
        (lambda: share(ByDeadline(WaitForAll(), Recorded())), "the recorded run has 4 stages, .* set stages=4"),
        (lambda: SameReach(1.0), "share=1.0"),
        (lambda: PoissonReach(-1.0), "mean=-1.0"),
        (lambda: InverseProbability(max_weight=0.5), "max_weight=0.5"),
        (
            lambda: ByDeadline(WaitForAll(), NoDelay(), late_handling=LateHandling(granularity="microbatch")),
            "only stage",
        ),
        (lambda: OfTheirOwn(small(), 200, 16, seed=0), "fewer than batch_size=16"),
        (lambda: OfTheirOwn(small(), 2, 16, seed=0, sorted_share=2.0), "sorted_share=2.0"),
        (lambda: LogicalRanks(small(), nn.BatchNorm1d(2), 2), "has buffers, such as running_mean"),
    ],
)
def test_what_cannot_be_is_refused_with_its_value(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# -- samples and weights


@pytest.mark.parametrize("sorted_share", [0.0, 0.5, 1.0])
def test_each_rank_goes_through_samples_of_its_own(sorted_share):
    workload = small()
    samples = OfTheirOwn(workload, 5, 8, seed=1, sorted_share=sorted_share)
    assert torch.cat(samples.parts).sort().values.tolist() == list(range(workload.num_samples))
    epoch = torch.cat([samples.indices(step) for step in range(len(samples.parts[4]) // 8)], dim=1)
    for rank, part in enumerate(samples.parts):
        seen = epoch[rank].tolist()
        assert len(set(seen)) == len(seen)
        assert set(seen) <= set(part.tolist())
    classes = [len(workload.batch(part)[1].unique()) for part in samples.parts]
    assert max(classes) <= 4 if sorted_share == 1 else classes == [10] * 5


def test_seldom_reached_units_count_by_the_inverse_of_their_chance_in_the_steps_before():
    weighting = InverseProbability(window=4, max_weight=3.0)
    reached = [torch.tensor([[True, step % 2 == 0, step == 0]]) for step in range(9)]
    weights = [weighting.weights(each).tolist()[0] for each in reached]
    assert weights[0] == [1.0, 1.0, 1.0]
    assert weights[2] == [1.0, 2.0, 0.0]
    assert weights[8] == [1.0, 2.0, 0.0]
    assert inverse_probability(torch.tensor([0.0, 0.5, 1.0]), 3.0).tolist() == [3.0, 2.0, 1.0]


def test_a_thousand_ranks_learn():
    workload = Digits(channels=4, depth=1)
    setting = Setting(workload, partial(torch.optim.SGD, lr=0.5), OfTheirOwn(workload, 1000, 1, seed=0), 3)
    learned = learn(setting, Treatment(OtherRanks(100)), chunk=256)
    assert learned.reached.shape == (1000, 5)
    assert learned.losses[-1] < learned.losses[0]


# -- the command and its numbers


def test_interval_of_a_mean_is_students():
    values = [1.0, 2.0, 4.0, 5.0]
    for count, quantile in ((4, 3.182), (8, 2.365), (20, 2.093)):
        sample = (values * 5)[:count]
        expected = quantile * torch.tensor(sample).std().item() / count**0.5
        assert mean_interval(sample).half == pytest.approx(expected, rel=2e-3)
    assert mean_interval(values).value == 3.0
    assert f"{difference_interval([2.0, 3.0], [1.0, 2.0]):+.1f}" == "+1.0 +- 0.0"


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("lateness=fixed", "choose one of deadline, nobody, other_ranks, per_unit, same_ranks"),
        ("lateness.lates=2", "unknown key lateness.lates"),
        ("seeds=0", "seeds=0: must be an integer of at least 1"),
        ("merge.weighting=most", "weighting='most': choose one of count, inverse_probability"),
        ("stages=99", "this model can be divided into 1 to"),
    ],
)
def test_wrong_configuration_is_refused_with_what_is_valid(override, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        load("learn", [override])
