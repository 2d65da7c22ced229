"""A ``DataLoader`` dealt out by speed: each sample once, each as much as another, with micro-batches, and resumed."""

import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, staged
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from training import features, mlp

from straggle import DealtLoader

NUM_SAMPLES = 29
INPUTS = features(0, 0, rows=NUM_SAMPLES)


class Numbers(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return index, INPUTS[index]


def with_shares(loader, shares):
    """The loader, whose ranks have these shares from here on."""
    state = loader.state_dict()
    state["rebalance"]["shares"] = shares
    state["epochs"]["shares"] = [share * state["epochs"]["batch_size"] for share in shares]
    loader.load_state_dict(state)
    return loader


def steps_of_an_epoch(rank, shares, num_workers, stop_after, state=None):
    """For each step the rank's samples, the merged gradient and all ranks' weights; the state after it."""
    net = nn.Linear(4, 1, bias=False)
    with staged(net) as model:
        plain = DataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=num_workers)
        loader = DealtLoader(model, plain, seed=5)
        if state is None:
            with_shares(loader, shares)
        else:
            loader.load_state_dict(state)
        seen = []
        for samples, x in loader:
            with model.step():
                model(x).mean().backward()
            idle = model.last_report.ranks[rank].idle
            weights = [own.weight for own in model.last_report.ranks]
            seen.append(([] if idle else samples.tolist(), net.weight.grad.flatten().clone(), weights))
            net.zero_grad()
            if len(seen) == stop_after:
                break
        return seen, loader.state_dict(), loader.epoch, len(loader)


@pytest.mark.parametrize(("world_size", "shares"), [(1, [2]), (2, [2, 2]), (2, [3, 1]), (3, [1, 3, 2])])
def test_each_sample_comes_once_and_counts_as_much_as_any_other(world_size, shares):
    results = run_ranks(steps_of_an_epoch, world_size, shares, 0, None)
    steps = list(zip(*(seen for seen, *_ in results), strict=True))
    assert {(epoch, len(steps)) for _, _, epoch, _ in results} == {(1, results[0][3])}
    assert sorted(n for step in steps for own, _, _ in step for n in own) == list(range(NUM_SAMPLES))
    for step in steps:
        numbers = [number for own, _, _ in step for number in own]
        for rank, (own, gradient, weights) in enumerate(step):
            assert torch.allclose(gradient, INPUTS[numbers].mean(0), atol=1e-6)
            assert weights == step[0][2]
            assert weights[rank] == len(own) or not own
    assert steps[0][0][2] == [float(share) for share in shares]


@pytest.mark.slow  # its worker imports what reads the data set
def test_workers_that_fetch_ahead_change_nothing(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:  # in this process, because a rank that is forked by a test may have no workers
        plain, with_workers = (steps_of_an_epoch(0, [2], workers, None)[0] for workers in (0, 1))
    finally:
        dist.destroy_process_group()
    assert [own for own, *_ in with_workers] == [own for own, *_ in plain]


def test_run_goes_on_in_the_middle_of_an_epoch_with_the_samples_and_shares_of_the_saved_one():
    complete = run_ranks(steps_of_an_epoch, 2, [3, 1], 0, None)
    begun = run_ranks(steps_of_an_epoch, 2, [3, 1], 0, 3)
    resumed = run_ranks(steps_of_an_epoch, 2, None, 0, None, begun[0][1])
    for rank in range(2):
        samples = [own for own, *_ in begun[rank][0] + resumed[rank][0]]
        assert samples == [own for own, *_ in complete[rank][0]]


def with_microbatches(rank, shares):
    with staged(mlp()) as model:
        plain = DataLoader(Numbers(), batch_size=2)
        loader = with_shares(DealtLoader(model, plain, num_microbatches=3), shares)
        seen = []
        for batches in loader:
            with model.step(num_microbatches=len(batches)):
                for _, x in batches:
                    (model(x).mean() / len(batches)).backward()
            own = model.last_report.ranks[rank]
            seen.append(([] if own.idle else [samples.tolist() for samples, _ in batches], own.weight))
        return seen


def test_micro_batches_are_dealt_whole_and_in_the_order_of_a_loader_that_does_not_shuffle():
    results = run_ranks(with_microbatches, 2, [4, 2])
    first = [seen[0] for seen in results]
    assert first == [([[0, 1], [2, 3], [4, 5], [6, 7]], 4.0), ([[8, 9], [10, 11]], 2.0)]
    assert sorted(n for seen in results for own, _ in seen for batch in own for n in batch) == list(range(NUM_SAMPLES))


def with_a_slow_rank(rank):
    with staged(mlp()) as model:
        data = TensorDataset(features(0, 0, rows=2000), torch.arange(2000))
        loader = DealtLoader(model, DataLoader(data, batch_size=16))
        had = []
        for x, numbers in loader:
            with model.step():
                time.sleep(0.002 * len(x) * (1 + 3 * (rank == 1)))
                model(x).mean().backward()
            had += numbers.tolist()
            if loader.shares[1] < 10:  # the same on all ranks, after the same step
                break
        return had, loader.shares


@pytest.mark.slow  # it sleeps until the shares have changed
def test_rank_that_is_always_slow_is_dealt_less_of_a_loader():
    results = run_ranks(with_a_slow_rank, 2)
    assert len({shares for _, shares in results}) == 1
    assert results[0][1][1] < 10 < 22 < results[0][1][0]
    had = [number for own, _ in results for number in own]
    assert len(had) == len(set(had))
