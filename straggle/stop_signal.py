"""Ends a run early when one of its ranks is told to by a signal: all ranks after the same step, or that rank alone.

Without members all end: the request goes through the job's store, so that it is heard even of a rank that is always
stood in for, and the agreement goes with the telemetry of a step, which every rank has from the same merge. With
members the rank leaves, and the others train on; they end with it if too few would be left.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from straggle.merge.wing import Departure
from straggle.merge.wire.store import JobStore, connect, default_store, place_of
from straggle.report import StepReport
from straggle.step import Step

_SCALAR = "stop"
_REQUESTED = "requested"


class StopSignal:
    """Hears SIGTERM between entering and leaving, and SIGUSR1 if nothing else handles it.

    with StopSignal() as stop:
        for x, y in loader:
            with model.step() as step:
                stop.tell(step)
                ...
            if stop.agreed(model.last_report):
                break

    What one rank is asked to do, all do. If ranks may leave (`Elastic`), this one does, and `agreed` is true for it
    alone; the others go on, unless too few would be left: then all end after the same step.
    ``file``: its appearance is a signal, too; looked for before each step. ``poll_s``: seconds between two looks into
    ``store``, the default process group's if not given. A thread looks, so that a store that does not answer keeps no
    rank waiting.
    """

    def __init__(self, *, poll_s: float = 0.2, store: Any = None, file: str | os.PathLike[str] | None = None) -> None:
        self._poll_s = poll_s
        self._requested = False  # of this process
        self._told = False
        self._given_store = store
        self._store: JobStore | None = None  # between entering and leaving
        self._file = file
        self._departure: Departure | None = None  # of the model whose step was told of last
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        heard = [signal.SIGTERM]
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:  # which would kill the process
            heard.append(signal.SIGUSR1)
        self._before = {number: signal.signal(number, self._hear) for number in heard}
        store = self._given_store
        corner = partial(connect, default_store(), "straggle/stop") if store is None else lambda: store
        self._store = JobStore(
            corner,
            place_of(default_store() if store is None else store),
            who="StopSignal",
            without="a rank that is stood in for is not heard when it is asked to end",
            watched=(_REQUESTED,),
            look_s=self._poll_s,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._store is not None
        self._store.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def tell(self, step: Step) -> None:
        """Let the peers know; the first thing in every step, which a rank that is late may leave anywhere."""
        self._departure = step.departure
        if self._file is not None and not self._requested and os.path.exists(self._file):
            self._requested = True
        if self._departure is not None:
            if self._requested:
                self._departure.ask()
            return
        if not self._told or self._asked():  # once in any case: no rank is to look its name up
            step.log(**{_SCALAR: float(self._requested)})
        self._told = True

    def agreed(self, report: StepReport) -> bool:
        """Whether the step of this report is the last one here; the same on all ranks unless `peers_go_on`."""
        if self._departure is not None:
            return self._departure.ends_after(report.step)
        return report.scalars.get(_SCALAR, 0.0) > 0

    @property
    def requested(self) -> bool:
        """Whether this process was told to end, or a peer without which it cannot go on."""
        return self._requested or self.peers_go_on

    @property
    def peers_go_on(self) -> bool:
        """Whether this rank has left alone: the others train on, and nothing is to be saved here."""
        return self._departure is not None and self._departure.peers_go_on

    def _asked(self) -> bool:
        """Whether this rank or a peer has been asked."""
        assert self._store is not None, "tell() outside of `with StopSignal()`"
        if self._requested:
            self._store.post(lambda store: store.set(_REQUESTED, ""))  # again in each step: it has at most a few
        elif _REQUESTED in self._store.seen:  # never set to whether it is: the signal may come meanwhile
            self._requested = True
        return self._requested

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self._requested = True
        if self._departure is not None:  # now: the stand-in speaks for a rank whose step takes long
            self._departure.ask()


def exit_at_once(status: int = 0) -> NoReturn:
    """End the process and free nothing: that takes longer than who sent SIGTERM may wait."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
