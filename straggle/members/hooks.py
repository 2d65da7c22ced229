"""The hooks that a user has registered for changes of the members."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from straggle.report import MembersReport


class MembersHooks:
    """The hooks of one model; a copy of it has none. ``last_report``: what the hooks were called with last."""

    def __init__(self) -> None:
        self.register: OrderedDict[int, Callable[[MembersReport], None]] = OrderedDict()
        self.last_report: MembersReport | None = None

    def changed(self, report: MembersReport) -> None:
        """Call the hooks: members have left or joined. Runs on the thread of `Regrouping`."""
        self.last_report = report
        for hook in tuple(self.register.values()):
            hook(report)
