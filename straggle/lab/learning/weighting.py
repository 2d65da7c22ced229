"""What each rank's gradient counts in the merge of a step, from what the ranks have reached."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import final

import torch
from torch import Tensor

from straggle.merge.options import Merge, inverse_probability


class Weighting(ABC):
    """Weights of gradients."""

    @abstractmethod
    def weights(self, reached: Tensor) -> Tensor:
        """The next step's weights, of shape (ranks, units), from the units that were reached; 0 if not reached."""


@final
class Count(Weighting):
    """Every computed gradient counts the same."""

    def weights(self, reached: Tensor) -> Tensor:
        return reached.float()


@final
class InverseProbability(Weighting):
    """A gradient counts by the inverse of its rank's probability of reaching it, from the last ``window`` steps.

    As in the real merge, a rank's probability is known only from earlier steps; in the first step it is 1.
    """

    def __init__(self, window: int = 50, max_weight: float = 10.0) -> None:
        if not max_weight >= 1:
            raise ValueError(f"max_weight={max_weight}: a weight is at least 1")
        self.max_weight = max_weight
        self._steps: deque[Tensor] = deque(maxlen=window)

    def weights(self, reached: Tensor) -> Tensor:
        share = torch.stack(tuple(self._steps)).mean(0) if self._steps else torch.ones(reached.shape)
        self._steps.append(reached.float())
        return inverse_probability(share, self.max_weight) * reached


def weighting_of(merge: Merge) -> Callable[[], Weighting]:
    """What gives each run its weights, as the merge of real ranks is configured."""
    return (
        Count if merge.weighting == "count" else partial(InverseProbability, merge.probability_window, merge.max_weight)
    )
