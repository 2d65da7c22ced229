"""The deadline that makes most of the ranks' own times: DropCompute's rule, on stages as well as on micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from torch import Tensor

from straggle.policies.deadline import Deadline, LateHandling, NextDeadline, check_count, check_number, quantile_of
from straggle.policies.dealt import SETTLED, steps_since_dealt
from straggle.policies.history import History
from straggle.policies.ordinary import common_variance, differences, lag_that_drops, one_stands_out, vary_together
from straggle.policies.price import CLEARLY, HIGH, HIGHEST, LOW, pays
from straggle.policies.promise import kept
from straggle.policies.step_model import StopRules, computed_share, simulate_step
from straggle.policies.untruncated import untruncated_entries, untruncated_times

_CANDIDATES = 200  # thresholds that are looked at
_FIRST_UNIT = 5  # none before any rank has finished this one (from 0)
_FORWARD = 1 / 3  # of a micro-batch's time, in which no gradient comes
_NOISE = 1.0  # standard errors by which a shorter threshold must be better
_BUSY = 0.1  # this quantile over steps is that of a machine without other work
_AT_FIRST = 10  # first steps: AutoDeadline chooses in each
_LONGER = 1.5  # windows that show how ranks vary: in one, independent ranks too often seem to share a machine
_ORDINARY = 0.05  # gain from which on gradients are dropped where no rank is slow, but each varies by itself
_LITTLE = 0.005  # of all gradients: as much may be dropped for what ranks are behind a quorum now and then


@dataclass(frozen=True)
class Threshold:
    """``tau_s`` and what is expected of it: the share ``dropped``, and the ``gain`` (0.1: a tenth more per second).

    ``after_quorum_s``: seconds for which a rank is not late after a quorum has finished.
    """

    tau_s: float
    dropped: float
    gain: float
    after_quorum_s: float = 0.0


@dataclass(frozen=True)
class StepTimes:
    """Recorded steps as they would have been with no rank late.

    ``unit_s``, (steps, ranks, units): seconds from entering the step to the end of each unit of work; not finite where
    a unit never ends. ``unit_share``, of the same shape: the share of a rank's gradient that it brings, of a mean of 1
    over ranks. ``entered_s``, (steps, ranks): seconds from the step's begin to entering it. ``overhead_s``, (steps,):
    seconds of the step after its slowest rank's work. ``quorum_s``, (steps,): when a quorum waits, from the step's
    begin; no rank is stopped before.
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
        of_others = idle.shape[1] / (~idle).sum(1).clamp(min=1)
        share = (progress.unit_share * of_others.view(-1, 1, 1)).masked_fill(idle.unsqueeze(-1), 0.0)
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
    numbers = members.sum(1).tolist()
    wanted = [min(max(1, quorum(number)), number) for number in numbers]
    times = [0.0 if not place else float(row[place - 1]) for row, place in zip(ordered, wanted, strict=True)]
    return torch.tensor(times, dtype=end_s.dtype)


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
    own_s = steps.unit_s.nan_to_num(math.inf, posinf=math.inf)
    tau = _candidates(own_s.where(steps.unit_share > 0, math.inf), longest_s)
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
    step_s = whole_s + steps.overhead_s.unsqueeze(1).to(own_s)
    gains = (reached / (1 - (whole_s - ended_s) / step_s) - 1).nan_to_num(-1.0)
    gain = gains.mean(0)
    best = len(tau) - 1 - int(gain.flip(0).argmax())
    if noise is not None:
        best = longest_alike(gains, best, noise)
    best = best if gain[best] >= least_gain else len(tau) - 1
    return Threshold(float(tau[best]), float(1 - reached.mean(0)[best]), float(gain[best]))


def choose_for(
    steps: StepTimes,
    rules: StopRules,
    *,
    longest_s: float,
    least_gain: float,
    noise: float = _NOISE,
    price: float = LOW,
    waits: bool = False,
) -> Threshold:
    """`AutoDeadline`'s choice: the longest threshold unless a rank is slow as such and a shorter one pays (`pays`).

    Where ranks vary, each by itself (``price`` is `LOW`), one that gains much (`_ORDINARY`) is taken, too. With
    ``waits`` it is the longest in any case. Then no rank is late by what ranks are behind a quorum (`after_quorum_s`).
    So where all are slow at once, as on a busy machine, what is dropped is what a slow rank leaves, and not the
    ordinary difference between ranks.
    """
    seen = differences(steps.end_s, steps.quorum_s, steps.overhead_s)
    longest = Threshold(longest_s, 0.0, 0.0, after_quorum_s(steps, rules, longest_s, seen.lag_s, max(price, HIGH)))
    if waits or not (seen.any_slow or price == LOW):
        return longest
    chosen = choose_threshold(
        steps,
        grace_s=rules.grace_s,
        longest_s=longest_s,
        least_gain=least_gain,
        noise=noise,
        waits_until_tau=not rules.finish_running,
    )
    least_gain = max(least_gain, 0.0 if seen.any_slow else _ORDINARY)
    worth_it = chosen.gain >= least_gain and pays(chosen.gain, chosen.dropped, price)
    return chosen if worth_it and chosen.tau_s < longest_s else longest


def price_of(steps: StepTimes, *, dealt: bool) -> float:
    """What a dropped gradient must bring: much where little but noise is left to be late."""
    if common_variance(steps.end_s) >= CLEARLY and not one_stands_out(steps.end_s, steps.quorum_s):
        return HIGHEST
    return HIGH if dealt or vary_together(steps.end_s) else LOW


def after_quorum_s(steps: StepTimes, rules: StopRules, longest_s: float, lag_s: float, price: float) -> float:
    """How long after a quorum no rank is late with the longest threshold.

    It is as long as ranks ordinarily are behind (``lag_s``), and at least what the longest threshold leaves after a
    quorum in most steps. Where that drops more than a little, and the seconds that are saved do not bring the ``price``
    of it, it is as long as drops little.
    """
    lag_s = max(lag_s, longest_s - quantile_of(steps.quorum_s, 0.5))
    with_lag = replace(rules, after_quorum_s=lag_s)
    dropped = expected_drop(steps, longest_s, with_lag)
    if dropped <= _LITTLE:
        return lag_s
    waiting_s = (steps.end_s.nan_to_num(0.0).amax(1) + steps.overhead_s).mean()
    step_s = (simulate_step(steps.unit_s, longest_s, with_lag, steps.entered_s).seconds + steps.overhead_s).mean()
    if pays(float((1 - dropped) * waiting_s / step_s - 1), dropped, price):
        return lag_s
    needs_s = steps.unit_s + (steps.entered_s - steps.quorum_s.unsqueeze(1)).unsqueeze(-1)
    in_time = steps.unit_s <= longest_s
    return max(lag_s, lag_that_drops(_LITTLE, needs_s.masked_fill(in_time, 0.0), steps.unit_share))


def longest_alike(gains: Tensor, best: int, noise: float) -> int:
    """The last threshold whose gains (steps, thresholds) are behind those of the ``best`` by no more than noise."""
    behind = gains[:, best : best + 1] - gains
    error = behind.std(0, correction=0) / max(1, len(gains) - 1) ** 0.5
    return int((behind.mean(0) <= noise * error + 1e-9).nonzero().max())


def _usual_s(compute_s: Tensor) -> float:
    """The median rank's time in a step, (steps, ranks) given, in which the machine is not busy with other work.

    Where all ranks are slow at once, none is late: no rank is before a quorum waits. A deadline that followed such
    steps would be far too long for a rank that is stuck in the step after them.
    """
    return quantile_of(compute_s.nanmedian(dim=1).values, _BUSY)


def _candidates(own_s: Tensor, longest_s: float | None) -> Tensor:
    """Thresholds from the first useful one to the longest."""
    shortest = float(own_s[..., min(_FIRST_UNIT, own_s.shape[-1] - 1) :].min())
    if longest_s is None:
        if not own_s.isfinite().any():
            raise ValueError("unit_s has no finite time: there is no threshold to choose")
        longest_s = float(own_s[own_s.isfinite()].max())
    return torch.linspace(min(shortest, longest_s), longest_s, _CANDIDATES, dtype=own_s.dtype)


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


@final
class AutoDeadline(Deadline):
    """The threshold of DropCompute's rule (`choose_threshold`) over the last ``window`` steps, chosen again and again.

    It weighs what is dropped against the seconds that are saved, on the clock that it is enforced by. A late rank is
    waited for until the threshold, and not until its last unit before, as the rule has it for micro-batches. It takes
    the longest threshold where no rank is slow as such, that is where ranks that need more than 1.4 times as long as a
    quorum cost less than 3 % of the steps' time; where each rank varies by itself, unless a shorter one gains 5 %. It
    takes it, too, where the best one promises less than ``least_gain`` (0.01: a hundredth more gradient per second), or
    less than the price of what it drops: 0.3 times it, or three times it where work is dealt out by speed
    (`Rebalance`, `Step.pull`) or all ranks share a busy machine (`vary_together`), or five times where none stands out
    there (`price_of`; how ranks vary is seen over 1.5 times ``window`` steps). The longest is ``max_over_median`` times
    the median rank's time in a quick step (the quickest tenth). So a rank that was never slow before and stalls is not
    waited for either. With it, no rank is late by what ranks are behind a quorum now and then (`after_quorum_s`),
    however slow all of them are at once. It takes the longest, too, where what was dropped in the last ``window`` steps
    did not bring that much: gradient per second as it came, against waiting in the same steps (`kept`). Of thresholds
    that differ by no more than noise (one standard error), it takes the longest. ``every``: steps between two choices;
    in its first ten steps it chooses in each. Where work is dealt out by speed, it begins again when shares change:
    times from before are not those of the new shares (`steps_since_dealt`). It predicts what the last choice is
    expected to drop.
    """

    wants_progress = True

    def __init__(
        self,
        *,
        window: int = 50,
        warmup_steps: int = 2,
        every: int = 25,
        least_gain: float = 0.01,
        max_over_median: float = 1.4,
    ) -> None:
        check_count("window", window, least=1)
        check_count("warmup_steps", warmup_steps, least=1)
        check_count("every", every, least=1)
        check_number("least_gain", least_gain, least=0, such_as="0.01 for a hundredth")
        check_number("max_over_median", max_over_median, above=1, such_as="1.4 for 1.4 times the median time")
        self._seen, self._longer = window, int(_LONGER * window)  # steps, for a choice and for its price
        self.window = self._longer + every - 1  # those since the last choice are not looked at
        self.warmup_steps = warmup_steps
        self.every = every
        self.least_gain = least_gain
        self.max_over_median = max_over_median
        self.chosen: Threshold | None = None
        self._chosen_at = -1
        self._late_handling = LateHandling()
        self._parts: Sequence[int] = ()

    def prepare(self, late_handling: LateHandling, parts: Sequence[int] = ()) -> None:
        self._late_handling = late_handling
        self._parts = parts if late_handling.granularity == "stage" else ()

    def decide(self, history: History) -> NextDeadline:
        if history.num_steps < self.warmup_steps or history.progress is None:
            return NextDeadline(math.inf)
        dealt = steps_since_dealt(history.progress.weight)
        number = history.num_steps - self.warmup_steps if dealt is None else dealt - SETTLED
        since = min(number % self.every, max(0, number - _AT_FIRST + 1))  # steps since the last choice
        if self.chosen is None or history.num_steps - since != self._chosen_at:
            self._chosen_at = history.num_steps - since
            most = history.num_steps if dealt is None else dealt - since
            seen, longer = (history.last(min(steps, most), before=since) for steps in (self._seen, self._longer))
            self.chosen = self._choose(seen, longer)
        return NextDeadline(self.chosen.tau_s, self.chosen.dropped, self.chosen.after_quorum_s)

    def _choose(self, history: History, longer: History) -> Threshold:
        ranks, entered_s = history.compute_s.shape[1], history.progress.entered_s if history.progress else None
        members = None if entered_s is None or not len(entered_s) else int((~entered_s[-1].isnan()).sum())
        rules = StopRules.of(self, self._late_handling, ranks, members)
        quorum = partial(self._late_handling.quorum_among, wanted=self.quorum)
        steps, more = StepTimes.of(history, quorum), StepTimes.of(longer, quorum)
        longest_s = self.max_over_median * _usual_s(history.compute_s)
        if steps is None or not longest_s < math.inf:  # no rank came to a step that is seen
            return Threshold(math.inf, 0.0, 0.0)
        price = price_of(more or steps, dealt=history.dealt)
        waits = self._broken(history, price)
        chosen = choose_for(steps, rules, longest_s=longest_s, least_gain=self.least_gain, price=price, waits=waits)
        rules = replace(rules, after_quorum_s=chosen.after_quorum_s)
        return replace(chosen, dropped=expected_drop(steps, chosen.tau_s, rules, self._parts))

    def _broken(self, history: History, price: float) -> bool:
        """Whether what was dropped in these steps brought less than it should have.

        Where ranks vary by themselves it was worth it if it was a gain: with as much gradient per second there are more
        steps. Elsewhere it must have brought its price, because what is dropped for noise seems to pay now and then.
        """
        progress = history.progress
        assert progress is not None
        compute_s = history.compute_s[-len(progress.unit_s) :]
        unit_s = untruncated_times(progress, compute_s.nan_to_num(0.0)).nan_to_num(0.0)
        waiting_s = (untruncated_entries(progress, compute_s) + unit_s.amax(-1)).amax(1)
        return kept(progress, compute_s, waiting_s).broken(self.least_gain, price if price > LOW else 0.0)
