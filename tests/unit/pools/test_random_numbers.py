"""Random numbers by micro-batch: the same whoever draws them, and the loop's own go on as if nothing had been."""

import pytest
import torch

from straggle.pools.pulling import random_numbers_of


def drawn(seed, number):
    with random_numbers_of(seed, number):
        return torch.rand(8).tolist()


def test_a_micro_batch_has_the_same_random_numbers_whenever_it_is_computed_and_no_other_has_them():
    first = {(seed, number): drawn(seed, number) for seed in (0, 1, 2**70) for number in range(4)}
    assert len({tuple(own) for own in first.values()}) == len(first)
    torch.rand(3)
    assert {key: drawn(*key) for key in first} == first


def test_numbers_of_the_loop_go_on_as_without_a_micro_batch_also_after_an_error():
    torch.manual_seed(3)
    expected = torch.rand(4).tolist()
    torch.manual_seed(3)
    numbers: dict[int, float] = {}
    with pytest.raises(KeyError), random_numbers_of(5, 1):
        numbers[torch.rand(9).argmin().item() + 9]
    assert torch.rand(4).tolist() == expected
