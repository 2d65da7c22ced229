"""How the stages of a model are planned, and planned again when its parameters are others between two steps.

The first plan is made from the order in which rank 0 finished the gradients of the first step.

A rank that finds its parameters changed when it enters a step (unfrozen, added or replaced) announces that in a merge
to which it gives nothing else. So a rank that has not changed, and is in the merge of the same step, learns of it
there, and nobody waits in vain. Then all ranks compare their parameters, and plan the stages again before the step
itself. That costs a step without changes one number in each rank's row.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn

from straggle.backward.stages import StagePlan, complete_order, plan_stages
from straggle.loop.model_parts import ModelParts
from straggle.loop.optimizer_steps import OptimizerSteps
from straggle.merge.alike import Wrapped, check_alike, check_same_state
from straggle.merge.checks import check_module, own_part
from straggle.merge.late.sides import Entry
from straggle.merge.round.round import Round
from straggle.merge.saved_state import ResumeState
from straggle.source.kept import UNDECIDED
from straggle.source.source import named_tensors

_log = logging.getLogger(__name__)
_NAMED = 4  # parameters that a line in the log names


class Replanning:
    """Of one model, on its training thread."""

    def __init__(self, module: nn.Module, parts: ModelParts, steps: OptimizerSteps, resume_state: ResumeState) -> None:
        self._module, self._options, self._parts, self._steps = module, parts.options, parts, steps
        self._resume_state = resume_state
        self._rank = parts.channel.name
        self._seconds: dict[str, float] = {}  # of each parameter, in the order in which backward finished them
        self._owners = _owners_of_buffers(module)

    def learned(self, order: Sequence[int], seconds: Sequence[float]) -> None:
        """The stages were planned from this."""
        names = [name for name, _ in self._parts.source.named]
        self._seconds = {names[index]: seconds[index] for index in order}

    def replan(self, changes: str, step: int) -> StagePlan:
        """Before ``step``, in which this rank's parameters are others: new stages, if they are the same on all ranks.

        Raises ``RuntimeError`` naming the ranks and the first parameter that differs, on all of them.
        """
        parts = self._parts
        if option := self._parts.wings.keeps_stages:
            raise RuntimeError(self._not_with(option, changes, step))
        parts.coordinator.pause()
        table = parts.coordinator.announce(Entry(idle=True, kept=UNDECIDED, replans=True))
        if table is None:
            words = f"rank {self._rank}, step {step}: its parameters are others now ({changes}), and its peers' are not"
            # before it raises: its peers are in a step that this rank will never give anything to
            parts.channel.post_failure(words)
            raise RuntimeError(f"{words}: change parameters on all ranks before the same step")
        self._check_alike(step, table.replanning(), "have other parameters than before", changes)
        plan = self._renew(changes, step)
        # after all ranks have compared: a step's time must not run while they wait for one another
        parts.coordinator.resume()
        return plan

    def merged(self, current: Round) -> None:
        """A step is merged. Raises ``RuntimeError``, on all ranks, if some have other parameters than the rest."""
        step, table = current.step, current.table
        # by the rows, which are the same everywhere: all ranks raise, or none does
        if ranks := table.replanning():
            self._refuse(step, ranks, "have other parameters than before")
        ranks = table.frozen_unlike()
        # or it leaves, and its peers go on
        if ranks and (not self._parts.wings.go_on or self._parts.replica.place in ranks):
            self._refuse(step, ranks, "have frozen other parameters than the rest")

    def _refuse(self, step: int, ranks: Sequence[int], what: str) -> NoReturn:
        if not self._parts.wings.go_on:
            self._check_alike(step, ranks, what)
        names = [name for name, parameter in self._parts.source.named if not parameter.requires_grad]
        raise RuntimeError(f"{self._words(step, ranks, what)} (frozen on this rank: {', '.join(names) or 'none'})")

    def _check_alike(self, step: int, ranks: Sequence[int], what: str, changes: str = "nothing") -> None:
        """Compare the parameters of all ranks, which come here together, and what has changed of them."""
        refusal = ""
        try:
            check_module(self._module, sharded=self._options.sharded)
        except ValueError as error:
            refusal = str(error)
        mine = Wrapped(refusal) if refusal else Wrapped.of(self._module, {"what was changed": changes})
        try:
            check_alike(mine, self._parts.channel)
        except ValueError as error:
            raise RuntimeError(f"{self._words(step, ranks, what)}: {error}") from error

    def _words(self, step: int, ranks: Sequence[int], what: str) -> str:
        named = self._parts.channel.named(ranks)
        return (
            f"rank {self._rank}, step {step}: ranks {named} {what}; freeze, unfreeze, add or replace parameters on all "
            "ranks before the same step"
        )

    def _not_with(self, option: str, changes: str, step: int) -> str:
        return (
            f"rank {self._rank}, step {step}: parameters are not those that were wrapped ({changes}), and with "
            f"{option}= stages cannot be planned again in a running job: wrap the model with all parameters that it "
            "will ever train, trainable, and freeze some after that; or close() this one and wrap the model again with "
            "a new optimizer"
        )

    # -- the same on all ranks

    def _renew(self, changes: str, step: int) -> StagePlan:
        """Take the parameters that there are now; new ones begin with rank 0's values."""
        parts, new = self._parts, self._parts.source.renew()
        for number, parameter in enumerate(new):
            # all ranks in the same order, which `renew` gives: collectives have no names
            parts.channel.broadcast(own_part(parameter), name=f"new parameter {number}")
        self._take_buffers()
        plan = self._plan()
        parts.opened.replanned(plan if parts.coordinator.is_planned else None)
        parts.coordinator.replan(plan, parts.state.numel)
        # after the coordinator: a hook that comes now finds the plan that its parameter is in
        parts.hooks.renew()
        self._steps.watch()
        self._resume_state.parameters_changed()
        if parts.channel.rank == 0:
            _log.warning(
                "step %d: parameters are others than before (%s): stages are planned again, and %d parameters that "
                "were not merged until now begin with rank 0's values",
                step,
                _shortened(changes),
                len(new),
            )
        return plan

    def _plan(self) -> StagePlan:
        named, stages = [*named_tensors(self._parts.source.slots)], self._options.stages
        if not self._parts.coordinator.is_planned:
            return plan_stages(self._module, stages, named=named)
        order, seconds = complete_order([(name, parameter.numel()) for name, parameter in named], self._seconds)
        self.learned(order, seconds)
        return plan_stages(self._module, stages, order, seconds, named=named)

    def _take_buffers(self) -> None:
        """Other parameters are frozen, and modules that were replaced have other buffers, which begin with rank 0's."""
        before, self._owners = self._owners, _owners_of_buffers(self._module)
        for name, buffer in self._module.named_buffers():
            if self._owners[name] is not before.get(name):
                self._parts.channel.broadcast(buffer, name=f"buffer {name}")
        self._parts.state.modules_changed()


def _owners_of_buffers(module: nn.Module) -> Mapping[str, nn.Module]:
    """The module that each buffer is registered with, by the buffer's name."""
    return {name: module.get_submodule(name.rpartition(".")[0]) for name, _ in module.named_buffers()}


def _shortened(changes: str) -> str:
    names = changes.split(", ")
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


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
        # before anything is exchanged: a wing may refuse, on all ranks alike
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
        # before `start`: from then on ranks can be late, by these stages
        self._parts.coordinator.learn(plan)
        self._parts.opened.groups.follow(plan)
        # last: the stand-in begins to watch, and stages stay as they are
        self._parts.coordinator.start()

    def check_at(self, plan: StagePlan) -> None:
        """Ask at these stages whether the rank is late.

        Not if a graph runs all of them: it has no hooks, and other hooks would only make torch compile it once more.
        """
        if self._options.late_handling.granularity != "microbatch" and not self._parts.opened.at_once:
            self._parts.hooks.check_at([stage.entry for stage in plan.stages])
