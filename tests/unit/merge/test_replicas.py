"""Replicas are compared while they are trained: one that differs is named, one that is only behind is not."""

import pytest
import torch
from telemetry_rows import row_of
from torch import nn

from straggle.merge.rows.table import Table
from straggle.merge.wire.contents import digest
from straggle.merge.wire.contents import fingerprint as fingerprint_of


def fingerprint(tensors):
    return fingerprint_of((str(number), tensor) for number, tensor in enumerate(tensors)).number


def table(*fingerprints):
    rows = [row_of(fingerprint=own).encode() for own in fingerprints]
    return Table(torch.stack(rows), 0)


@pytest.mark.parametrize(
    ("fingerprints", "different"),
    [
        ([5, 5, 5, 5], ()),
        ([5, 5, 6, 5], (2,)),
        ([6, 5, 5, 5], (0,)),
        ([5, 6], (1,)),
        ([5, 5 + 2**24, 5], (1,)),
        ([2**48 - 1, 2**48 - 1, 2**48 - 2], (2,)),
        ([5, -1, 5, 6], (3,)),
        ([5, -1, -1], None),
        ([-1, -1], None),
    ],
)
def test_ranks_that_differ_from_most_are_named(fingerprints, different):
    assert table(*fingerprints).different_ranks() == different


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (4, 6), (2, 3, 5, 7)])
def test_fingerprint_sees_the_smallest_change_of_any_element(dtype, shape):
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(dtype), torch.randn(3).to(dtype)]
    before = fingerprint(tensors)
    assert before == fingerprint([tensor.clone() for tensor in tensors])
    assert 0 <= before < 2**48
    for index in range(tensors[0].numel()):
        for bit in (0, 4, 7):
            changed = tensors[0].clone()
            changed.view(-1).view(torch.uint8)[(index + 1) * dtype.itemsize - 1] ^= 1 << bit
            assert fingerprint([changed, tensors[1]]) != before
    assert fingerprint(tensors[::-1]) != before or shape == (3,)


def test_fingerprint_is_that_of_the_values_wherever_they_lie():
    torch.manual_seed(0)
    values = torch.randn(2, 4, 3, 3)
    shifted = torch.zeros(values.numel() + 1)
    shifted[1:] = values.flatten()
    as_it_was = shifted.clone()
    others = [values.to(memory_format=torch.channels_last), shifted[1:].view(values.shape)]
    assert [fingerprint([other]) for other in others] == [fingerprint([values])] * 2
    assert torch.equal(shifted, as_it_was)


def test_parameters_of_any_module_have_a_fingerprint():
    assert fingerprint(nn.Linear(3, 3).parameters()) >= 0


def test_fingerprint_of_many_tensors_says_which_differ():
    one = fingerprint_of([("a", torch.zeros(3)), ("b", torch.ones(2))])
    other = fingerprint_of([("a", torch.zeros(3)), ("b", torch.full((2,), 2.0))])
    assert one.as_mapping()["a"] == other.as_mapping()["a"]
    assert one.as_mapping()["b"] != other.as_mapping()["b"]
    assert fingerprint([torch.zeros(3)]) != fingerprint([torch.zeros(4)])


@pytest.mark.parametrize("numel", [0, 5, 40_000])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.int64, torch.float8_e4m3fn, torch.complex64])
def test_digest_depends_on_elements_their_order_and_shape(numel, dtype):
    values = torch.arange(numel).remainder(2).to(dtype)
    assert digest(values) == digest(values.clone())
    assert digest(values) != digest(values.view(-1, 1))
    if numel > 1:
        other = torch.arange(1, numel + 1).remainder(2).to(dtype)
        assert digest(values) != digest(other)
