"""The current deadline: the steps that the policy has seen so far, and its decision for the running one.

Nothing here is thread-safe: the coordinator's lock guards it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from straggle.backward.stages import Stage, StagePlan
from straggle.merge.rows.table import Table
from straggle.policies.deadline import Deadline, LateHandling, WaitForAll, next_deadline
from straggle.policies.history import History, HistoryWindow, ProgressRow, StepProgress
from straggle.policies.shares.cost import UsualCost, mean_cost_of
from straggle.policies.what_if.step_model import StopRules
from straggle.source.source import Slot

_DECIDED = ("seconds", "shadow_s", "predicted_drop", "after_quorum_s", "quorum_s")


class CurrentDeadline:
    """``seconds`` for the step that is being merged; ``shadow_s``: those of a policy that is not enforced.

    ``predicted_drop``: the share of the gradients that the policy expects to be dropped in it; NaN if unknown.
    ``after_quorum_s``: seconds that a rank has once a quorum waits.
    """

    def __init__(self, policy: Deadline, late_handling: LateHandling, world_size: int) -> None:
        self.late_handling = late_handling
        self.rules = StopRules.of(policy, late_handling, world_size)
        self.seconds = math.inf  # the first step waits for all ranks
        self.shadow_s = math.nan if policy.enforced else math.inf
        self.predicted_drop = math.nan
        self.after_quorum_s = policy.grace_s
        self.quorum = self.rules.quorum
        self.quorum_s = 0.0  # in which a quorum finished the last step, if ranks are late by their devices
        self._num_ranks = world_size
        self._policy, self._world_size = policy, world_size
        self._window = HistoryWindow(policy.window, world_size)
        self._usual_cost = UsualCost()
        self._plain_share: tuple[float, ...] = ()
        self._stage_share: Tensor | None = None  # each stage's share of the model, if the policy needs more than times

    @property
    def late_after_s(self) -> float:
        """The seconds after which a rank may be late; infinite if the quorum is all ranks."""
        return self.seconds if self.can_be_late else math.inf

    @property
    def can_be_late(self) -> bool:
        """Whether the quorum is fewer than all ranks."""
        return self.quorum < self._num_ranks

    @property
    def waits_for_all(self) -> bool:
        """Whether no rank is ever late."""
        return isinstance(self._policy, WaitForAll)

    @property
    def history(self) -> History:
        """The steps that the policy has seen; the tensors are views."""
        return self._window.read()

    @property
    def usual_cost(self) -> UsualCost:
        """The cost of a step whose deadline is `seconds`."""
        return self._usual_cost

    def after_quorum_of(self, relative_cost: float) -> float:
        """The seconds that a rank has once a quorum waits, in a step of this relative cost.

        A policy's own ``grace_s`` is not scaled.
        """
        own_s = self._policy.grace_s
        return max(own_s, relative_cost * self.after_quorum_s) if self.after_quorum_s > own_s else self.after_quorum_s

    @property
    def dealt(self) -> bool:
        """Whether each rank gets as much work as it has time for."""
        return self._window.dealt

    @property
    def decided(self) -> dict[str, float]:
        """What is decided for the running step: its history has that no more if steps have left the window."""
        return {name: float(getattr(self, name)) for name in _DECIDED}

    def restore(self, history: History, decided: Mapping[str, float] | None = None) -> None:
        """Go on from the history of another run, or of a peer, who gives what it has `decided`, too."""
        self._window.restore(history)
        self._use_costs()
        if decided is not None:
            for name in _DECIDED:
                setattr(self, name, decided[name])
            self._follow_rules()

    def of_ranks(self, number: int) -> None:
        """So many ranks take part from here on; the others count in no quorum."""
        self.quorum = self.late_handling.quorum_among(number, self._policy.quorum)
        of_all = StopRules.of(self._policy, self.late_handling, self._world_size, number)
        self.rules = replace(self.rules, quorum=of_all.quorum)
        self._num_ranks = number

    def wait_for_all(self) -> None:
        """No rank is late from here on."""
        self._policy = WaitForAll()
        self.after_quorum_s = 0.0

    def work_is_dealt(self, *, evenly: bool = True, after: int = -1) -> None:
        """From here on each rank gets as much work as it has time for.

        Whether all then take as long (``evenly``) counts from the step on to which no rank can have come without
        having heard of it ``after`` this step: its merges are up to ``max_lag`` ahead of its training thread.
        """
        self._window.deal(evenly=evenly, from_step=after + 2 + self.late_handling.max_lag if after >= 0 else 0)
        self._use_costs()

    def prepare(self, plan: StagePlan, slots: Sequence[Slot]) -> None:
        """Tell the policy how late ranks are treated, and of the stages, which stay as they are."""
        self._policy.prepare(self.late_handling, [_parts(stage, slots) for stage in plan.stages])

    def watch(self, plan: StagePlan) -> None:
        """From here on keep the ranks' progress through these stages, for a policy that needs more than times."""
        if self._policy.wants_progress:
            self._stage_share = torch.tensor(plan.shares)
            self._plain_share = tuple(self._stage_share.tolist())
            self._window.watch(self._stage_share)

    def decide(self, table: Table) -> None:
        """Decide the next step's deadline after a merged step."""
        shares, granularity = self._stage_share, self.late_handling.granularity
        progress: StepProgress | ProgressRow | None = None
        compute_s, window = table.compute_s(), self._window
        is_usual = table.is_usual and math.isnan(window.mean_cost)  # and no rank's cost is known
        if is_usual and (window.dealt or set(table.column("num_microbatches")) == {window.mean_microbatches}):
            relative: Sequence[float] = ()  # as in nearly every step of nearly every job
        else:
            relative = self._relative_costs(table)
        if relative and relative.count(1.0) < len(relative):
            compute_s = [own_s / own for own_s, own in zip(compute_s, relative, strict=True)]
            if shares is not None:
                measured = table.progress(shares, granularity)
                progress = replace(measured, unit_s=measured.unit_s / torch.tensor(relative).unsqueeze(1))
        elif shares is not None:
            progress = table.progress_row(self._plain_share, granularity)
        if self.late_handling.late_by == "device":
            known_s = sorted(own_s for own_s in compute_s if not math.isnan(own_s))
            self.quorum_s = known_s[self.quorum - 1] if self.quorum <= len(known_s) else math.inf
        finished = [True] * len(compute_s) if table.is_usual else table.finished_ranks()
        decided = next_deadline(self._policy, window.append(compute_s, finished, progress))
        self.predicted_drop, self.after_quorum_s = decided.predicted_drop, decided.after_quorum_s
        self._follow_rules()
        if self._policy.enforced:
            self.seconds = decided.seconds
        else:
            self.shadow_s = decided.seconds

    def _follow_rules(self) -> None:
        if self.rules.after_quorum_s != self.after_quorum_s:
            self.rules = replace(self.rules, after_quorum_s=self.after_quorum_s)

    def _relative_costs(self, table: Table) -> list[float]:
        """The expected length of each rank's step relative to a usual one."""
        window, costs = self._window, table.costs()
        if math.isnan(window.mean_cost) and not math.isnan(mean := mean_cost_of(costs)):
            window.scale(cost=mean)
            self._use_costs()
        as_usual = self.dealt or set(table.column("num_microbatches")) == {window.mean_microbatches}
        if as_usual and math.isnan(window.mean_cost):
            return [1.0] * len(costs)
        numbers = table.num_microbatches()
        if math.isnan(window.mean_microbatches) and not self.dealt:
            window.scale(microbatches=mean_cost_of(numbers))
            self._use_costs()
        return self._usual_cost.relative_of(costs, numbers)

    def _use_costs(self) -> None:
        window = self._window
        self._usual_cost = UsualCost(window.mean_cost, math.nan if window.dealt else window.mean_microbatches)


def _parts(stage: Stage, slots: Sequence[Slot]) -> int:
    """How many gradients of the same size would come as evenly as those of the stage."""
    if not stage.numel:  # of a sharded layer of which this rank has no element
        return len(stage.parameters)
    return round(stage.numel**2 / sum(slots[index].numel ** 2 for index in stage.parameters))
