"""Gradients that the loops keep over several steps are state, too: a rank that comes back gets those of its peers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from straggle.loop.open_step import OpenStep


class KeptState:
    """What a model's steps know of kept gradients, as an object with a state; used between two steps."""

    def __init__(self, opened: OpenStep) -> None:
        self._opened = opened

    def state_dict(self) -> dict[str, Any]:
        """Without copies."""
        return self._opened.give_kept()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """That of a peer."""
        self._opened.take_kept(state)
