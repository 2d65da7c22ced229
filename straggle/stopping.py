"""Ends a run early when one of its ranks is asked to by a signal: all ranks after the same step.

The request goes through the job's store, so that it is heard even of a rank that is always stood in for; the agreement
goes with the telemetry of a step, which every rank has from the same merge.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

from straggle.report import StepReport
from straggle.step import Step

_SCALAR = "stop"


def _own_store() -> Any:
    """A connection of its own to the job's store: a client serves one request at a time."""
    store: Any = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore("straggle/stop", store.clone())  # type: ignore[attr-defined]


class StopSignal:
    """Hears SIGTERM between entering and leaving; what one rank is asked to do, all do.

    with StopSignal() as stop:
        for x, y in loader:
            with model.step() as step:
                stop.tell(step)
                ...
            if stop.agreed(model.last_report):
                break

    ``poll_s``: seconds between two looks into ``store``, the default process group's if not given.
    """

    def __init__(self, *, poll_s: float = 0.2, store: Any = None) -> None:
        self._poll_s = poll_s
        self._requested = False  # of this process
        self._told = False
        self._polled_at = time.monotonic()
        self._store = _own_store() if store is None else store
        self._before: Any = None

    def __enter__(self) -> StopSignal:
        self._before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def tell(self, step: Step) -> None:
        """Let the peers know; the first thing in every step, which a rank that is late may leave anywhere."""
        if not self._told or self._asked():  # once in any case: a rank sees only scalars whose name it has logged
            step.log(**{_SCALAR: float(self._requested)})
        self._told = True

    def agreed(self, report: StepReport) -> bool:
        """Whether the step of this report is the last; the same on all ranks."""
        return report.scalars.get(_SCALAR, 0.0) > 0

    def _asked(self) -> bool:
        """Whether this rank or a peer has been asked."""
        if self._requested:
            self._store.set("requested", "")  # again in each step: cheap, and it has a few at the most
        elif time.monotonic() - self._polled_at >= self._poll_s:
            self._polled_at = time.monotonic()
            if self._store.check(["requested"]):  # never set to what it says: the signal may come meanwhile
                self._requested = True
        return self._requested

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self._requested = True


def exit_at_once() -> NoReturn:
    """End the process with status 0 and free nothing: that takes longer than who sent SIGTERM may wait."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
