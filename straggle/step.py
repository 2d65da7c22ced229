"""`Step`: the block around one optimizer step's passes, and what is known of it while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType

from torch import Tensor

from straggle.merge.coordinator import Coordinator
from straggle.merge.names import ScalarNames
from straggle.merge.telemetry import MAX_SCALARS


class Step:
    """One optimizer step, as a context manager: leaving it merges the gradients of all ranks.

    Made by `StagedDataParallel.step`. ``enter`` and ``leave`` are called at the two ends of its block; ``leave`` says
    whether the error, if any, was only the deadline.
    """

    def __init__(
        self,
        num_microbatches: int,
        coordinator: Coordinator,
        names: ScalarNames,
        *,
        enter: Callable[[Step], None],
        leave: Callable[[Step, BaseException | None], bool],
    ) -> None:
        self._coordinator = coordinator
        self._names = names
        self._enter, self._leave = enter, leave
        self.num_microbatches = num_microbatches
        self.scalars: dict[str, float] = {}
        self._weight, self._cost = 1.0, math.nan

    def __enter__(self) -> Step:
        self._enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return self._leave(self, error)

    @property
    def weight(self) -> float:
        """How much this rank's step counts against the others', such as its number of samples or tokens; 1 if not set.

        Set it before the first backward pass. The loss is still this rank's own mean.
        """
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._coordinator.weigh(weight)
        self._weight = weight

    @property
    def cost(self) -> float:
        """What this rank's step takes by right, such as its number of tokens; NaN if not set.

        Set it as soon as the block begins. Seconds should be in proportion to it: a rank's deadline is longer by its
        cost over the mean cost, and its times count as those of a step of the mean cost.
        """
        return self._cost

    @cost.setter
    def cost(self, cost: float) -> None:
        self._coordinator.takes(cost)
        self._cost = cost

    def log(self, **scalars: float | Tensor) -> None:
        """Scalars that ride along with the merge; `StepReport.scalars` has the means over ranks that gave them.

        At most 8 in a step of each rank. The names may differ between ranks: every rank's report has them all.
        """
        self.scalars.update(
            {name: float(value.detach() if isinstance(value, Tensor) else value) for name, value in scalars.items()}
        )
        if len(self.scalars) > MAX_SCALARS:
            raise ValueError(f"{len(self.scalars)} scalars in one step: at most {MAX_SCALARS}")
        self._names.log(scalars)

    def stop(self) -> None:
        """Stop this rank's pass at its next stage, as if its deadline were over; from any thread."""
        self._coordinator.training.stop()
