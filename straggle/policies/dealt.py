"""Since when do the ranks have the shares that they have now? Times from before say nothing about those.

`Rebalance` deals a step's samples out by speed, and a rank with more of them is expected to take longer. What it took
for its earlier share is not scaled to the new one: how much of a step's time goes with its samples is not known. It is
forgotten. The ranks' weights say what they had.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

SETTLED = 3  # steps with the same weights, from which on they are the ranks' shares


def steps_since_dealt(weight: Tensor) -> int | None:
    """How many of the last steps have the present shares; ``None``: all of them.

    ``weight``, (steps, ranks): those of the ranks' steps. Shares are weights that stay for three steps. Others belong
    to the shares before them: the last step of an epoch has fewer samples, and what is drawn from a pool, or weighted
    by tokens, differs from step to step.
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
