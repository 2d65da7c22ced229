"""The deadline that makes most of the ranks' own times: DropCompute's rule, on stages as well as on micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from straggle.deadline import Deadline, Patience, check_count, quantile_of
from straggle.history import History, Progress

_FIRST_UNIT = 5  # thresholds before any rank has finished this one (from 0) are not looked at
_FORWARD = 1 / 3  # of a micro-batch's time, in which no gradient comes


@dataclass(frozen=True)
class Threshold:
    """``tau_s`` and what is expected of it: the share ``dropped``, and the ``gain`` (0.1: a tenth more per second)."""

    tau_s: float
    dropped: float
    gain: float


def choose_threshold(
    unit_s: Tensor,
    overhead_s: Tensor,
    *,
    entered_s: Tensor | None = None,
    unit_share: Tensor | None = None,
    not_before_s: Tensor | None = None,
    longest_s: float | None = None,
    waits_until_tau: bool = False,
    num_candidates: int = 200,
) -> Threshold:
    """The threshold with the largest mean effective speedup over recorded steps.

    ``unit_s``, (steps, ranks, units): seconds from entering the step to the end of each unit of work; not finite where
    a unit never ends. ``overhead_s``, (steps,): seconds of each step after its slowest rank's work. ``entered_s``,
    (steps, ranks): seconds from the step's begin to entering it, 0 if not given. ``unit_share``: the share of a rank's
    gradient that each unit brings, equal if not given. ``not_before_s``, (steps,), from the step's begin: nobody is
    stopped before, because no quorum waits. ``longest_s``: the last threshold to look at, the longest time if not
    given.

    With ``A = unit_s``, ``R_i = max A_i + overhead_i``, ``gain_i = max A_i - (largest A_i < tau)``, ``d_i`` the share
    of ``A_i >= tau``: it maximizes ``mean_i[(1 - d_i) / (1 - gain_i / R_i) - 1]`` over ``num_candidates`` of ``tau``;
    of equals, it takes the longest. Source: Giladi et al., "DropCompute" (NeurIPS 2023), section 4 and algorithm 2.
    With ``entered_s``, ``A + entered_s`` takes the place of ``A`` in ``R`` and ``gain``, and a rank that has not
    entered by ``tau`` brings nothing. The rule ends a late rank's step with the last unit that it finished;
    ``waits_until_tau`` ends it ``tau`` after it entered, as it is where a rank computes on until it is stopped.
    """
    steps, ranks, units = unit_s.shape
    share = torch.full_like(unit_s, 1 / units) if unit_share is None else unit_share
    begin_s = unit_s.new_zeros(steps, ranks, 1) if entered_s is None else entered_s.to(unit_s).unsqueeze(-1)
    quorum_s = unit_s.new_zeros(steps, 1, 1) if not_before_s is None else not_before_s.to(unit_s).view(-1, 1, 1)
    own_s = unit_s.nan_to_num(math.inf, posinf=math.inf)
    past = own_s[..., min(_FIRST_UNIT, units - 1) :]
    if not past.isfinite().any():
        return Threshold(math.inf, 0.0, 0.0)
    shortest, longest = float(past.min()), float(own_s[own_s.isfinite()].max()) if longest_s is None else longest_s
    candidates = torch.linspace(shortest, max(shortest, longest), num_candidates, dtype=own_s.dtype)
    tau = candidates.expand(steps, -1)
    end_s = own_s + begin_s
    # each unit comes in with a tau above this
    needs_s = torch.where(begin_s <= quorum_s, own_s, torch.maximum(own_s, begin_s))
    needs_s = needs_s.where((end_s > quorum_s) | end_s.isinf(), 0.0)
    ordered, order = needs_s.reshape(steps, -1).sort(dim=1)
    kept = share.reshape(steps, -1).gather(1, order).cumsum(1) / ranks
    count = torch.searchsorted(ordered, tau.contiguous())
    last = (count - 1).clamp(min=0)
    some = count > 0
    reached = kept.gather(1, last).where(some, 0.0)
    known_s = end_s.where(end_s.isfinite(), -math.inf).reshape(steps, -1)
    whole_s = known_s.amax(1, keepdim=True)
    ended_s = known_s.gather(1, order).cummax(1).values.gather(1, last).where(some, 0.0)
    if waits_until_tau:
        stopped_s = _stopped_at(tau, needs_s.amax(2), begin_s.squeeze(2), quorum_s.squeeze(2))
        ended_s = torch.maximum(ended_s, torch.minimum(stopped_s, whole_s))
    step_s = whole_s + overhead_s.unsqueeze(1).to(own_s)
    gain = (reached / (1 - (whole_s - ended_s) / step_s) - 1).nan_to_num(-1.0).mean(0)
    best = num_candidates - 1 - int(gain.flip(0).argmax())
    return Threshold(float(candidates[best]), float(1 - reached.mean(0)[best]), float(gain[best]))


def _stopped_at(tau: Tensor, needs_s: Tensor, begin_s: Tensor, quorum_s: Tensor) -> Tensor:
    """When the last late rank is stopped, or stood in for, at each ``tau`` (steps, thresholds); 0 where nobody is late.

    ``needs_s`` and ``begin_s`` (steps, ranks), ``quorum_s`` (steps, 1): see `choose_threshold`.
    """
    if not begin_s.any():
        return torch.maximum(tau, quorum_s).where(tau <= needs_s.amax(1, keepdim=True), 0.0)
    tau, begin_s, needs_s = tau.unsqueeze(2), begin_s.unsqueeze(1), needs_s.unsqueeze(1)
    stood_in_s = torch.maximum(tau, quorum_s.unsqueeze(2))
    stopped_s = torch.maximum(stood_in_s, tau + begin_s).where(begin_s <= stood_in_s, stood_in_s)
    return stopped_s.where(tau <= needs_s, 0.0).amax(2)


def whole_times(progress: Progress, compute_s: Tensor) -> Tensor:
    """``progress.unit_s`` with the times that a late rank would have taken for what it did not finish.

    They are its peers' typical times, times how much longer than they it took for what it did finish. NaN where a rank
    did not enter a step. Of many steps, unit by unit; `telemetry.Table.whole_times` and `whatif.WaitForAllPrediction`
    tell a whole step's time from that step alone.
    """
    unit_s = progress.unit_s
    begin_s = torch.cat([torch.zeros_like(unit_s[..., :1]), unit_s[..., :-1]], -1)
    used = progress.unit_share > 0
    spent_s = (unit_s - begin_s).where(used, math.nan)
    typical_s = spent_s.flatten(0, 1).nanmedian(0).values.nan_to_num(0.0)
    slowness = (spent_s / typical_s.clamp(min=1e-9)).transpose(0, 1).flatten(1).nanmedian(1).values.nan_to_num(1.0)
    expected_s = typical_s * slowness.unsqueeze(1)  # (ranks, units)
    filled, before = unit_s.clone(), torch.zeros_like(unit_s[..., 0])
    stopped_s = compute_s.to(unit_s)
    for unit in range(unit_s.shape[-1]):
        own = unit_s[..., unit]
        missing = torch.maximum(before + expected_s[:, unit], stopped_s)  # NaN where the rank never entered
        filled[..., unit] = torch.where(own.isnan(), torch.where(used[..., unit], missing, before), own)
        before = filled[..., unit]
    return filled


def whole_entries(progress: Progress, compute_s: Tensor) -> Tensor:
    """``progress.entered_s`` as it would have been, had nobody been stood in for.

    A rank that never entered had its whole delay in that step: what it still took of it in the following one counts to
    the first.
    """
    never = compute_s.isnan() & (progress.weight > 0)
    entered_s = progress.entered_s.clone()
    for step in range(len(entered_s) - 2, -1, -1):
        more_s, own = entered_s[step + 1].clone(), never[step]
        entered_s[step] += more_s.where(own, 0.0)
        entered_s[step + 1] = more_s.where(~own, 0.0)
    return entered_s


def expected_drop(
    unit_s: Tensor,
    unit_share: Tensor,
    stop_s: Tensor,
    patience: Patience,
    parts: Sequence[int] = (),
) -> float:
    """The share of all gradients that is dropped when ranks are stopped ``stop_s`` seconds after entering.

    ``stop_s`` has the shape (steps,) or (steps, ranks); -inf for a rank that is stood in for and brings nothing.
    The last units are stages, which come in so many ``parts`` each; the one that is being computed still counts, and
    a running micro-batch before them comes in steadily after its forward pass. The very first unit counts when it is
    finished. With micro-batches that are dropped whole, a running one counts where it ends within the grace.
    """
    times, stop = unit_s.nan_to_num(math.inf, posinf=math.inf), stop_s.to(unit_s).view(len(stop_s), -1, 1)
    if patience.granularity == "microbatch":
        begin_s = torch.cat([torch.zeros_like(times[..., :1]), times[..., :-1]], -1)
        part = ((times <= stop) | ((begin_s <= stop) & (times <= stop + patience.grace_s))).to(times)
    elif patience.granularity == "step":
        part = (times <= stop).to(times)
    else:
        part = part_computed(times, stop, _silent(times.shape[-1] - len(parts), times) if len(parts) else None)
        if len(parts):
            whole = times.shape[-1] - len(parts)
            part[..., whole:] = (part[..., whole:] * torch.tensor(parts)).ceil() / torch.tensor(parts)
    return max(0.0, float(1 - (part * unit_share).sum(-1).mean()))


def _silent(num_whole: int, unit_s: Tensor) -> Tensor:
    """`part_computed`'s, where the first so many units are whole micro-batches."""
    silent = torch.zeros(unit_s.shape[-1], dtype=unit_s.dtype)
    silent[:num_whole] = _FORWARD
    silent[0] = 1.0
    return silent


def part_computed(unit_s: Tensor, stop_s: Tensor, silent: Tensor | None = None) -> Tensor:
    """The part of each unit that a rank has computed when it is stopped after ``stop_s`` seconds.

    ``silent`` (units,) is the share of each unit's time before its first gradient is finished, in a forward pass; if it
    is not given, all of the first unit, and nothing of the others.
    """
    if silent is None:
        silent = torch.zeros(unit_s.shape[-1], dtype=unit_s.dtype)
        silent[0] = 1.0
    begin_s = torch.cat([torch.zeros_like(unit_s[..., :1]), unit_s[..., :-1]], -1)
    first_s = begin_s + silent * (unit_s - begin_s)
    part = ((stop_s - first_s) / (unit_s - first_s).clamp(min=1e-9)).clamp(0, 1).where(unit_s > stop_s, 1.0)
    return part.nan_to_num(0.0)


@final
class AutoDeadline(Deadline):
    """The threshold of DropCompute's rule (`choose_threshold`) over the last ``window`` steps, chosen ever anew.

    It weighs what is dropped against the seconds that are saved, on the clock that it is enforced by: a late rank is
    waited for until the threshold, and not, as the rule has it for micro-batches, until its last unit before. Where
    the best threshold promises less than ``least_gain`` (0.01: a hundredth more gradient per second), there is none;
    but nobody has more than ``at_most`` times the median of all ranks' times, so that a rank which was never slow
    before and stalls is not waited for either. ``every``: steps between two choices, but at first it chooses in each of
    so many. ``predicted_drop`` is what the last choice is expected to drop.
    """

    wants_progress = True

    def __init__(
        self,
        *,
        window: int = 50,
        warmup_steps: int = 3,
        every: int = 10,
        least_gain: float = 0.01,
        at_most: float = 2.0,
    ) -> None:
        check_count("window", window, least=1)
        check_count("warmup_steps", warmup_steps, least=1)
        check_count("every", every, least=1)
        if not least_gain >= 0:
            raise ValueError(f"least_gain={least_gain}: must be a number from 0 on, such as 0.01 for a hundredth")
        if not at_most > 1:
            raise ValueError(f"at_most={at_most}: must be more than 1 median time, such as 2")
        self.window = window + every - 1  # those since the last choice are not looked at
        self.warmup_steps = warmup_steps
        self.every = every
        self.least_gain = least_gain
        self.at_most = at_most
        self.chosen: Threshold | None = None
        self._chosen_at = -1
        self._patience = Patience()
        self._parts: Sequence[int] = ()

    def prepare(self, patience: Patience, parts: Sequence[int] = ()) -> None:
        self._patience, self._parts = patience, parts

    def decide(self, history: History) -> float:
        if history.num_steps < self.warmup_steps or history.progress is None:
            return math.inf
        since = history.num_steps - self.warmup_steps
        since = 0 if since < self.every else since % self.every
        if self.chosen is None or history.num_steps - since != self._chosen_at:
            self._chosen_at = history.num_steps - since
            self.chosen = self._choose(history.last(self.window - self.every + 1, before=since))
        self.predicted_drop = self.chosen.dropped
        return self.chosen.tau_s

    def _choose(self, history: History) -> Threshold:
        progress = history.progress
        if progress is None or len(progress.unit_s) == 0:
            return Threshold(math.inf, 0.0, 0.0)
        steps = len(progress.unit_s)
        used = (progress.unit_share > 0).flatten(0, 1).any(0)
        compute_s, finished, idle = history.compute_s[-steps:], history.finished[-steps:], progress.weight == 0
        entered_s = whole_entries(progress, compute_s)
        # what a rank without data does is nothing that could be dropped or waited for
        times = whole_times(progress, compute_s.nan_to_num(0.0)).masked_fill(idle.unsqueeze(-1), 0.0)[..., used]
        of_others = idle.shape[1] / (~idle).sum(1).clamp(min=1)
        share = (progress.unit_share * of_others.view(-1, 1, 1)).masked_fill(idle.unsqueeze(-1), 0.0)[..., used]
        end_s = (entered_s + compute_s).where(finished, math.inf).nan_to_num(math.inf, posinf=math.inf)
        quorum_s = end_s.kthvalue(self._patience.quorum_of(end_s.shape[1]), dim=1).values
        bound_s = self.at_most * quantile_of(history.compute_s, 0.5)
        chosen = choose_threshold(
            times,
            progress.overhead_s,
            entered_s=entered_s,
            unit_share=share,
            not_before_s=quorum_s,
            longest_s=bound_s,
            waits_until_tau=self._patience.granularity != "microbatch",
        )
        tau_s = chosen.tau_s if chosen.gain >= self.least_gain else bound_s
        stood_in = entered_s > quorum_s.clamp(min=tau_s).unsqueeze(1) + self._patience.grace_s
        stop_s = (quorum_s.unsqueeze(1) - entered_s).clamp(min=tau_s).masked_fill(stood_in, -math.inf)
        dropped = expected_drop(times, share, stop_s, self._patience, self._parts)
        return replace(chosen, tau_s=tau_s, dropped=dropped)
