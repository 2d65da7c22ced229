"""How the stages of a model are planned: from the order in which rank 0 finished the gradients of the first step."""

from __future__ import annotations

import torch
from torch import nn

from straggle.backward.stages import StagePlan, plan_stages
from straggle.loop.model_parts import ModelParts
from straggle.loop.replanning import Replanning
from straggle.merge.alike import check_same_state
from straggle.merge.round.round import Round
from straggle.source.source import named_tensors


class Planning:
    """Of one model, on its training thread.

    ``learned``: what the stages were planned from: the parameters in the order in which backward finished them, and
    when, in seconds; both empty before that.
    """

    def __init__(self, module: nn.Module, parts: ModelParts, replanning: Replanning) -> None:
        self._module, self._options, self._parts = module, parts.options, parts
        self._replanning = replanning
        self.learned: tuple[list[int], list[float]] = ([], [])
        self.check_at(parts.coordinator.plan)

    def merged(self, current: Round) -> None:
        """A step is left. After the first one plan the stages, all ranks together; from here on they stay."""
        if (times := self._parts.learner.step_complete()) is None:
            return
        channel, number = self._parts.channel, len(self._parts.source.slots)
        given = [planned for phase in self._parts.wings.plan if (planned := phase()) is not None]
        check_same_state(self._parts.coordinator.history, channel, current)
        own = given[0] if given else (times.order(number), times.seconds(number))
        order, seconds = channel.of_rank0(torch.tensor(own, dtype=torch.float64)).tolist()
        self.use(list(map(int, order)), seconds)

    def begin_with(self, order: list[int], seconds: list[float]) -> None:
        """Before the first step: plan the stages as the job has, which runs already."""
        self._parts.learner.skip()
        self.use(order, seconds)

    def use(self, order: list[int], seconds: list[float]) -> None:
        """Plan the stages from this, and begin to watch for ranks that are late."""
        self.learned = order, seconds
        self._replanning.learned(order, seconds)
        plan = plan_stages(
            self._module, self._options.stages, order, seconds, named=[*named_tensors(self._parts.source.slots)]
        )
        self.check_at(plan)
        self._parts.coordinator.learn(plan)
        self._parts.opened.groups.follow(plan)
        self._parts.coordinator.start()

    def check_at(self, plan: StagePlan) -> None:
        """Ask at these stages whether the rank is late.

        Not if a graph runs all of them: it has no hooks, and other hooks would only make torch compile it once more.
        """
        if self._options.late_handling.granularity != "microbatch" and not self._parts.opened.at_once:
            self._parts.hooks.check_at([stage.entry for stage in plan.stages])
