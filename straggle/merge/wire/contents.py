"""What tensors hold: as the bytes of their elements, and in a few bits.

Bytes are what every backend can send, of any dtype and strides. A fingerprint is equal if tensors are equal bit for
bit, and hardly ever if they are not.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

_HASHED_BYTES = 2**16  # a larger tensor is summed first
_ROW = 4096  # words


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of several tensors: for each its name and the sum of its bits."""

    names: Sequence[str]
    sums: Sequence[int]

    @property
    def number(self) -> int:
        """48 bits for all tensors together."""
        return number_of(repr(list(self.sums)))

    def as_mapping(self) -> Mapping[str, int]:
        """The sums by name."""
        return dict(zip(self.names, self.sums, strict=True))


def fingerprint(named: Iterable[tuple[str, Tensor]]) -> Fingerprint:
    """The sum of each tensor's bits, read as 64-bit integers, and its shape: exact, and one fast pass on any device.

    It does not depend on the order of these integers within one tensor.
    """
    named = list(named)
    sums = read_together([_words(tensor.detach()).sum() for _, tensor in named])
    shapes = [hash(tuple(tensor.shape)) for _, tensor in named]  # hashes of integers are the same in every process
    return Fingerprint([name for name, _ in named], [own ^ shape for own, shape in zip(sums, shapes, strict=True)])


def read_together(numbers: Sequence[Tensor]) -> list[int]:
    """The values of tensors of one element each, by one copy to the host from each device."""
    places: dict[torch.device, list[int]] = {}
    for place, number in enumerate(numbers):
        places.setdefault(number.device, []).append(place)
    found = [0] * len(numbers)
    for own in places.values():
        for place, value in zip(own, torch.stack([numbers[place] for place in own]).tolist(), strict=True):
            found[place] = value
    return found


def digest(tensor: Tensor) -> int:
    """48 bits of a tensor's shape, dtype and elements; it depends on their order."""
    return digests([tensor])[0]


def digests(tensors: Sequence[Tensor]) -> list[int]:
    """That of each of them, by one copy to the host from each device."""
    words = [words_of(tensor) for tensor in tensors]
    places: dict[torch.device, list[int]] = {}
    for place, own in enumerate(words):
        places.setdefault(own.device, []).append(place)
    found = [0] * len(tensors)
    for alike in places.values():
        together = torch.cat([words[place] for place in alike]).cpu()
        parts = torch.split(together, [len(words[place]) for place in alike])
        for place, part in zip(alike, parts, strict=True):
            tensor = tensors[place]
            found[place] = number_of(f"{tensor.dtype} {tuple(tensor.shape)}", _memory(part))
    return found


def words_of(tensor: Tensor) -> Tensor:
    """What a digest is made of, on the tensor's device: its bits as integers, or sums of them if they are many."""
    words = _words(tensor.detach())
    if words.nbytes > _HASHED_BYTES:
        rows = words[: len(words) // _ROW * _ROW].view(-1, _ROW)
        words = torch.cat([rows.sum(0), rows.sum(1), words[rows.numel() :]])
    return words


def differ(tensor: Tensor, other: Tensor) -> bool | Tensor:
    """Whether they are not equal bit for bit: as a flag on their device, if shape and dtype do not tell."""
    if tensor.shape != other.shape or tensor.dtype is not other.dtype:
        return True
    return (_words(tensor.detach()) != _words(other.detach())).any()


def number_of(words: str, data: bytes = b"") -> int:
    """48 bits of the words and data; at least 1."""
    found = hashlib.blake2b(words.encode() + data, digest_size=6).digest()
    return int.from_bytes(found, "big") or 1


def _memory(words: Tensor) -> bytes:
    return bytes((ctypes.c_char * words.nbytes).from_address(words.data_ptr())) if words.numel() else b""


def _words(tensor: Tensor) -> Tensor:
    """The bits of ``tensor`` as int64, padded with zeros; copied only if needed."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if flat.numel() % 8 or flat.storage_offset() % 8:
        flat = pad(flat, (0, -flat.numel() % 8)).clone()
    return flat.view(torch.int64)


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
