"""Thresholds, and what comes of each of them in recorded steps: by DropCompute's rule, or by a model of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from straggle.policies.history import History
from straggle.policies.step_model import StopRules, computed_share, simulate_step
from straggle.policies.untruncated import untruncated_entries, untruncated_times

_CANDIDATES = 200  # thresholds that are looked at
_SIMULATED = 50  # where each is simulated
_FIRST_UNIT = 5  # none before any rank has finished this one (from 0)
_FORWARD = 1 / 3  # of a micro-batch's time, in which no gradient comes
_PARTS = 4  # of a stage that are looked at, at most


@dataclass(frozen=True)
class Threshold:
    """``tau_s`` and what is expected of it: the share ``dropped``, and the ``gain`` (0.1: a tenth more per second).

    ``after_quorum_s``: seconds for which a rank is not late after a quorum has finished. ``hears``: it is that of one
    step only, in which a rank is heard out of which nothing is known.
    """

    tau_s: float
    dropped: float
    gain: float
    after_quorum_s: float = 0.0
    hears: bool = False


@dataclass(frozen=True)
class StepTimes:
    """Recorded steps as they would have been with no rank late.

    ``unit_s``, (steps, ranks, units): seconds from entering the step to the end of each unit of work; not finite where
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

    def last(self, steps: int) -> StepTimes:
        """The last ``steps`` of them."""
        return StepTimes(**{name: value[-steps:] for name, value in vars(self).items()})

    def in_parts(self, parts: Sequence[int]) -> StepTimes:
        """The same in finer units, where the last ``len(parts)`` of them are stages that come in so many parts.

        No unit is cut into more than four. Of a micro-batch before the stages the parts come after its forward pass.
        The first stage stays whole, because how much of its time is a forward pass is not known.
        """
        if not (0 < len(parts) <= (units := self.unit_s.shape[-1])):
            return self
        first_stage = units - len(parts)
        number = [_PARTS] * first_stage + [1] + [min(_PARTS, own) for own in parts[1:]]
        silent = [_FORWARD] * first_stage + [0.0] * len(parts)
        done = [
            own + (1 - own) * (part + 1) / count
            for count, own in zip(number, silent, strict=True)
            for part in range(count)
        ]
        counts = torch.tensor(number)
        begin_s = torch.cat([torch.zeros_like(self.unit_s[..., :1]), self.unit_s[..., :-1]], -1)
        begin_s, end_s, share = (
            value.repeat_interleave(counts, -1) for value in (begin_s, self.unit_s, self.unit_share / counts)
        )
        unit_s = begin_s + (end_s - begin_s) * torch.tensor(done, dtype=end_s.dtype)
        return replace(self, unit_s=unit_s.where(end_s.isfinite(), end_s), unit_share=share)

    @staticmethod
    def entered_at_once(unit_s: Tensor, overhead_s: Tensor) -> StepTimes:
        """Steps that all ranks enter when they begin, for which no quorum is needed, of equal units."""
        at_once = torch.zeros_like(unit_s[..., 0])
        return StepTimes(unit_s, torch.full_like(unit_s, 1 / unit_s.shape[-1]), at_once, overhead_s, at_once[:, 0])

    @staticmethod
    def of(history: History, quorum: Callable[[int], int]) -> StepTimes | None:
        """The steps whose progress a policy sees; ``None`` where no rank entered any of them, or had data.

        ``quorum``: how many ranks that is, of so many members.
        """
        progress = history.progress
        if progress is None or len(progress.unit_s) == 0:
            return None
        compute_s, idle = history.compute_s[-len(progress.unit_s) :], progress.weight == 0
        if compute_s.isnan().all():  # all were absent or stood in for: there is no time to choose from
            return None
        used = (progress.unit_share > 0).flatten(0, 1).any(0)
        # what a rank without data does is nothing that could be dropped or waited for
        unit_s = untruncated_times(progress, compute_s.nan_to_num(0.0)).masked_fill(idle.unsqueeze(-1), 0.0)
        mean_weight = progress.weight.mean(1, keepdim=True).clamp(min=1e-12)
        share = progress.unit_share * (progress.weight / mean_weight).unsqueeze(-1)
        members = ~progress.entered_s.isnan()
        entered_s = untruncated_entries(progress, compute_s)
        quorum_s = quorum_times(entered_s + unit_s[..., -1], members, quorum)
        steps = StepTimes(unit_s[..., used], share[..., used], entered_s, progress.overhead_s, quorum_s)
        worked = ~idle.all(1)
        return StepTimes(**{name: value[worked] for name, value in vars(steps).items()}) if worked.any() else None


def quorum_times(end_s: Tensor, members: Tensor, quorum: Callable[[int], int]) -> Tensor:
    """When a quorum has finished, (steps,), of ranks that finish at ``end_s``, (steps, ranks).

    ``members``, of the same shape, says which of them take part in the step; ``quorum(number)`` is how many of these.
    A step without any has a quorum at its begin.
    """
    ordered = end_s.masked_fill(~members, math.inf).sort(1).values
    numbers = members.sum(1)
    wanted = {number: min(max(1, quorum(number)), number) for number in set(numbers.tolist())}
    places = torch.tensor([wanted[number] for number in numbers.tolist()]).unsqueeze(1)
    return ordered.gather(1, (places - 1).clamp(min=0)).where(places > 0, 0.0).squeeze(1)


@dataclass(frozen=True)
class Outcomes:
    """What comes of each of the thresholds ``tau``, in seconds, in recorded steps.

    ``brought`` and ``step_s``, (steps, thresholds): the share of all gradients, and the step's seconds. ``waiting_s``,
    (steps, 1): those with waiting for all.
    """

    tau: Tensor
    brought: Tensor
    step_s: Tensor
    waiting_s: Tensor

    def best(self, least_gain: float, noise: float | None) -> Threshold:
        """The one with the most gradient per second, as `choose_threshold` has it."""
        gains = (self.brought * self.waiting_s / self.step_s - 1).nan_to_num(-1.0)
        gain, last = gains.mean(0), len(self.tau) - 1
        best = last - int(gain.flip(0).argmax())
        if noise is not None:
            best = longest_alike(gains, best, noise)
        best = best if gain[best] >= least_gain else last
        return Threshold(float(self.tau[best]), float(1 - self.brought.mean(0)[best]), float(gain[best]))


def choose_threshold(
    steps: StepTimes,
    *,
    grace_s: float = 0.0,
    longest_s: float | None = None,
    least_gain: float = -math.inf,
    noise: float | None = None,
    waits_until_tau: bool = False,
) -> Threshold:
    """The threshold with the largest mean effective speedup over recorded steps.

    ``longest_s``: the last threshold to look at, the longest time if not given; it is chosen too where the largest
    speedup is less than ``least_gain``. ``noise``: of those that are behind the best one by no more than this many
    standard errors (over steps, of the difference), the longest is chosen. A rank that has not entered ``grace_s``
    seconds after the threshold is stood in for.

    With ``A = unit_s``, ``R_i = max A_i + overhead_i``, ``gain_i = max A_i - (largest A_i < tau)``, ``d_i`` the share
    of ``A_i >= tau``: it maximizes ``mean_i[(1 - d_i) / (1 - gain_i / R_i) - 1]`` over 200 values of ``tau``; of
    equals, it takes the longest. Source: Giladi et al., "DropCompute" (NeurIPS 2023), section 4 and algorithm 2.
    With ``entered_s``, ``A + entered_s`` takes the place of ``A`` in ``R`` and ``gain``, and a rank that is stood in
    for brings nothing. The rule ends a late rank's step with the last unit that it finished; ``waits_until_tau`` ends
    it ``tau`` after it entered, as it is where a rank computes on until it is stopped.
    """
    return by_the_rule(steps, grace_s, longest_s, waits_until_tau).best(least_gain, noise)


def by_the_rule(
    steps: StepTimes, grace_s: float = 0.0, longest_s: float | None = None, waits_until_tau: bool = False
) -> Outcomes:
    """What comes of 200 thresholds by DropCompute's rule (`choose_threshold`)."""
    own_s = steps.unit_s.nan_to_num(math.inf, posinf=math.inf)
    tau = _candidates(own_s.where(steps.unit_share > 0, math.inf), longest_s, _CANDIDATES)
    needs_s = _needed(own_s, steps, grace_s)
    ordered, order = needs_s.flatten(1).sort(dim=1)
    kept = steps.unit_share.flatten(1).gather(1, order).cumsum(1) / own_s.shape[1]
    count = torch.searchsorted(ordered, tau.expand(len(own_s), -1).contiguous())
    last = (count - 1).clamp(min=0)
    reached = kept.gather(1, last).where(count > 0, 0.0)
    end_s = (own_s + steps.entered_s.unsqueeze(-1)).flatten(1)
    end_s = end_s.where(end_s.isfinite(), -math.inf)
    whole_s = end_s.amax(1, keepdim=True)
    ended_s = end_s.gather(1, order).cummax(1).values.gather(1, last).where(count > 0, 0.0)
    if waits_until_tau:
        ended_s = torch.maximum(ended_s, torch.minimum(_stopped_at(tau, needs_s.amax(2), steps, grace_s), whole_s))
    overhead_s = steps.overhead_s.unsqueeze(1).to(own_s)
    return Outcomes(tau, reached, ended_s + overhead_s, whole_s + overhead_s)


def by_running_units(steps: StepTimes, rules: StopRules, longest_s: float) -> Outcomes:
    """What comes of 50 thresholds where a late rank first finishes its running micro-batch.

    The rule has it end with the one before. So by the rule a threshold in the middle of a micro-batch is as good as one
    at its begin, but the rank computes until its end.
    """
    own_s = steps.unit_s.nan_to_num(math.inf, posinf=math.inf)
    tau = _candidates(own_s.where(steps.unit_share > 0, math.inf), longest_s, _SIMULATED)
    done = [simulate_step(own_s, float(one_s), rules, steps.entered_s) for one_s in tau]
    brought = torch.stack([(one.reached * steps.unit_share).sum(-1).mean(1) for one in done], 1)
    end_s = steps.end_s.nan_to_num(0.0)
    whole_s = end_s.where(end_s.isfinite(), 0.0).amax(1, keepdim=True)
    overhead_s = steps.overhead_s.unsqueeze(1).to(own_s)
    step_s = torch.stack([one.seconds for one in done], 1)
    return Outcomes(tau, brought, torch.minimum(step_s, whole_s) + overhead_s, whole_s + overhead_s)


def longest_alike(gains: Tensor, best: int, noise: float) -> int:
    """The last threshold whose gains (steps, thresholds) are behind those of the ``best`` by no more than noise."""
    behind = gains[:, best : best + 1] - gains
    error = behind.std(0, correction=0) / max(1, len(gains) - 1) ** 0.5
    return int((behind.mean(0) <= noise * error + 1e-9).nonzero().max())


def _candidates(own_s: Tensor, longest_s: float | None, number: int) -> Tensor:
    """So many thresholds, from the first useful one to the longest."""
    shortest = float(own_s[..., min(_FIRST_UNIT, own_s.shape[-1] - 1) :].min())
    if longest_s is None:
        if not own_s.isfinite().any():
            raise ValueError("unit_s has no finite time: there is no threshold to choose")
        longest_s = float(own_s[own_s.isfinite()].max())
    return torch.linspace(min(shortest, longest_s), longest_s, number, dtype=own_s.dtype)


def _needed(own_s: Tensor, steps: StepTimes, grace_s: float) -> Tensor:
    """For each unit (steps, ranks, units), the threshold above which it comes in."""
    begin_s, quorum_s = steps.entered_s.unsqueeze(-1).to(own_s), steps.quorum_s.view(-1, 1, 1).to(own_s)
    to_finish_s = own_s.where((own_s + begin_s > quorum_s) | own_s.isinf(), 0.0)
    to_enter_s = (begin_s - grace_s).where(begin_s > quorum_s + grace_s, 0.0)
    return torch.maximum(to_finish_s, to_enter_s)


def _stopped_at(tau: Tensor, needs_s: Tensor, steps: StepTimes, grace_s: float) -> Tensor:
    """When the last late rank is stopped, or stood in for, at each ``tau`` (steps, thresholds); 0 where no rank is.

    ``needs_s`` (steps, ranks): above which threshold a rank is in time.
    """
    begin_s, quorum_s = steps.entered_s.to(needs_s), steps.quorum_s.unsqueeze(1).to(needs_s)
    ordered, order = needs_s.sort(dim=1)
    last_s = begin_s.gather(1, order).flip(1).cummax(1).values.flip(1)  # the last to enter of those from each one on
    first_late = torch.searchsorted(ordered, tau.expand(len(needs_s), -1).contiguous())
    last_s = last_s.gather(1, first_late.clamp(max=needs_s.shape[1] - 1))
    stood_in_s = torch.maximum(tau, quorum_s) + grace_s
    stopped_s = torch.maximum(tau + last_s, quorum_s)
    # where that one is stood in for, it may be another that is stopped last: such steps are few
    for step in (last_s > stood_in_s).any(1).nonzero().flatten().tolist():
        of_each = torch.maximum(tau.unsqueeze(1) + begin_s[step], quorum_s[step])
        enters = begin_s[step] <= stood_in_s[step].unsqueeze(1)
        of_each = of_each.where(enters, stood_in_s[step].unsqueeze(1)).where(tau.unsqueeze(1) <= needs_s[step], 0.0)
        stopped_s[step] = of_each.amax(1)
    return stopped_s.where(first_late < needs_s.shape[1], 0.0)


@dataclass(frozen=True)
class Expected:
    """What is expected of a threshold: the share of all gradients that is ``brought``, and the mean step's seconds."""

    brought: float
    step_s: float

    def gain_over(self, other: Expected) -> float:
        """How much more gradient per second than with another one; 0.1: a tenth more."""
        if not other.brought * self.step_s > 0:
            return 0.0
        return self.brought / other.brought * other.step_s / self.step_s - 1


def expected(steps: StepTimes, one: Threshold, rules: StopRules, parts: Sequence[int] = ()) -> Expected:
    """What comes of a threshold in recorded steps, with its time after a quorum; ``parts`` as in `expected_drop`."""
    rules = replace(rules, after_quorum_s=one.after_quorum_s)
    would = simulate_step(steps.unit_s, one.tau_s, rules, steps.entered_s)
    step_s = float((would.seconds + steps.overhead_s).mean())
    return Expected(1 - expected_drop(steps, one.tau_s, rules, parts), step_s)


def expected_drop(steps: StepTimes, tau_s: float, rules: StopRules, parts: Sequence[int] = ()) -> float:
    """The share of all gradients that is dropped with a deadline of ``tau_s`` seconds.

    With ``parts``, the last units are stages, and each comes in this many parts. The part that is being computed
    still counts. A running micro-batch before them comes in steadily after its forward pass.
    """
    first_stage = steps.unit_s.shape[-1] - len(parts)
    would = simulate_step(steps.unit_s, tau_s, rules, steps.entered_s)
    part = computed_share(steps.unit_s, would, rules, _silent(first_stage, steps.unit_s) if parts else None)
    if parts:
        part[..., first_stage:] = (part[..., first_stage:] * torch.tensor(parts)).ceil() / torch.tensor(parts)
    return max(0.0, float(1 - (part * steps.unit_share).sum(-1).mean()))


def _silent(first_stage: int, unit_s: Tensor) -> Tensor:
    """`part_computed`'s ``silent``, where units before ``first_stage`` do not come in stages."""
    silent = torch.zeros(unit_s.shape[-1], dtype=unit_s.dtype)
    silent[:first_stage] = _FORWARD
    silent[0] = 1.0
    return silent
