"""The hooks that a user has registered on a wrapped model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from torch.utils.hooks import RemovableHandle

from straggle.merge.round.round import Round
from straggle.merge.rows.step_record import StepRecord
from straggle.report import StuckReport

Hook = TypeVar("Hook")


class HookRegisters:
    """One register for each kind of hook; a copy of the model has empty ones."""

    def __init__(self) -> None:
        self.step: OrderedDict[int, Callable[[StepRecord], None]] = OrderedDict()
        self.submit: OrderedDict[int, Callable[[int], object]] = OrderedDict()
        self.stuck: OrderedDict[int, Callable[[StuckReport], object]] = OrderedDict()

    def merged(self, current: Round) -> None:
        """The training thread has left a step."""
        for hook in tuple(self.step.values()):
            hook(current.record)


def add_hook(register: OrderedDict[int, Hook], hook: Hook) -> RemovableHandle:
    """Add ``hook``; with what comes back it is removed."""
    handle = RemovableHandle(register)
    register[handle.id] = hook
    return handle
