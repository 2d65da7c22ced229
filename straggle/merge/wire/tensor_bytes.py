"""A tensor as the bytes of its elements, in their order: what every backend can send, of any dtype and strides."""

from __future__ import annotations

import torch
from torch import Tensor

# integers of an element's size, which can be compared and copied; float8, uint16 and others cannot on every device
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes as flat uint8: the tensor's own memory if its elements lie there in order, or else a copy.

    Raises ``ValueError`` for a tensor that is quantized, or not dense.
    """
    if tensor.is_quantized or tensor.layout is not torch.strided:
        kind = f"quantized ({tensor.dtype})" if tensor.is_quantized else f"of layout {tensor.layout}"
        raise ValueError(f"this tensor is {kind}, and more than its elements: use a plain dense one")
    plain = tensor.detach().resolve_conj().resolve_neg()
    return _integers(plain).contiguous().view(-1).view(torch.uint8)


def set_bytes(tensor: Tensor, given: Tensor) -> None:
    """Give ``tensor`` the elements whose bytes these are; `bytes_of` gave them for another of its shape and dtype.

    Raises ``ValueError`` if elements that share their memory, as those of an expanded tensor do, would have to differ.
    """
    if torch.equal(bytes_of(tensor), given):
        return
    to, new = tensor.detach(), given.view(tensor.dtype).view(tensor.shape)
    if not (to.is_conj() or to.is_neg()):
        to, new = _integers(to), _integers(new)
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in to.stride())
    with torch.no_grad():
        to[once].copy_(new[once])
    if not torch.equal(bytes_of(tensor), given):
        raise ValueError("elements of this tensor share their memory and would have to differ: use .contiguous()")


def _integers(tensor: Tensor) -> Tensor:
    """The same memory as integers."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_INTEGERS[real.itemsize])
