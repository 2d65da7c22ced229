"""The hooks that a user has registered for changes of the members."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from straggle.report import MembersReport


class MembersHooks:
    """A copy of the model has none. ``last_report`` is what they were called with last."""

    def __init__(self) -> None:
        self.register: OrderedDict[int, Callable[[MembersReport], None]] = OrderedDict()
        self.last_report: MembersReport | None = None

    def changed(self, report: MembersReport) -> None:
        """Members have left or come in; called by the thread that follows them."""
        self.last_report = report
        for hook in tuple(self.register.values()):
            hook(report)
