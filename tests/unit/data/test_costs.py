"""Who has which samples of a step by what these cost: each once, near to the best, and none without any."""

import itertools
import random

import pytest
import torch

from straggle.data.costs import Costs, costs_of
from straggle.data.deal import Ledger, Parts
from straggle.policies.shares.cost import longest_first


def ends(own, costs, speeds):
    return [sum(costs[place] for place in places) / speed for places, speed in zip(own, speeds, strict=True) if speed]


def soonest(costs, speeds):
    """The least end of the last rank, by trying all ways in which no rank is left without any."""
    ways = itertools.product([rank for rank, speed in enumerate(speeds) if speed], repeat=len(costs))
    each = ([[place for place, own in enumerate(way) if own == rank] for rank in range(len(speeds))] for way in ways)
    return min(
        max(ends(own, costs, speeds)) for own in each if all(own[rank] for rank in range(len(own)) if speeds[rank])
    )


@pytest.mark.parametrize("seed", range(30))
def test_last_rank_ends_within_four_thirds_of_the_soonest_and_each_place_is_dealt_once(seed):
    chance = random.Random(seed)
    ranks = chance.choice([1, 2, 3])
    costs = sorted((chance.choice([1, chance.random(), 9 * chance.random()]) for _ in range(7)), reverse=True)
    own = longest_first(costs, [1.0] * ranks)
    assert sorted(itertools.chain(*own)) == list(range(7))
    assert all(places == sorted(places) for places in own)
    assert max(ends(own, costs, [1] * ranks)) <= (4 / 3 - 1 / (3 * ranks) + 1e-9) * soonest(costs, [1] * ranks)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_of_other_speeds_end_within_twice_the_soonest_and_none_is_left_without_any(seed):
    chance = random.Random(seed)
    speeds = [chance.choice([0, 1, 1, 2, 5]) for _ in range(3)]
    speeds[chance.randrange(3)] = 1
    costs = sorted((chance.random() for _ in range(chance.choice([3, 6]))), reverse=True)
    own = longest_first(costs, speeds)
    assert sorted(itertools.chain(*own)) == list(range(len(costs)))
    assert [bool(places) for places in own] == [speed > 0 for speed in speeds]
    assert max(ends(own, costs, speeds)) <= 2 * soonest(costs, speeds) + 1e-9


def test_equal_costs_are_dealt_by_number_of_samples():
    dealt = Costs(torch.full((9,), 7.0, dtype=torch.float64)).deal(torch.tensor([8, 0, 3, 5, 2, 7]), [4, 2, 0])
    assert [len(own) for own in dealt] == [4, 2, 0]


def test_units_are_of_samples_that_are_about_equally_long_and_the_shorter_unit_is_the_last():
    costs = Costs(torch.tensor([1, 9, 2, 8, 3, 7, 4.0], dtype=torch.float64), unit=2)
    dealt = costs.deal(torch.arange(7), [1, 1])
    assert [own.tolist() for own in dealt] == [[1, 3], [5, 6, 4, 2, 0]]


def test_cost_is_a_function_of_a_sample_or_a_number_for_each():
    for cost in (lambda sample: sample + 1, [1, 2.0, 3], torch.tensor([1, 2, 3])):
        assert costs_of(cost, 3).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ([1.0, 2.0], "cost has 2 numbers for 3 samples: give one for each, or a function"),
        ([1.0, 0, 2.0], "cost of sample 1 is 0: must be a positive number"),
        ([1.0, 2.0, float("nan")], "cost of sample 2 is nan"),
        (lambda _: float("inf"), "cost of sample 0 is inf"),
        (lambda _: None, "cost of sample 0 is None"),
        (["a", "b", "c"], "cost of sample 0 is 'a'"),
    ],
)
def test_cost_that_is_none_is_refused_with_its_sample(cost, words):
    with pytest.raises(ValueError, match=words):
        costs_of(cost, 3)


def made(number, ranks, costs, seed):
    return Ledger(number, batch_size=3, world_size=ranks, seed=seed, shares=[3] * ranks, costs=costs)


@pytest.mark.parametrize("seed", range(10))
def test_each_sample_is_brought_once_though_ranks_leave_come_back_and_have_other_shares(seed):
    chance = random.Random(seed)
    number, ranks = 61, 3
    costs = Costs(torch.tensor([chance.expovariate(1) + 0.01 for _ in range(number)], dtype=torch.float64))
    ledger = made(number, ranks, costs, seed)
    seen, shares, absent = [], (3,) * ranks, frozenset()
    while ledger.epoch == 0:
        own = [ledger.of(rank).tolist() for rank in range(ranks)]
        if chance.random() < 0.2:
            state, ledger = ledger.state_dict(), made(number, ranks, costs, seed)
            ledger.load_state_dict(state)
            assert [ledger.of(rank).tolist() for rank in range(ranks)] == own
        if chance.random() < 0.3:
            absent = frozenset({chance.randrange(ranks)}) - absent
            shares = tuple(0 if rank in absent else chance.randrange(1, 5) for rank in range(ranks))
        brought = tuple(rank not in absent for rank in range(ranks))
        seen += [sample for samples, there in zip(own, brought, strict=True) if there for sample in samples]
        ledger.merged(Parts(brought, absent), shares)
    assert sorted(seen) == list(range(number))


def test_work_of_ranks_is_counted_in_mean_samples():
    costs = Costs(torch.tensor([1.0, 3, 2, 2], dtype=torch.float64))
    ledger = Ledger(4, batch_size=2, world_size=2, shuffle=False, costs=costs)
    assert ledger.work() == [2.0, 2.0]
    assert [ledger.of(rank).tolist() for rank in range(2)] == [[1, 0], [2, 3]]
