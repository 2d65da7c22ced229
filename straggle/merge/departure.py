"""How a rank may end before the others, if an optional part of the model lets it."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Departure(ABC):
    """How this rank's process ends while its peers go on, or with all of them if they cannot."""

    @abstractmethod
    def ask(self) -> None:
        """Note that this rank is to end soon; from any thread, also from a signal handler."""

    @property
    @abstractmethod
    def peers_go_on(self) -> bool:
        """Whether this rank has left, and its peers train on."""

    @abstractmethod
    def ends_after(self, step: int) -> bool:
        """Whether this rank's loop ends after this step, alone or with all others."""
