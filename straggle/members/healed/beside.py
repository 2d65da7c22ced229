"""The models of one process whose ranks leave and come back, beside one another in one loop.

With the state of the first one, a new process is told in which step of the others the giver was at that moment. It
begins there in each, as a rank does that is back in its own process: its loop walks through the steps that are made
without it, and takes the state at its turn. So it is at the same place of the loop in all models, and none waits for
another. Whoever is back gives nothing in any before it has all of their states.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Protocol

from straggle import world
from straggle.merge.late.sides import TrainingSide


class GivesNothing(Protocol):
    """What is asked of a `Member` for its process's other models."""

    @property
    def has_ended(self) -> bool:
        """Whether no step of its model is made here any more."""

    def wait_for_others(self) -> None:
        """Give nothing until this process has the states of its other models."""


class Beside:
    """One model of this process, which knows the others. The training thread calls everything but `lack_state`.

    ``number``: that of the model among those of its process, the same on all ranks. ``lacks_state``: the loop
    goes through steps without it, and it is to get its state there.
    """

    def __init__(self, number: int, training: TrainingSide, member: GivesNothing) -> None:
        self._number, self._training, self._member = number, training, member
        self._told: Mapping[int, int] = {}  # with its own first state: the others' steps, by their numbers
        self.lacks_state = self._has_entered = False
        _here.here[:] = [own for own in _here.here if own() is not None] + [weakref.ref(self)]

    def steps(self) -> dict[int, int]:
        """The steps that the others are in, or will enter next, by their numbers."""
        return {other._number: other._training.step for other in self._others()}

    @property
    def begins_at(self) -> int | None:
        """The step with which this model begins, if the state of another one has come first."""
        told = (other._told.get(self._number) for other in self._others())
        return next((step for step in told if step is not None), None)

    def lack(self) -> None:
        """The loop goes through a step without this model's state: the others give nothing until it has that."""
        self.lacks_state = True
        for other in self._others():
            other._member.wait_for_others()

    def is_first(self, told: Mapping[int, int]) -> None:
        """Its state is the first one, and came with these steps of the others."""
        self._told = told

    def has_state(self) -> None:
        """It has its state."""
        self.lacks_state = False

    def entered(self) -> None:
        """The loop enters a step of this model. Raises ``ValueError`` if one of another model was to come first."""
        self._has_entered = True
        if self.lacks_state and not all(other._has_entered for other in self._others() if other._told):
            raise ValueError(
                "this process has come to a running job with the state of another model, whose step comes later in "
                "the loop: call register_state() first for the model whose step comes first"
            )

    def lack_state(self) -> bool:
        """Whether this process has yet to get the state of another of its models; from any thread."""
        return any(other.lacks_state and not other._member.has_ended for other in self._others())

    def _others(self) -> Iterator[Beside]:
        alive = (own() for own in list(_here.here))  # a copy: a model may be built meanwhile
        return (own for own in alive if own is not None and own is not self)


_here = world.OfProcess(list[weakref.ref[Beside]])
