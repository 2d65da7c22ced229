"""What all ranks know of their links after a merged step, as the policy is given it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
from torch import nn

from straggle.merge.table import Table
from straggle.policies.leaves import SeenLinks


def seen_links(
    table: Table, num_bytes: int, num_messages: int, *, out: frozenset[int] = frozenset(), min_ranks: int | None = None
) -> SeenLinks:
    """After a step in ``num_messages`` of ``num_bytes`` together.

    ``out``: ranks that are no members because of their links. ``min_ranks``: as in `SeenLinks`.
    """
    times = [own_s for own_s in table.compute_s() if own_s > 0]
    return SeenLinks(
        table.links(),
        num_bytes,
        num_messages,
        median(times) if times else 0.0,
        table.absent_ranks() - out,
        members=min_ranks is not None,
        min_ranks=min_ranks or 0,
    )


def bytes_on_wire(parameters: Sequence[nn.Parameter], wire_dtype: torch.dtype | None) -> int:
    """Bytes of all gradients as they travel: those of float32 in ``wire_dtype``, where that is given."""
    return sum(
        own.numel() * (wire_dtype.itemsize if wire_dtype and own.dtype is torch.float32 else own.element_size())
        for own in parameters
    )
