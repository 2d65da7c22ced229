"""A run that is repeated: what this rank decided in each step."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from straggle.merge.coordinator import Coordinator
from straggle.merge.replay import Decision, Recording, check_members


class Replayed:
    """The recording that a model repeats, if it does; on the training thread.

    ``learned``: what the stages were planned from then; ``None``: that is not recorded.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._decisions: Iterator[Decision] | None = None
        self.learned: tuple[list[int], list[float]] | None = None

    @property
    def is_on(self) -> bool:
        """Whether this run repeats another."""
        return self._decisions is not None

    def follow(self, recording: Recording) -> None:
        """Decide as in this one, on all ranks alike. Raises ``ValueError`` for one that cannot be replayed so."""
        check_members(recording.decisions)
        self._decisions = iter(recording.decisions)
        self.learned = (list(recording.order), list(recording.seconds)) if recording.order else None
        self._coordinator.deadline.wait_for_all()

    def decision(self) -> Decision | None:
        """The recorded decision of the step that is entered now."""
        if self._decisions is None:
            return None
        return next(self._decisions, Decision(self._coordinator.training.step, sys.maxsize, None, False))
