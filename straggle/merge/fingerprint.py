"""The contents of tensors in a few bits: equal if they are equal bit for bit, and hardly ever if they are not."""

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
    names, shapes, sums = list[str](), list[int](), dict[torch.device, list[tuple[int, Tensor]]]()
    for name, tensor in named:
        own = _words(tensor.detach()).sum()
        sums.setdefault(own.device, []).append((len(names), own))
        names.append(name)
        shapes.append(hash(tuple(tensor.shape)))  # hashes of integers are the same in every process
    found = [0] * len(names)
    for own_sums in sums.values():  # one copy to the host from each device
        for (number, _), value in zip(own_sums, torch.stack([one for _, one in own_sums]).tolist(), strict=True):
            found[number] = value ^ shapes[number]
    return Fingerprint(names, found)


def digest(tensor: Tensor) -> int:
    """48 bits of a tensor's shape, dtype and elements; it depends on their order."""
    words = _words(tensor.detach())
    if words.nbytes > _HASHED_BYTES:
        rows = words[: len(words) // _ROW * _ROW].view(-1, _ROW)
        words = torch.cat([rows.sum(0), rows.sum(1), words[rows.numel() :]])
    return number_of(f"{tensor.dtype} {tuple(tensor.shape)}", _memory(words.cpu()))


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
