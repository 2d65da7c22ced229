"""An epoch sees every sample, also those whose step was cut short."""

import pytest
import torch

from straggle import RequeueSampler


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
