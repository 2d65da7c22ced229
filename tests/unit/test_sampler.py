"""An epoch sees every sample, also those whose step was cut short."""

from collections import deque

import pytest
import torch
from ranks import run_ranks, staged
from torch.utils.data import DataLoader, Dataset
from training import Stopper, features, mlp

from straggle import RequeueSampler


class Numbers(Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, index):
        return index, features(0, index, rows=1)[0]


class Ahead:
    """A loader that fetches batches ahead, as one with workers does."""

    def __init__(self, loader, num_ahead):
        self._loader, self._num_ahead = loader, num_ahead

    def __iter__(self):
        fetched = deque()
        for batch in self._loader:
            fetched.append(batch)
            if len(fetched) > self._num_ahead:
                yield fetched.popleft()
        yield from fetched


def epoch(rank, world_size, late_at, num_ahead):
    """The samples whose steps were whole; rank 1 stops early in the steps ``late_at``."""
    module = mlp()
    stopper = Stopper(module)
    sampler = RequeueSampler(len(Numbers()), rank=rank, world_size=world_size)
    loader = DataLoader(Numbers(), batch_size=4, sampler=sampler)
    whole, dropped = [], 0
    with staged(module) as model:
        for number, (samples, x) in enumerate(model.join(sampler.epoch(Ahead(loader, num_ahead)))):
            with model.step() as step:
                stopper.arm(step, 2 if rank == 1 and number in late_at else None)
                model(x).sum().backward()
            report = model.last_report.ranks[rank]
            if report.late:
                sampler.requeue(samples)
                dropped += len(samples)
            elif not report.idle:
                whole += samples.tolist()
    return whole, dropped


@pytest.mark.parametrize("late_at", [(), (0, 2), (2,), (1, 2, 3)])
@pytest.mark.parametrize("num_ahead", [0, 2])
def test_every_sample_is_in_a_whole_step_once(late_at, num_ahead):
    results = run_ranks(epoch, 2, 2, late_at, num_ahead)
    assert sorted(sample for whole, _ in results for sample in whole) == list(range(22))
    assert (results[1][1] > 0) == bool(late_at)


def test_shares_are_disjoint_complete_and_new_in_each_epoch():
    samplers = [RequeueSampler(10, rank=rank, world_size=3, seed=7) for rank in range(3)]
    first = [list(sampler) for sampler in samplers]
    assert sorted(sample for share in first for sample in share) == list(range(10))
    assert [len(sampler) for sampler in samplers] == [4, 3, 3] == [len(share) for share in first]
    assert first == [list(sampler) for sampler in samplers]
    for sampler in samplers:
        sampler.set_epoch(1)
    assert first != [list(sampler) for sampler in samplers]


def test_order_without_shuffling():
    assert list(RequeueSampler(7, rank=1, world_size=2, shuffle=False)) == [1, 3, 5]


def test_sample_comes_again_only_so_often():
    sampler = RequeueSampler(2, rank=0, world_size=1, shuffle=False, max_requeues=2)
    seen = []
    for sample in sampler:
        seen.append(sample)
        if sample == 1:
            sampler.requeue(torch.tensor([1]))
    assert seen == [0, 1, 1, 1]
    assert sampler.num_lost == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 2, "world_size": 2}, "rank=2: there are 2 ranks"),
        ({"rank": 0, "world_size": 20}, "num_samples=10: 20 ranks need at least one each"),
        ({"rank": 0, "world_size": 1, "max_requeues": -1}, "max_requeues=-1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        RequeueSampler(10, **options)
