"""Which backward passes of a step have begun, and which are over: the autograd engine says so, and nothing else.

The engine calls back when a run of it is over, and never where an error or `DeadlineReached` left it. A reentrant
checkpoint runs the engine again inside of a pass; that is a part of the pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch.autograd.function import BackwardCFunction


def in_backward() -> bool:
    """Whether the calling thread is inside of a backward pass, as a checkpoint's recomputation is."""
    return torch._C._current_graph_task_id() != -1


class Passes:
    """The passes of one step, counted by their number from 0 on.

    ``ended(number)`` is called when a pass is over, and ``ended(None)`` when one ended that gave no gradient to any
    parameter. Where it was not cut short, as ``torch.autograd.grad`` is not, such a one does not count as a pass.
    """

    def __init__(self, ended: Callable[[int | None], None]) -> None:
        self._ended = ended
        self.number = -1  # of the running pass, or of the last one
        self.num_over = 0
        self._runs: set[int] = set()  # of the engine, in the running pass; empty where none is known to run
        self._own: int | None = None  # the run that user code began, where a hook saw it
        self._nested_running = 0
        self._num_gradients = 0  # in the running pass

    @property
    def nested(self) -> bool:
        """Whether the running pass has run the engine again, and is not over."""
        return len(self._runs) > (self._own is not None)

    @property
    def failed(self) -> bool:
        """Whether a pass began and did not come to its end; to be asked after `settle`."""
        return self.num_over <= self.number

    def begins(self) -> bool:
        """A hook of the pass was called; true where this is the first sign of it."""
        run = torch._C._current_graph_task_id()
        return run not in self._runs and self._join(run)

    def gradient(self) -> int:
        """The running pass has a gradient for a parameter; the number of the pass."""
        self._num_gradients += 1
        return self.number

    def settle(self) -> None:
        """User code runs, and so no pass does: one that was not said to be over has failed.

        A pass of which only nested runs were seen is over if all of these are.
        """
        if not self._runs:
            return
        if self._own is None and self._nested_running == 0:
            self._over()
        elif self._num_gradients == 0:
            self._ended(None)
        self._runs.clear()

    def _join(self, run: int) -> bool:
        """A run of the engine that was not seen before: a new pass, or a part of the running one."""
        engine = torch.autograd.Variable._execution_engine
        if _inside_of_custom_backward():
            begins = not self._runs
            if begins:
                self._begin(None)
            self._nested_running += 1
            self._runs.add(run)
            engine.queue_callback(self._nested_over)
            return begins
        if self._runs and self._own is None and run < min(self._runs):  # its nested runs were seen first
            begins = False
            self._own = run
        else:
            self.settle()
            begins = True
            self._begin(run)
        self._runs.add(run)
        engine.queue_callback(self._over)
        return begins

    def _begin(self, own: int | None) -> None:
        self.number += 1
        self._own, self._nested_running, self._num_gradients = own, 0, 0

    def _nested_over(self) -> None:
        self._nested_running -= 1

    def _over(self) -> None:
        self._runs.clear()
        if self._num_gradients == 0:
            self.number -= 1
            self._ended(None)
            return
        self.num_over += 1
        self._ended(self.number)


def _inside_of_custom_backward() -> bool:
    """Whether the caller runs within the backward of a Python ``autograd.Function``, such as a reentrant checkpoint."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False
