"""When the stages of watched backward passes were finished, from as few moments as it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from straggle.backward.stages import Stage, StagePlan


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
