"""Which loaders can be dealt out, and in which order."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

from straggle.data.dealt_loader import Order, order_of

DATA = TensorDataset(torch.arange(8))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


@pytest.mark.parametrize(
    ("loader", "order"),
    [
        (DataLoader(DATA, batch_size=2), Order(False, 3)),
        (DataLoader(DATA, batch_size=2, shuffle=True), Order(True, 3)),
        (DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA, 4, 1, seed=7)), Order(True, 7)),
        (DataLoader(DATA, sampler=DistributedSampler(DATA, 4, 1, shuffle=False)), Order(False, 0)),
    ],
)
def test_order_is_that_of_the_loader(loader, order):
    assert order_of(loader, seed=3) == order


@pytest.mark.parametrize(
    ("loader", "complaint"),
    [
        (DataLoader(Stream()), "IterableDataset has no numbers"),
        (DataLoader(DATA, batch_size=None), "give it batch_size="),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2]]), "give it batch_size="),
        (DataLoader(DATA, batch_size=3, drop_last=True), "drop_last=True: each sample comes once"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), "sampler is a RandomSampler"),
        (DataLoader(DATA, sampler=[1, 2, 3]), "sampler is a list"),
    ],
)
def test_loader_whose_samples_cannot_be_dealt_is_refused(loader, complaint):
    with pytest.raises(ValueError, match=complaint):
        order_of(loader, seed=0)
