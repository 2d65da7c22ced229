"""What a group of gloo holds of what was launched in it."""

import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from straggle.merge.groups import GlooGroup, is_over


def test_group_holds_no_collective_that_is_over_and_all_that_are_not():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as ranks:
        here, there = ranks.map(lambda rank: GlooGroup(store, rank, 2, 5.0, 5.0), range(2))
    works = [here.all_reduce(torch.ones(4)), here.all_reduce(torch.ones(4))]
    first = there.all_reduce(torch.ones(4))
    assert is_over(first, 5.0)
    assert is_over(works[0], 5.0)
    held = [weakref.ref(work) for work in works]
    del works

    assert None not in [work() for work in held]
    here.forget_ended()
    assert [work() is None for work in held] == [True, False]

    second = there.all_reduce(torch.ones(4))
    assert is_over(second, 5.0)
    assert is_over(held[1](), 5.0)
    here.forget_ended()
    assert held[1]() is None
    for group in (here, there):
        group.drop()
