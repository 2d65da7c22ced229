"""What a step of one rank holds while it is open, and by which rule the rank leaves it: by the clock, or at once.

It is made when the rank enters the step, and let go of when it has left. All on the training thread. `OpenStep` writes
it, and what is read between two steps is of the one that was left last.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from straggle.backward.step_in_parts import StepInParts
from straggle.merge.late.sides import Entry, TrainingSide
from straggle.merge.round.buffers import StageBuffers
from straggle.merge.round.round import Round
from straggle.merge.round.step_passes import Passes, StopRule
from straggle.report import Phase
from straggle.source.kept import KeptGradients

NO_RUN = -2  # is no number of a run, nor that of being outside of all
_NOTHING_KEPT = KeptGradients(())


class ByClock(StopRule):
    """A rank is late when its deadline is over and a quorum waits: the stand-in watches the clock (`stand_in.py`).

    It goes on until it has begun the collectives of the loop's own that the quorum has begun.

    Gradients that come after the merge are left out by the coordinator.
    """

    def __init__(self, training: TrainingSide) -> None:
        self._training, self._stops = training, training.stops

    def stops(self, num_checks: int) -> bool:  # noqa: ARG002
        """Whether the stand-in asked for it."""
        step, stops = self._training.step, self._stops
        # first: it is asked at each gradient, and nearly never stopped
        return (stops.step >= step or stops.asked_step >= step) and self._training.leaves


class NoData(StopRule):
    """A rank whose loader is exhausted computes nothing (`StagedDataParallel.join`).

    If there are collectives of the loop's own in its steps, it goes through all of the block for them.
    """

    def __init__(self, training: TrainingSide) -> None:
        self._training = training

    def stops(self, num_checks: int) -> bool:  # noqa: ARG002
        """At once."""
        return not self._training.collectives.gathers


@dataclass(frozen=True)
class LeftStep:
    """What is still known of the step that was left last. ``passes``: this rank's; ``num_announced``: by the loop.

    ``left_at``: how often it had asked whether to go on when it was late in it; ``None``: it was not. ``usable``: on
    the device, whether it is to change anything. ``buffers``: its merged gradients, as long as anybody has one.
    ``given``: those that a peer had then, from whose state this rank goes on.
    """

    passes: Passes
    num_announced: int = 1
    left_at: int | None = None
    stood_in: bool = False
    usable: Tensor | None = None
    buffers: weakref.ref[StageBuffers] | None = None
    given: Sequence[Tensor | None] | None = None

    @property
    def views(self) -> Sequence[Tensor | None]:
        """The merged gradients that may still lie in ``p.grad``."""
        if self.given is not None:
            return self.given
        # only a weak reference: who keeps no gradient lets the buffers be used again
        buffers = None if self.buffers is None else self.buffers()
        return () if buffers is None else buffers.views


class EarlySteps:
    """An optimizer's step that is made while buckets travel: of so many buckets, and of these ``parameters``."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.parts = StepInParts(optimizer)
        self.num_buckets = 0  # merged and looked at
        self.parameters: set[int] = set()

    def looked_at(self) -> None:
        """One more bucket is merged, and was looked at."""
        self.num_buckets += 1

    def step(self, indices: set[int], part: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Step these, each with its gradient."""
        self.parameters |= indices
        self.parts.step(part)


@dataclass
class InStep:
    """``rule``: what ends the rank's part; ``kept``: gradients that the loop did not zero. ``idle``: it has no data.

    ``entry``: what the rank entered it with. ``merged``: the step, if it is merged and its block is open still.
    ``stays``: the rank's pass is not cut if it is late. ``again_s``: seconds of the attempts at it that were discarded.

    ``left``: gradients after which nothing is left to stop. ``passes_with_data``: fewer than were announced if the loop
    runs out of data. ``at_once``: behind the last forward pass, backward has all gradients when it has one.
    """

    entry: Entry
    rule: StopRule
    kept: KeptGradients = _NOTHING_KEPT
    idle: bool = False
    left: int = 0
    most: int = 1  # gradients with which a pass is over for the most part
    early: EarlySteps | None = None  # if an optimizer steps in the block
    passes_with_data: int = sys.maxsize
    stopped: bool = False
    stays: bool = False
    again_s: float = 0.0
    merged: Round | None = None
    cut_in: Phase | None = None  # where another model's lateness left the code of this step, too
    num_forward: int = 0  # passes that were finished
    in_forward: bool = False
    at_once: bool = False
    num_timed: int = 0  # micro-batches whose end was noted
    num_taken: int = 0  # gradients
    num_checks: int = 0  # how often the pass asked whether to go on
    num_fruitless: int = 0  # passes that came through the model's output and gave no parameter a gradient
    grouped_run: int = NO_RUN  # of the engine, whose gradients wait for their group
    outputs: list[weakref.ref[Tensor]] = field(default_factory=list)
    on_backward: Callable[[], None] | None = None  # when a backward pass is over for the most part

    @property
    def stepped_early(self) -> Collection[int]:
        """Parameters that were stepped in the block, while other buckets travelled."""
        return () if self.early is None else self.early.parameters

    # -- its passes

    def expect(self, left: int) -> None:
        """So many gradients may come, from its beginning on."""
        self.left = left

    def has_data_for(self, num_passes: int, left: int) -> None:
        """The loop has data for so many of its passes, which have so many gradients."""
        self.passes_with_data, self.left = num_passes, left

    def has_no_data(self) -> None:
        """The loop has none for any of its passes."""
        self.idle = True

    def end_by(self, rule: StopRule) -> None:
        """This ends the rank's part from here on."""
        self.rule = rule

    def call_on_backward(self, call: Callable[[], None]) -> None:
        """Call this whenever a backward pass is over for the most part."""
        self.on_backward = call

    def forward_begins(self) -> None:
        """A forward pass of the model begins."""
        self.in_forward = True

    def forward_over(self, *, at_once: bool) -> None:
        """It came to its end."""
        self.in_forward, self.at_once = False, at_once
        self.num_forward += 1

    def microbatch_noted(self) -> None:
        """The end of one more micro-batch was noted."""
        self.num_timed += 1

    def fruitless(self) -> None:
        """A pass is over that gave no parameter a gradient."""
        self.num_fruitless += 1

    # -- its gradients

    def group(self, run: int) -> None:
        """The gradients of this run of the engine wait for their group; `NO_RUN`: of none."""
        self.grouped_run = run

    def took(self) -> None:
        """One more gradient is taken."""
        self.num_taken += 1

    def stay(self) -> None:
        """Its passes are not cut."""
        self.stays = True

    # -- its end

    def checked(self) -> None:
        """It was asked whether to go on, and goes on."""
        self.num_checks += 1

    def stop(self) -> None:
        """The rule has stopped it."""
        self.stopped = True

    def cut_by_another(self, phase: Phase) -> None:
        """Another model's deadline was over in this phase; the first one counts."""
        self.cut_in = self.cut_in or phase

    def merged_inside(self, merged: Round) -> None:
        """It is merged, and its block is open still."""
        self.merged = merged

    def take_no_more(self) -> None:
        """Its part is merged: a gradient that comes now belongs to no step."""
        self.grouped_run, self.on_backward = NO_RUN, None

    def let_go(self) -> None:
        """It is left: free what was there before, the optimizer, and its gradients."""
        self.kept, self.early, self.merged = _NOTHING_KEPT, None, None
