"""Tensors as bytes: the same elements, whatever their dtype and where they lie."""

import pytest
import torch
from torch import Tensor

from straggle.merge.wire.contents import bytes_of, set_bytes

DTYPES = [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int16, torch.int64, torch.float16]
DTYPES += [torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
STRIDES = ["as they come", "transposed", "channels last", "expanded", "no dimension", "empty", "part of another"]


def filled(dtype: torch.dtype, strides: str, number: int) -> Tensor:
    """24 elements of other bits for each number, or as many as there are with these strides."""
    bits = (torch.arange(24 * dtype.itemsize) * number).remainder(2 if dtype == torch.bool else 200).to(torch.uint8)
    flat = bits.view(dtype)
    match strides:
        case "transposed":
            return flat.view(2, 3, 4).transpose(0, 2)
        case "channels last":
            return flat.view(1, 3, 2, 4).permute(0, 3, 1, 2)
        case "expanded":
            return flat.view(2, 1, 12).expand(2, 3, 12)
        case "no dimension":
            return flat[number]
        case "empty":
            return flat[:0].view(0, 3)
        case "part of another":
            return flat[3:9]
    return flat.view(2, 3, 4)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_dtype_and_strides_gets_the_elements_of_another(dtype, strides):
    mine, theirs = filled(dtype, strides, 1), filled(dtype, strides, 2)
    if strides not in ("empty", "no dimension"):
        assert not torch.equal(bytes_of(mine), bytes_of(theirs))
    set_bytes(mine, bytes_of(theirs).clone())
    assert bytes_of(mine).tolist() == bytes_of(theirs).tolist()


def test_the_order_is_that_of_the_elements_and_not_of_the_memory():
    mine, theirs = torch.zeros(4, 3).t(), torch.arange(12.0).view(3, 4)
    set_bytes(mine, bytes_of(theirs))
    assert mine.tolist() == theirs.tolist()


def test_elements_that_lie_in_order_are_not_copied():
    tensor = torch.zeros(4, 3, requires_grad=True)
    assert bytes_of(tensor).data_ptr() == tensor.data_ptr()
    assert bytes_of(tensor[1:]).data_ptr() == tensor[1:].data_ptr()


def test_conjugated_and_negated_views_are_sent_as_what_they_stand_for():
    theirs, mine = torch.full((2,), 1j).conj(), torch.zeros(2, dtype=torch.complex64).conj()
    set_bytes(mine, bytes_of(theirs))
    assert mine.tolist() == [-1j, -1j]
    negated = torch.ones(2, dtype=torch.complex64).mul(2j).conj().imag  # a view with a sign to be changed
    plain = torch.zeros(2)
    set_bytes(plain, bytes_of(negated))
    assert plain.tolist() == [-2.0, -2.0]


def test_expanded_tensor_that_would_have_to_hold_different_elements_is_refused():
    with pytest.raises(ValueError, match=r"elements of this tensor share their memory .* use \.contiguous\(\)"):
        set_bytes(torch.zeros(1).expand(3), bytes_of(torch.arange(3.0)))


def test_overlapping_tensor_that_would_have_to_hold_different_elements_is_refused():
    with pytest.raises(ValueError, match="share their memory"):
        set_bytes(torch.zeros(4).as_strided((3, 2), (1, 1)), bytes_of(torch.arange(6.0).view(3, 2)))


def test_expanded_tensor_that_has_the_elements_already_is_left_alone():
    mine = torch.ones(1).expand(3)
    set_bytes(mine, bytes_of(torch.ones(3)))
    assert mine._version == 0
