"""What only a device knows of a merge, and how the host reads it when it has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Counts:
    """``numbers`` on the device: for each bucket whether this rank left it out, and how many ranks had nothing usable.

    ``sizes``: the gradients of each bucket.
    """

    numbers: Tensor
    sizes: Sequence[int]
    num_ranks: int

    def read(self, numbers: Sequence[float]) -> tuple[int, bool]:
        """From the copied ``numbers``: how many gradients this rank left out, and whether the step changed nothing."""
        left_out = sum(size for size, found in zip(self.sizes, numbers, strict=False) if found)
        return left_out, numbers[-1] >= self.num_ranks
