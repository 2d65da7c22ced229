"""The phases of one rank's steps, by clocks that hooks read; at most one phase runs at a time.

What is waiting is told by the caller. The rest of a step is the rank's own work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from straggle.backward.clocks import Loads
from straggle.backward.hooks import tensors_in
from straggle.backward.passes import in_backward
from straggle.backward.stages import Stage, StagePlan
from straggle.observe.watch.pauses import PauseDetector


class StageEnds:
    """The moments of the running pass, or the last one: each with a parameter that was finished then.

    ``now()`` gives a moment. On a device that takes as long as to launch a kernel. So from the second pass with a plan
    on, one is taken if a stage has as many gradients as in the pass before, and at each that comes after. Of a stage
    that has fewer, it is that of the end of the pass.
    """

    def __init__(self, now: Callable[[], Any]) -> None:
        self._now = now
        self.moments: list[tuple[int, Any]] = []
        self._stages: Sequence[Stage] = ()
        self._stage_of: dict[int, int] = {}
        self._nums: list[int] = []  # gradients of the running pass, for each stage
        self._nums_before: list[int] = []  # the same of the pass before

    def follow(self, plan: StagePlan) -> None:
        """From the next pass on, the stages are these; until then each gradient has a moment."""
        self._stages = plan.stages
        self._stage_of = {index: number for number, stage in enumerate(plan.stages) for index in stage.parameters}
        self._nums = self._nums_before = [0] * len(plan.stages)

    def begin(self) -> None:
        """A pass begins."""
        self.moments, self._nums = [], [0] * len(self._stages)

    def gradient(self, index: int) -> None:
        """Parameter ``index`` has its gradient."""
        if (stage := self._stage_of.get(index)) is not None:
            self._nums[stage] += 1
            if self._nums[stage] < self._nums_before[stage]:
                return
        self.moments.append((index, self._now()))

    def over(self) -> None:
        """The pass is over."""
        for stage, num, before in zip(self._stages, self._nums, self._nums_before, strict=True):
            if 0 < num < before:
                self.moments.append((stage.parameters[-1], self._now()))
        self._nums_before = self._nums


_BETWEEN = "between"  # after a backward pass: what comes next tells what it was
_LOADED = "loaded"  # the same, and a batch was loaded since: loading, if the step's next pass comes


@dataclass(frozen=True)
class StepTimes:
    """A step's moments: seconds of the host's clock, or events that the device may not have reached yet.

    ``phases``: for each name the spans in which it ran. ``began``: its first forward pass; ``finished``: moments at
    which parameters had their gradients; ``microbatches``: the ends of its backward passes.
    """

    before: Any
    end: Any
    began: Any
    phases: dict[str, list[tuple[Any, Any]]]
    microbatches: list[Any]
    finished: list[tuple[int, Any]]
    pauses: dict[str, dict[str, float]]


class Recorder:
    """The running step of one rank, which ``written`` gets when it is over. It does not hold the model.

    ``merge``: what the time between a step's last backward pass and the optimizer's step is. ``pass``: nothing, as the
    gradients are merged when the pass ends, and with that the step does. ``wait``: the merge. ``outside``: the rank's
    own work. In these two cases a step ends where an optimizer begins.
    """

    def __init__(
        self, now: Callable[[], Any], written: Callable[[StepTimes], None], merge: str, detector: PauseDetector
    ) -> None:
        self._now, self._written, self._merge = now, written, merge
        self._thread = threading.get_ident()
        self.phase, self._since = "outside", now()
        self._before = self._since
        self._phases: dict[str, list[tuple[Any, Any]]] = {}
        self._began: Any = None
        self._microbatches: list[Any] = []
        self._in_pass = self._synced = False
        self._loads = Loads()
        self.ends = StageEnds(now)
        self._detector = detector
        self._detector.start()

    def close(self) -> None:
        """End the thread that looks for pauses."""
        self._detector.close()

    # -- a pass

    def before_ddp(self, *, synced: bool) -> None:
        """DDP's own part of a forward pass begins: it copies buffers, for which ranks wait."""
        if torch.is_grad_enabled():
            self._synced, self._in_pass = synced, False
            self._was("outside", loaded="data")
            self._mark("wait")
        else:
            self._evaluation()

    def forward(self) -> None:
        """A forward pass begins."""
        if in_backward():  # a checkpoint's
            return
        if not torch.is_grad_enabled():
            self._evaluation()
            return
        self._in_pass = False
        self._loads.pass_begins()
        self._was("outside" if self._loads.are_known else "data", loaded="data")
        self._mark("forward")
        if self._began is None:
            self._began = self._since

    def _evaluation(self) -> None:
        self._loads.evaluated()
        if self.phase != "outside":
            self._was("outside" if self._merge == "pass" else self._merge)
            self._mark("outside")

    def leave(self, output: Any) -> None:
        """A forward pass is over; its backward pass begins with a gradient of one of these tensors."""
        if torch.is_grad_enabled() and not in_backward():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def _backward_begins(self, _gradient: Tensor | None) -> None:
        if not self._in_pass and self._began is not None:
            self._in_pass = True
            self.ends.begin()
            self._mark("backward")
            # callbacks run in their order when the graph is done: this one before DDP's, which is queued later
            _queue_callback(self._computed)

    def gradient(self, index: int, _parameter: Tensor) -> None:
        """Parameter ``index`` has its gradient."""
        if self._began is not None:
            self._backward_begins(None)
            self.ends.gradient(index)

    def _computed(self) -> None:
        """This rank's own work of the pass is done."""
        if not self._in_pass:
            return
        self._in_pass = False
        self.ends.over()
        if self._merge != "pass":
            self._mark(_BETWEEN)
        else:
            self._mark("wait" if self._synced else "outside" if self._loads.are_known else "data")
        self._microbatches.append(self._since)
        if self.phase == "wait":
            _queue_callback(self._merged)  # after DDP's

    def _merged(self) -> None:
        self._mark("outside")
        self._end_step()

    # -- the optimizer, and waiting

    def optimizer_begins(self, _optimizer: Optimizer) -> None:
        """Its step; with a closure it may have passes in it."""
        if self._merge != "pass" and self._microbatches:
            self._was(self._merge)
            self._mark("optimizer")
            self._end_step()
        elif self._began is None:
            self._mark("optimizer")

    def optimizer_ends(self, _optimizer: Optimizer) -> None:
        """What comes now is the end of the loop until it loads; if no loader is known, all is loading."""
        then = "loop_end" if self._loads.are_known else "data"
        if self._merge != "pass" and self._microbatches:  # the passes were in a closure
            self._was(self._merge)
            self._mark(then)
            self._end_step()
        elif self._began is None:
            self._mark(then)

    # -- what the loop does between

    def load(self, call: Callable[[], Any]) -> Any:
        """Load a batch by this call; after it the loop prepares that batch, if its passes come next."""
        is_between_passes = self._began is not None and self.phase in ("outside", _BETWEEN)
        batch = self._loads.load(call, self.phase, self._mark)
        if is_between_passes:
            self._mark(_LOADED)
        return batch

    def collective(self, call: Callable[[], Any]) -> Any:
        """Wait by this call for a collective of the loop's own; not if it may be the merge."""
        before = self.phase
        if before in ("wait", "collective") or (before in (_BETWEEN, _LOADED) and self._merge == "wait"):
            return call()
        self._mark("collective")
        try:
            return call()
        finally:
            self._mark(before)

    def wait(self, call: Callable[[], Any]) -> Any:
        """Do that, in which this rank waits for others."""
        phase = self.phase
        if phase in ("wait", "outside") or not (threading.get_ident() == self._thread or in_backward()):
            return call()
        self._mark("wait")
        try:
            return call()
        finally:
            if self.phase == "wait":
                self._mark(phase)

    # -- what they gather

    def _mark(self, phase: str) -> None:
        """End the running phase and begin another."""
        now = self._now()
        self._phases.setdefault(self.phase, []).append((self._since, now))
        if self.phase not in (_BETWEEN, _LOADED):
            self._detector.credit(self.phase)
        self.phase, self._since = phase, now

    def _was(self, phase: str, loaded: str | None = None) -> None:
        """If it was not clear yet what has run since a pass: it was this, and ``loaded`` from a batch's loading on."""
        for unclear, told in ((_BETWEEN, phase), (_LOADED, loaded or phase)):
            if self.phase == unclear:
                self.phase = told
            if spans := self._phases.pop(unclear, None):
                self._phases.setdefault(told, []).extend(spans)

    def _end_step(self) -> None:
        times = StepTimes(
            before=self._before,
            end=self._since,
            began=self._began,
            phases=self._phases,
            microbatches=self._microbatches,
            finished=self.ends.moments,
            pauses=self._detector.take(),
        )
        self._before, self._began, self._synced = self._since, None, False
        self._phases, self._microbatches = {}, []
        self._written(times)


def _queue_callback(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)
