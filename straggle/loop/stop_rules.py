"""When a rank leaves a step: by the clock, or at once."""

from __future__ import annotations

from straggle.merge.late.sides import TrainingSide
from straggle.merge.round.step_passes import StopRule


class ByClock(StopRule):
    """A rank is late when its deadline is over and a quorum waits: the stand-in watches the clock (`stand_in.py`).

    It goes on until it has begun the collectives of the loop's own that the quorum has begun.

    Gradients that come after the merge are left out by the coordinator.
    """

    def __init__(self, training: TrainingSide) -> None:
        self._training, self._stops = training, training.stops

    def stops(self, num_checks: int) -> bool:  # noqa: ARG002
        """Whether the stand-in asked for it."""
        step, stops = self._training.step, self._stops
        # first: it is asked at each gradient, and nearly never stopped
        return (stops.step >= step or stops.asked_step >= step) and self._training.leaves


class NoData(StopRule):
    """A rank whose loader is exhausted computes nothing (`StagedDataParallel.join`).

    If there are collectives of the loop's own in its steps, it goes through all of the block for them.
    """

    def __init__(self, training: TrainingSide) -> None:
        self._training = training

    def stops(self, num_checks: int) -> bool:  # noqa: ARG002
        """At once."""
        return not self._training.collectives.gathers
