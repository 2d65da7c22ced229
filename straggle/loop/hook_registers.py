"""The hooks that a user has registered on a wrapped model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from torch.utils.hooks import RemovableHandle

from straggle.merge.round import Round
from straggle.merge.step_record import StepRecord
from straggle.report import MembersReport

Hook = TypeVar("Hook")


class HookRegisters:
    """One register for each kind of hook; a copy of the model has empty ones.

    ``last_members_report`` is what the hooks of ``members`` were called with last.
    """

    def __init__(self) -> None:
        self.step: OrderedDict[int, Callable[[StepRecord], None]] = OrderedDict()
        self.submit: OrderedDict[int, Callable[[int], object]] = OrderedDict()
        self.members: OrderedDict[int, Callable[[MembersReport], None]] = OrderedDict()
        self.last_members_report: MembersReport | None = None

    def merged(self, current: Round) -> None:
        """The training thread has left a step."""
        for hook in tuple(self.step.values()):
            hook(current.record)

    def members_changed(self, report: MembersReport) -> None:
        """Members have left or come in; called by the thread that follows them."""
        self.last_members_report = report
        for hook in tuple(self.members.values()):
            hook(report)


def add_hook(register: OrderedDict[int, Hook], hook: Hook) -> RemovableHandle:
    """Add ``hook``; with what comes back it is removed."""
    handle = RemovableHandle(register)
    register[handle.id] = hook
    return handle
