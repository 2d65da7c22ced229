"""Recorded steps as they would have been with no rank late, and what comes of deadlines in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from straggle.policies.history import History
from straggle.policies.what_if.step_model import SimulatedStep, StopRules, part_computed, simulate_step
from straggle.policies.what_if.untruncated import untruncated_entries, untruncated_times

_FORWARD = 1 / 3  # of a micro-batch's time, in which no gradient comes


@dataclass(frozen=True)
class StepTimes:
    """Recorded steps as they would have been with no rank late.

    ``unit_s``, (steps, ranks, units): seconds from entering the step to the end of each unit of work; not finite if
    a unit never ends. ``unit_share``, of the same shape: the share of a rank's gradient that it brings, times
    its weight, of a mean of 1 over ranks. ``entered_s``, (steps, ranks): seconds from the step's begin to entering it.
    ``overhead_s``, (steps,): seconds of the step after its slowest rank's work. ``quorum_s``, (steps,): when a quorum
    waits, from the step's begin; no rank is stopped before.
    """

    unit_s: Tensor
    unit_share: Tensor
    entered_s: Tensor
    overhead_s: Tensor
    quorum_s: Tensor

    @property
    def end_s(self) -> Tensor:
        """When each rank ends its work, (steps, ranks), from the step's begin; NaN: it has none."""
        end_s = self.entered_s + self.unit_s[..., -1]
        return end_s.where((self.unit_share > 0).any(-1), math.nan)

    @property
    def waiting_s(self) -> Tensor:
        """When the last of them ends, (steps,): what waiting for all takes, but for the overhead."""
        return self.end_s.nan_to_num(0.0, posinf=0.0).amax(1)

    @property
    def with_work(self) -> StepTimes:
        """Without steps in which no rank had data."""
        worked = (self.unit_share > 0).flatten(1).any(1)
        return StepTimes(**{name: value[worked] for name, value in vars(self).items()})

    @staticmethod
    def of(history: History, quorum: Callable[[int], int]) -> StepTimes | None:
        """The steps whose progress a policy sees; ``None`` if no rank entered any of them, or had data.

        ``quorum``: how many ranks that is, of so many members.
        """
        progress = history.progress
        if progress is None or len(progress.unit_s) == 0:
            return None
        compute_s, idle = history.compute_s[-len(progress.unit_s) :], progress.weight == 0
        if compute_s.isnan().all() or idle.all():  # all were absent or stood in for: there is no time to choose from
            return None
        used = (progress.unit_share > 0).flatten(0, 1).any(0)
        # what a rank without data does is nothing that could be dropped or waited for
        unit_s = untruncated_times(progress, compute_s.nan_to_num(0.0)).masked_fill(idle.unsqueeze(-1), 0.0)
        mean_weight = progress.weight.mean(1, keepdim=True).clamp(min=1e-12)
        share = progress.unit_share * (progress.weight / mean_weight).unsqueeze(-1)
        members = ~progress.entered_s.isnan()
        entered_s = untruncated_entries(progress, compute_s)
        quorum_s = quorum_times(entered_s + unit_s[..., -1], members, quorum)
        return StepTimes(unit_s[..., used], share[..., used], entered_s, progress.overhead_s, quorum_s)


def quorum_times(end_s: Tensor, members: Tensor, quorum: Callable[[int], int]) -> Tensor:
    """When a quorum has finished, (steps,), of ranks that finish at ``end_s``, (steps, ranks).

    ``members``, of the same shape: which of them take part in the step; ``quorum(number)`` is how many of these.
    A step without any has a quorum at its begin.
    """
    ordered = end_s.masked_fill(~members, math.inf).sort(1).values
    numbers = members.sum(1)
    wanted = {number: min(max(1, quorum(number)), number) for number in set(numbers.tolist())}
    places = torch.tensor([wanted[number] for number in numbers.tolist()]).unsqueeze(1)
    return ordered.gather(1, (places - 1).clamp(min=0)).where(places > 0, 0.0).squeeze(1)


@dataclass(frozen=True)
class Outcomes:
    """What comes of several deadlines in recorded steps, (deadlines,).

    ``brought``: the share of all gradients; ``gain``: how much more gradient per second than with waiting for all
    ranks (0.1: a tenth more).
    """

    brought: Tensor
    gain: Tensor

    def value(self, price: float) -> Tensor:
        """The gain, less the price of what is dropped."""
        return self.gain - price * (1 - self.brought)


def outcomes(
    steps: StepTimes,
    tau_s: Tensor,
    after_quorum_s: Tensor,
    rules: StopRules,
    parts: Sequence[int] = (),
    *,
    whole_parts: bool = False,
) -> Outcomes:
    """What comes of deadlines of ``tau_s`` seconds that leave ``after_quorum_s`` after a quorum, both (deadlines,).

    With ``parts``, the last units are stages, and a running micro-batch before them comes in steadily after its forward
    pass. ``whole_parts``: of a running stage, which comes in this many parts, the running part still counts. For a
    choice it does not: the seconds that it takes would cost nothing.
    """
    rules = replace(rules, after_quorum_s=after_quorum_s.to(steps.unit_s).view(-1, 1, 1))
    would = simulate_step(steps.unit_s, tau_s.unsqueeze(1), rules, steps.entered_s)
    of_ranks = steps.unit_share.sum(-1).repeat(len(tau_s), 1, 1)
    of_ranks[would.late] = _brought_by_late(steps, would, rules, parts, whole_parts)
    brought = of_ranks.mean((1, 2)).clamp(max=1.0)
    step_s = (would.seconds + steps.overhead_s).mean(1)
    return Outcomes(brought, brought * (steps.waiting_s + steps.overhead_s).mean() / step_s - 1)


def _brought_by_late(
    steps: StepTimes, would: SimulatedStep, rules: StopRules, parts: Sequence[int], whole_parts: bool
) -> Tensor:
    """What each late rank brings, (late ranks,): nothing is computed for the others, which are most."""
    late, first_stage = would.late, steps.unit_s.shape[-1] - len(parts)
    unit_s, unit_share = (value.expand(would.reached.shape)[late] for value in (steps.unit_s, steps.unit_share))
    if rules.finish_running or rules.drop_all:
        return (would.reached[late] * unit_share).sum(-1)
    part = part_computed(unit_s, would.own_s[late].unsqueeze(-1), _silent(first_stage, unit_s) if parts else None)
    if whole_parts:
        part[:, first_stage:] = (part[:, first_stage:] * torch.tensor(parts)).ceil() / torch.tensor(parts)
    return (part * unit_share).sum(-1)


def _silent(first_stage: int, unit_s: Tensor) -> Tensor:
    """`part_computed`'s ``silent``, if units before ``first_stage`` do not come in stages."""
    silent = torch.zeros(unit_s.shape[-1], dtype=unit_s.dtype)
    silent[:first_stage] = _FORWARD
    silent[0] = 1.0
    return silent
