"""Which backward passes of a step have begun, and which are over: only the autograd engine reports this.

The engine calls back when one of its runs is over, but not if an error or `DeadlineReached` left the run. A reentrant
checkpoint runs the engine again inside of a pass; that run is a part of the pass.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from types import FrameType

import torch
from torch.autograd.function import BackwardCFunction

from straggle.backward.compiled import not_compiled

current_run = torch._C._current_graph_task_id  # the number of the engine's run; -1 outside of all
TWICE_IN_ONE_PASS = (
    "got a gradient twice in one backward pass, as shared weights do under reentrant checkpointing: use "
    "checkpoint(..., use_reentrant=False)"
)


def after_callbacks(call: Callable[[], None]) -> None:
    """Call this when the engine's present run is over, after all that its nodes let the engine call back then."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(partial(engine.queue_callback, call))


def in_backward() -> bool:
    """Whether the calling thread is inside of a backward pass, as a checkpoint's recomputation is."""
    return current_run() != -1


class PassWatcher(ABC):
    """Follows the backward passes of one step, which are numbered from 0 on; all on the thread that runs them.

    A subclass sees the gradients: whenever `current_run` is not in ``_runs`` it calls `_joins`, and it counts those of
    the running pass in ``_num_in_pass``. Its methods are called when a pass begins, is over, and has failed. A pass
    that gave no gradient to any parameter and was not cut short, as ``torch.autograd.grad`` does, does not count.
    """

    seen_complete = False  # in any step, a pass was complete and no parameter in it was refused
    ends_late = False  # what the engine calls back at the end of a run may give gradients

    def _watch_step(self) -> None:
        """A step begins: forget the passes of the last one."""
        self.pass_number = -1  # of the running pass, or of the last one
        self.num_over = 0
        self._runs: set[int] = set()  # runs of the engine in the running pass; empty if none is known
        self._own: int | None = None  # the run that user code began, if a hook saw it
        self._announced = False  # a pass has begun, and none of its hooks was called yet
        self._nested_running = 0
        self._num_in_pass = 0  # gradients of the running pass

    @abstractmethod
    def _pass_begins(self, first: int) -> None:
        """A pass begins; parameter ``first`` has a gradient already if that is the first sign of it, else -1."""

    @abstractmethod
    def _pass_over(self, number: int | None) -> None:
        """Pass ``number`` is over; ``None``: a pass is over that gave no gradient to any parameter."""

    def _pass_failed(self) -> None:  # noqa: B027
        """The running pass had gradients and failed."""

    @property
    def failed(self) -> bool:
        """Whether a pass began and did not complete; valid after `settle`."""
        return self.num_over <= self.pass_number

    @property
    def may_stop(self) -> bool:
        """Whether the step can be left here.

        Not in a nested run at first: under reentrant checkpointing only a complete pass shows that no weight is shared.
        """
        nested = len(self._runs) > (self._own is not None)
        return self.seen_complete or not nested

    def announce(self) -> None:
        """The caller is about to run a pass."""
        self._begin(None, -1)
        self._announced = True

    def settle(self) -> None:
        """User code runs, so no pass does: a pass whose end was not reported has failed.

        If only nested runs of a pass were seen, the pass is over when all of these are.
        """
        if not self._runs and not self._announced:
            return
        if self._own is None and self._nested_running == 0 and not self._announced:
            self._over()
            return
        self._runs.clear()
        self._announced = False
        if self._num_in_pass:
            self._pass_failed()
        else:
            self._pass_over(None)

    def returned(self) -> None:
        """The announced pass returned without an error, whether or not a hook was called."""
        if self._runs or self._announced:
            self._over()

    def _joins(self, run: int, first: int = -1) -> None:
        """Note a new run of the engine: a new pass, or a part of the running one."""
        engine = torch.autograd.Variable._execution_engine
        nested, announced = _inside_of_custom_backward(), self._announced
        self._announced = announced and nested
        if nested:
            if not self._runs and not announced:
                self._begin(None, first)
            self._nested_running += 1
            engine.queue_callback(self._nested_over)
        else:
            if announced or (self._runs and self._own is None and run < min(self._runs)):  # begun, or seen nested first
                self._own = run
            else:
                self.settle()
                self._begin(run, first)
            (after_callbacks if self.ends_late else engine.queue_callback)(self._over)
        self._runs.add(run)

    def _begin(self, own: int | None, first: int) -> None:
        self.pass_number += 1
        self._own, self._nested_running, self._num_in_pass = own, 0, 0
        self._pass_begins(first)

    @not_compiled
    def _nested_over(self) -> None:
        self._nested_running -= 1

    @not_compiled
    def _over(self) -> None:
        self._runs.clear()
        self._announced = False
        if self._num_in_pass == 0:
            self.pass_number -= 1
            self._pass_over(None)
            return
        self.num_over += 1
        self._pass_over(self.pass_number)
        self.seen_complete = True


def _inside_of_custom_backward() -> bool:
    """Whether the caller runs within the backward of a Python ``autograd.Function``, such as a reentrant checkpoint."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False
