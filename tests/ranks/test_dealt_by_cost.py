"""A loader whose samples are dealt by what they cost: the gradients of the same steps, and ranks that end together."""

import itertools
import random

import pytest
import torch
from ranks import run_ranks, staged
from torch import nn
from torch.utils.data import DataLoader, Dataset
from training import features

from straggle import DealtLoader, MicroBatches, world

NUMBER = 53
INPUTS = features(0, 0, rows=NUMBER).double()
LENGTHS = [1 + int(20 * random.Random(number).random() ** 3) for number in range(NUMBER)]


class Texts(Dataset):
    def __len__(self):
        return NUMBER

    def __getitem__(self, index):
        return index, LENGTHS[index], INPUTS[index]


def epochs(rank, cost, by_tokens=False, num_microbatches=1, saved=None, stop_after=None):
    """For each step of an epoch the rank's samples and the merged gradient; and the state after it."""
    net = nn.Linear(4, 1, bias=False).double()
    with staged(net) as model:
        plain = DataLoader(Texts(), batch_size=3, shuffle=True)
        loader = DealtLoader(model, plain, seed=5, cost=cost, num_microbatches=num_microbatches)
        if saved is not None:
            loader.load_state_dict(saved)
        seen = []
        for batches in loader:
            batches = batches if num_microbatches > 1 else [batches]
            with model.step(num_microbatches=len(batches)) as step:
                if by_tokens:  # the mean over all tokens: each sample counts as often as it is long
                    step.weight = sum(int(lengths.sum()) for _, lengths, _ in batches)
                for _, lengths, x in batches:
                    losses = model(x).flatten()
                    loss = (losses * lengths).sum() / lengths.sum() if by_tokens else losses.mean()
                    (loss / len(batches)).backward()
            idle = model.last_report.ranks[rank].idle
            own = [] if idle else [numbers.tolist() for numbers, _, _ in batches]
            seen.append((own, net.weight.grad.flatten().clone()))
            net.zero_grad()
            if len(seen) == stop_after:
                break
        return seen, loader.state_dict()


def flat(results):
    """The samples of each step."""
    steps = zip(*(seen for seen, _ in results), strict=True)
    return [sorted(n for own, _ in step for batch in own for n in batch) for step in steps]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("by_tokens", [False, True])
def test_gradient_of_each_step_is_that_of_the_same_samples_dealt_by_number(world_size, by_tokens):
    by_cost = run_ranks(epochs, world_size, LENGTHS, by_tokens)
    by_number = run_ranks(epochs, world_size, None, by_tokens)
    assert flat(by_cost) == flat(by_number)
    assert sorted(n for step in flat(by_cost) for n in step) == list(range(NUMBER))
    for (_, gradient), (_, expected) in zip(by_cost[0][0], by_number[0][0], strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-13)
    if world_size > 1:
        assert [own for own, _ in by_cost[0][0]] != [own for own, _ in by_number[0][0]]


def spread(results):
    """The mean, over whole steps, of the tokens of the rank that has most over the mean rank's."""
    of_ranks = [[sum(LENGTHS[n] for batch in own for n in batch) for own, _ in seen] for seen, _ in results]
    steps = list(zip(*of_ranks, strict=True))[:-1]
    return sum(max(step) * len(step) / sum(step) for step in steps) / len(steps)


@pytest.mark.parametrize(("world_size", "num_microbatches"), [(4, 1), (2, 4)])
def test_ranks_have_about_the_same_cost_in_each_step(world_size, num_microbatches):
    by_cost, by_number = (run_ranks(epochs, world_size, cost, False, num_microbatches) for cost in (LENGTHS, None))
    assert flat(by_cost) == flat(by_number)
    assert spread(by_cost) - 1 < (spread(by_number) - 1) / 2


def test_micro_batches_have_a_given_size_and_similar_lengths():
    for seen, _ in run_ranks(epochs, 2, LENGTHS, False, 3):
        for own, _ in seen[:-1]:
            assert {len(batch) for batch in own} == {3}
            lengths = [[LENGTHS[n] for n in batch] for batch in own]
            assert all(min(one) >= max(other) for one, other in itertools.pairwise(lengths))


def test_run_goes_on_in_the_middle_of_an_epoch():
    complete = run_ranks(epochs, 2, LENGTHS)
    begun = run_ranks(epochs, 2, LENGTHS, False, 1, None, 4)
    resumed = run_ranks(epochs, 2, LENGTHS, False, 1, begun[0][1])
    for rank in range(2):
        assert [own for own, _ in begun[rank][0] + resumed[rank][0]] == [own for own, _ in complete[rank][0]]


def with_a_slow_rank(rank, cost):
    """Seconds of the last steps, and the shares; the last of the ranks takes twice as long for a token."""
    net = nn.Linear(4, 1, bias=False).double()
    with staged(net) as model:
        loader = DealtLoader(model, DataLoader(Texts(), batch_size=8, shuffle=True), cost=cost)
        step_s = []
        for _ in range(40):
            for numbers, lengths, x in loader:
                with model.step():
                    if not model.idle:
                        world.sleep(0.01 * int(lengths.sum()) * (2 if rank == 2 else 1))
                    model(x).mean().backward()
                if len(numbers) > 1:
                    step_s.append(model.last_report.seconds)
                net.zero_grad()
        return loader.shares, sum(step_s[-60:]) / 60


def test_slow_rank_has_less_of_the_cost_and_all_end_together():
    (by_cost, cost_s), (by_number, number_s) = (run_ranks(with_a_slow_rank, 3, cost)[0] for cost in (LENGTHS, None))
    assert by_cost[2] < 7 < by_cost[0]
    assert by_number[2] < 7 < by_number[0]
    assert cost_s < 0.9 * number_s


def refused(rank, cost):
    with staged(nn.Linear(4, 1)) as model, pytest.raises(ValueError, match="cost") as error:
        DealtLoader(model, DataLoader(Texts(), batch_size=3), cost=cost)
    return str(error.value)


def test_cost_that_is_none_is_refused_as_the_loader_is_made():
    (words,) = run_ranks(refused, 1, [1.0] * (NUMBER - 1) + [-1.0])
    assert words == f"cost of sample {NUMBER - 1} is -1.0: must be a positive number, such as its tokens"


# -- a pool


def drawn_by_cost(rank, cost, by_tokens, steps=12):
    """For each step the merged gradient, what each rank computed, and its seconds; a token takes 10 ms."""
    net = nn.Linear(4, 1, bias=False).double()
    micro_batches, seen = MicroBatches(Texts(), size=2, cost=cost), []
    with staged(net) as model:
        for number in range(steps):
            numbers = random.Random(number).sample(range(NUMBER), 32)
            parts = micro_batches.of(numbers)
            weights = [float(sum(LENGTHS[n] for n in parts[k][0].tolist())) for k in range(len(parts))]
            own = []
            with model.step() as step:
                for samples, lengths, x in step.pull(parts, weights=weights if by_tokens else None):
                    world.sleep(0.01 * int(lengths.sum()))
                    losses = model(x).flatten()
                    ((losses * lengths).sum() / lengths.sum() if by_tokens else losses.mean()).backward()
                    own += samples.tolist()
            seen.append((net.weight.grad.flatten().clone(), own, model.last_report.seconds, numbers))
            net.zero_grad()
    micro_batches.close()
    return seen


@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_pool_with_costs_has_the_gradients_of_one_without_and_ends_sooner(world_size, by_tokens):
    results = {cost is None: run_ranks(drawn_by_cost, world_size, cost, by_tokens) for cost in (LENGTHS, None)}
    for steps in zip(*results[False], *results[True], strict=True):
        weight = [LENGTHS[n] if by_tokens else 1 for n in steps[0][3]]
        expected = sum(w * INPUTS[n] for w, n in zip(weight, steps[0][3], strict=True)) / sum(weight)
        for gradient, *_ in steps:
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-13)
        for own in (steps[:world_size], steps[world_size:]):
            assert sorted(n for _, of_rank, *_ in own for n in of_rank) == sorted(steps[0][3])
    took = {key: sum(step[2] for step in ranks[0][4:]) for key, ranks in results.items()}
    least = sum(0.01 * LENGTHS[n] for step in results[True][0][4:] for n in step[3]) / world_size
    assert took[False] < took[True]
    assert took[False] < 1.15 * least
