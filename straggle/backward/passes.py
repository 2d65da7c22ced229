"""Which backward passes of a step have begun, and which are over: only the autograd engine reports this.

The engine calls back when one of its runs is over, but not if an error or `DeadlineReached` left the run. What begins
while a run is under way, as in a reentrant checkpoint or in a hook that computes chunks again, is a part of its pass.
"""

from __future__ import annotations

import dis
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from straggle.backward.compiled import not_compiled
from straggle.backward.hooks import HasGradient

current_run = torch._C._current_graph_task_id  # the number of the engine's run; -1 outside of all
TWICE_IN_ONE_PASS = (
    "got a gradient twice in one backward pass, as shared weights do under reentrant checkpointing: use "
    "checkpoint(..., use_reentrant=False); a hook that runs backward passes of its own belongs on the loss"
)
_ENGINE = torch.autograd.graph._engine_run_backward.__code__  # each run that Python begins
# the engine's call of the backward of a Python `autograd.Function`; the second name is new in some torch
_APPLY = [getattr(BackwardCFunction, name, None) for name in ("apply", "apply_boxed")]
_FUNCTION = {method.__code__ for method in _APPLY if method is not None}


def after_callbacks(call: Callable[[], None]) -> None:
    """Call this when the engine's present run is over, after all that its nodes let the engine call back then."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(partial(engine.queue_callback, call))


def in_backward() -> bool:
    """Whether the calling thread is inside of a backward pass, as a checkpoint's recomputation is."""
    return current_run() != -1


class SeenGradients:
    """Gradients as they were at one moment, by the numbers of their parameters: each with its version.

    A tensor's version changes when anybody writes to it. So it is known which gradients a pass, or a loop, has put
    there, changed or left alone since; both kinds of steps go by this.
    """

    def __init__(self, there: Iterable[tuple[int, Tensor | None]] = ()) -> None:
        self._there = {index: (own, own._version) for index, own in there if own is not None}

    def __bool__(self) -> bool:
        return bool(self._there)

    def had(self, index: int) -> bool:
        """Whether there was one."""
        return index in self._there

    def was_there(self, index: int, gradient: Tensor) -> bool:
        """Whether it was this tensor, whatever is in it by now."""
        return gradient is self._there.get(index, (None, 0))[0]

    def is_as_it_was(self, index: int, gradient: Tensor) -> bool:
        """Whether it was this tensor, and nobody has written to it."""
        before, version = self._there.get(index, (None, 0))
        return gradient is before and gradient._version == version

    def any_is_as_it_was(self, parameters: Sequence[HasGradient]) -> bool:
        """Whether one of them still lies in its ``p.grad``."""
        return any((own := parameters[i].grad) is not None and self.is_as_it_was(i, own) for i in self._there)

    def but(self, index: int, earlier: SeenGradients) -> SeenGradients:
        """These, but for one parameter what was seen earlier."""
        if (own := earlier._there.get(index)) is None:
            self._there.pop(index, None)
        else:
            self._there[index] = own
        return self


class PassWatcher(ABC):
    """Follows the backward passes of one step, which are numbered from 0 on; all of one thread.

    A subclass sees the gradients: at each it calls `_joins_if_new`, and it counts those of the running pass in
    ``_num_in_pass``. Its methods are called when a pass begins, is over, and has failed. A pass
    that gave no gradient to any parameter and was not cut short, as ``torch.autograd.grad`` does, does not count.

    Runs that a hook begins inside of a pass may each give a parameter a part of its gradient, which is whole when the
    pass is over. So from the first gradient of such a run (in ``_summing``) on, a subclass holds all back by `_hold`.
    """

    seen_complete = False  # in any step, a pass was complete and no parameter in it was refused
    ends_late = False  # what the engine calls back at the end of a run may give gradients
    # whether runs that a Function's backward begins, as reentrant checkpoints do, give parts, too; `None`: not known
    functions_give_parts: bool | None = None

    def _watch_step(self) -> None:
        """A step begins: forget the passes of the last one."""
        self.pass_number = -1  # of the running pass, or of the last one
        self.num_over = 0
        self._runs: set[int] = set()  # runs of the engine in the running pass; empty if none is known
        self._summing: set[int] = set()  # those of them whose gradients may be parts
        self._own: int | None = None  # the run that user code began, if a hook saw it
        self._root: FrameType | None = None  # the call that began it, while a pass is known to run
        self._announced = False  # a pass has begun, and none of its hooks was called yet
        self._nested_running = 0
        self._num_in_pass = 0  # gradients of the running pass
        self._held: dict[int, HasGradient] = {}  # parameters whose gradients wait in p.grad for the end of the pass
        self._holds = self._has_parts = False
        # the engine calls hooks on threads of its own; the frames that began a pass are on this one
        self._thread = threading.get_ident()
        self._entered_in = current_run()  # if a hook opens the step: what is under way there is no pass of it
        self._num_outside = 0 if self._entered_in == -1 else len(_calls_of_engine(self._thread))

    @property
    def in_pass(self) -> bool:
        """Whether the calling thread is inside of a backward pass that began in the step."""
        return current_run() not in (-1, self._entered_in)

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

        If only nested runs of a pass were seen, the pass is over when all of these are, and its own call has returned.
        """
        if not self._runs and not self._announced:
            return
        unseen = self._own is None and self._nested_running == 0 and not self._announced
        if unseen and (self._root is None or _has_returned(self._root)):
            self._over()
            return
        self._forget_runs()
        if self._num_in_pass:
            self._pass_failed()
        else:
            self._pass_over(None)

    def returned(self) -> None:
        """The announced pass returned without an error, whether or not a hook was called."""
        if self._runs or self._announced:
            self._over()

    def _joins_if_new(self, first: int = -1) -> None:
        """A hook is called, in a run of the engine that may be a new one; ``first`` as in `_pass_begins`."""
        if (run := current_run()) not in self._runs:
            self._joins(run, first)

    @property
    def _gives_parts(self) -> bool:
        """Whether a gradient that comes now may be a part of the pass's, to be held back."""
        return self._holds or current_run() in self._summing

    def _joins(self, run: int, first: int = -1) -> None:
        """Note a new run of the engine: a new pass, or a part of the running one."""
        engine = torch.autograd.Variable._execution_engine
        root, nested = self._nesting()
        if self._announced and self._root is None:
            self._root = root
        elif not self._runs or root is not self._root or (root is None and not nested):
            self.settle()
            self._begin(root, first)
        if nested:
            self._nested_running += 1
            # queued inside of the run that ends: the engine calls back when that one is over
            engine.queue_callback(self._nested_over)
            if not all(nested) or self.functions_give_parts is not False:
                self._summing.add(run)
        else:
            self._own, self._announced = run, False
            (after_callbacks if self.ends_late else engine.queue_callback)(self._over)
        self._runs.add(run)

    def _nesting(self) -> tuple[FrameType | None, list[bool]]:
        """The call that began the pass, and of each run inside of it whether a Function's backward began it.

        ``None``: the pass was begun in another way than by Python's own calls.
        """
        calls = _calls_of_engine(self._thread)
        calls = calls[: len(calls) - self._num_outside]
        began_by = [by_function for _, by_function in calls]
        if not calls or (began_by[-1] and not self._num_outside):
            return None, began_by
        return calls[-1][0], began_by[:-1]

    def _hold(self, index: int, parameter: HasGradient) -> None:
        """What is in ``p.grad`` may be a part, to which the pass adds: it is the parameter's gradient at its end."""
        self._has_parts |= self._held.pop(index, None) is not None
        self._held[index] = parameter  # in the order in which they come last
        self._holds = True
        self._num_in_pass += 1

    def _begin(self, root: FrameType | None, first: int) -> None:
        self.pass_number += 1
        self._own, self._root, self._nested_running, self._num_in_pass = None, root, 0, 0
        self._held, self._holds, self._has_parts = {}, False, False
        self._pass_begins(first)

    def _forget_runs(self) -> None:
        self._runs.clear()
        self._summing.clear()
        self._root, self._announced = None, False  # the frame has all of the loop's variables

    @not_compiled
    def _nested_over(self) -> None:
        self._nested_running -= 1

    @not_compiled
    def _over(self) -> None:
        # first: what is called below must see no pass under way
        self._forget_runs()
        if self._held:
            self.functions_give_parts = bool(self.functions_give_parts) or self._has_parts
        if self._num_in_pass == 0:
            self.pass_number -= 1
            self._pass_over(None)
            return
        # counted first: what is called then asks how many are over
        self.num_over += 1
        self._pass_over(self.pass_number)
        self.seen_complete = True


def _has_returned(call: FrameType) -> bool:
    """Whether this call came to its end without an error: its last instruction tells."""
    return dis.opname[call.f_code.co_code[call.f_lasti]].startswith("RETURN")


def _calls_of_engine(thread: int) -> list[tuple[FrameType, bool]]:
    """The calls by which Python runs the engine now, the innermost first; whether a Function's backward made each.

    ``thread``: which began the outermost. The engine has threads of its own for devices, where it calls hooks.
    """
    calls: list[tuple[FrameType, bool]] = []
    here = threading.get_ident() == thread
    for top in [sys._getframe()] if here else [sys._getframe(), sys._current_frames().get(thread)]:
        frame = top
        while frame is not None:
            if frame.f_code is _ENGINE:
                calls.append((frame, False))
            elif calls and frame.f_code in _FUNCTION:
                calls[-1] = calls[-1][0], True
            frame = frame.f_back
    return calls
