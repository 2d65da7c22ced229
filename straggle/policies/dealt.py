"""Finds since when ranks have their present shares: earlier times are not those of the present shares.

`Rebalance` deals a step's samples out by speed, and a rank with more of them is expected to take longer. Its times for
earlier shares are forgotten, not scaled to the new one, because the part of a step's time that grows with its samples
is unknown. The shares are seen in the ranks' weights.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

SETTLED = 3  # steps with the same weights that make these the ranks' shares


def steps_since_dealt(weight: Tensor) -> int | None:
    """How many of the last steps have the present shares; ``None``: all of them.

    ``weight``, (steps, ranks): those of the ranks' steps. Shares are weights that stay for three steps. Other weights
    count as the shares before them: the last step of an epoch has fewer samples, and work drawn from a pool, or
    weighted by tokens, differs from step to step.
    """
    if torch.equal(weight[1:], weight[:-1]):
        return None
    changes = (weight[1:] != weight[:-1]).any(1)
    begins: list[int] = [0, *(changes.nonzero().flatten() + 1).tolist(), len(weight)]
    settled = [first for first, end in pairwise(begins) if end - first >= SETTLED]
    for first, before in pairwise(reversed(settled)):
        if (weight[before] != weight[first]).any():
            return len(weight) - first
    return None
