"""The exchange of the modules' state after a step that left it different on the ranks; no message otherwise.

Each rank's telemetry has a mark of what its forward pass changed. If the marks are not all equal, every rank sends a
manifest of its tensors. All ranks compute the same list of transfers from these, and carry it out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from straggle.merge.rows.telemetry import UNFINISHED
from straggle.merge.state.held import Held
from straggle.merge.wire.contents import bytes_of
from straggle.merge.wire.groups import Group

_FLOATS = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
Kind = tuple[tuple[int, ...], str]  # a tensor's shape and dtype


@dataclass(frozen=True)
class Given:
    """One rank's part of the merge of the modules' state in a step.

    ``message``: that of the averaged buffers (`averages.py`); ``None``: nothing. ``changed``: a digest for the name of
    each other tensor that changed; ``mark``: the mark of these. ``held``: all tensors by name. ``gives``: whether this
    rank's tensors are valid for others.
    """

    message: Tensor | None = None
    mark: int = UNFINISHED
    changed: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, Held] = field(default_factory=dict)
    gives: Callable[[str], bool] = field(default=lambda _name: False)


NOTHING_GIVEN = Given()


@dataclass(frozen=True)
class Manifest:
    """One rank's report to the others: the tensors that it ``holds``, those that ``changed`` and those that it
    ``gives``.

    ``sums``: those of all its tensors as it entered the step, if the ranks compare them. That of a rank that was stood
    in for is empty.
    """

    holds: Mapping[str, Kind] = field(default_factory=dict)
    changed: Mapping[str, int] = field(default_factory=dict)
    gives: Sequence[str] = ()
    sums: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Given, sums: Mapping[str, int]) -> Manifest:
        """The manifest of a rank that gives this."""
        tensors = _tensors(given)
        holds = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
        return cls(holds, given.changed, [name for name in holds if given.gives(name)], sums)


@dataclass(frozen=True)
class Transfer:
    """One tensor that all ranks get: rank ``sources[0]``'s or, if it ``is_mean``, the mean over all ``sources``."""

    name: str
    sources: tuple[int, ...]
    kind: Kind
    is_mean: bool = False


def transfers(manifests: Mapping[int, Manifest]) -> list[Transfer]:
    """The transfers that follow from all ranks' manifests; the same on all ranks."""
    names = sorted({name for manifest in manifests.values() for name in manifest.changed})
    found = (_transfer(name, manifests) for name in names)
    return [transfer for transfer in found if transfer is not None]


def _transfer(name: str, manifests: Mapping[int, Manifest]) -> Transfer | None:
    digests = {rank: manifest.changed.get(name) for rank, manifest in manifests.items()}
    if None not in digests.values() and len(set(digests.values())) == 1:
        return None  # equal on all ranks
    holders = [rank for rank in sorted(manifests) if name in manifests[rank].holds]
    givers = [rank for rank in holders if name in manifests[rank].gives]
    if not givers:  # no forward pass with it was complete: all restore the old value, if a rank still has it
        untouched = [rank for rank in holders if digests[rank] is None]
        givers = (untouched or holders)[:1]
    if not givers:
        return None
    kinds = [manifests[rank].holds[name] for rank in givers]
    differ = len({digests[rank] for rank in givers}) > 1
    if differ and kinds.count(kinds[0]) == len(kinds) and kinds[0][1] in _FLOATS:
        return Transfer(name, tuple(givers), kinds[0], is_mean=True)
    return Transfer(name, tuple(givers[:1]), kinds[0])


def different_tensors(manifests: Iterable[Manifest]) -> tuple[str, ...]:
    """The names of tensors that differ between the ranks whose manifests have them."""
    sums = [manifest.sums for manifest in manifests if manifest.sums]
    names = dict.fromkeys(name for own in sums for name in own)
    return tuple(name for name in names if len({own.get(name) for own in sums}) > 1)


class Exchange:
    """Carries the exchange out in one step, on any thread. ``wait(work)`` waits for a collective of ``group``, whose
    ``ranks`` are in the order of their places.
    """

    def __init__(self, group: Group, ranks: Sequence[int], rank: int, wait: Callable[[dist.Work], None]) -> None:
        self._group, self._ranks, self._rank, self._wait = group, ranks, rank, wait

    def manifests(self, own: Manifest) -> dict[int, Manifest]:
        """The manifests of all ranks."""
        data = torch.frombuffer(bytearray(json.dumps(asdict(own)).encode()), dtype=torch.uint8)
        sizes = [int(size) for size in self._gather(torch.tensor([len(data)]))]
        gathered = self._gather(pad(data, (0, max(sizes) - len(data))))
        words = [bytes(other[:size].tolist()) for other, size in zip(gathered, sizes, strict=True)]
        return {rank: _manifest(json.loads(word)) for rank, word in zip(self._ranks, words, strict=True)}

    def carry_out(self, wanted: Sequence[Transfer], given: Given) -> dict[str, Tensor]:
        """Carry out these transfers; returns the new tensors of all ranks, on the CPU, by name."""
        own = _tensors(given)
        means = [transfer for transfer in wanted if transfer.is_mean]
        found = self._means(means, own) if means else {}
        copies = sorted((one for one in wanted if not one.is_mean), key=lambda one: one.sources)
        for (source,), of_source in groupby(copies, key=lambda one: one.sources):
            found |= self._copies(list(of_source), source, own)
        return found

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        tensors = [torch.empty_like(tensor) for _ in self._ranks]
        self._wait(self._group.all_gather(tensors, tensor))
        return tensors

    def _means(self, wanted: Sequence[Transfer], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sizes = [_numel(transfer.kind) for transfer in wanted]
        total = torch.zeros(sum(sizes), dtype=torch.float64)
        for transfer, part in zip(wanted, torch.split(total, sizes), strict=True):
            if self._rank in transfer.sources:
                part.copy_(own[transfer.name].reshape(-1))
        self._wait(self._group.all_reduce(total))
        found = {}
        for transfer, part in zip(wanted, torch.split(total, sizes), strict=True):
            (shape, dtype), mean = transfer.kind, part / len(transfer.sources)
            found[transfer.name] = mean.to(_FLOATS[dtype]).view(shape)
        return found

    def _copies(self, wanted: Sequence[Transfer], source: int, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sizes = [_numel(transfer.kind) * _DTYPES[transfer.kind[1]].itemsize for transfer in wanted]
        if self._rank == source:
            data = torch.cat([bytes_of(own[transfer.name]).cpu() for transfer in wanted])
        else:
            data = torch.empty(sum(sizes), dtype=torch.uint8)
        self._wait(self._group.broadcast(data, self._ranks.index(source)))
        parts = [part.clone() for part in torch.split(data, sizes)]  # each in memory that is aligned for its dtype
        return {
            transfer.name: part.view(_DTYPES[transfer.kind[1]]).view(transfer.kind[0])
            for transfer, part in zip(wanted, parts, strict=True)
        }


def _manifest(read: Mapping[str, Any]) -> Manifest:
    holds = {name: (tuple(shape), dtype) for name, (shape, dtype) in read["holds"].items()}
    return Manifest(holds, read["changed"], read["gives"], read["sums"])


def _tensors(given: Given) -> dict[str, Tensor]:
    found = {name: held.tensor for name, held in given.held.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _numel(kind: Kind) -> int:
    return torch.Size(kind[0]).numel()
