"""The deadline with the most gradient per second in the last steps, less a price for what it drops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from straggle.policies.changed_times import CERTAIN, ChangedTimes
from straggle.policies.deadline import Deadline, LateHandling, NextDeadline, check_count, check_number, quantile_of
from straggle.policies.history import History, Progress
from straggle.policies.price import PRICE, kept, price_of
from straggle.policies.what_if.recorded_steps import StepTimes, outcomes
from straggle.policies.what_if.step_model import StopRules
from straggle.policies.what_if.untruncated import any_unheard

_CANDIDATES = 18  # shorter deadlines that are simulated
_LAGS = 6  # times after a quorum that are simulated with the longest deadline
_BUSY = 0.1  # this quantile over steps is that of a machine without other work
_AT_FIRST = 10  # first steps: AutoDeadline chooses in each
_PROBE_TIMES = 4.0  # times the median rank's time, for a rank of which nothing is known
_SETTLED = 3  # steps with the same weights that make these the ranks' shares


@dataclass(frozen=True)
class Choice:
    """A deadline of ``tau_s`` seconds that leaves ``after_quorum_s`` after a quorum.

    Expected of it are the share ``dropped`` and the ``gain`` (0.1: a tenth more gradient per second). ``is_probe``: for
    one step only, which gives time to a rank of which nothing is known.
    """

    tau_s: float
    dropped: float
    gain: float
    after_quorum_s: float = 0.0
    is_probe: bool = False


def choose_for(
    steps: StepTimes,
    rules: StopRules,
    *,
    longest_s: float,
    least_gain: float,
    price: float = 0.0,
    parts: Sequence[int] = (),
) -> Choice:
    """The deadline with the largest value: gradient per second, less a price for what is dropped (`Outcomes.value`).

    Candidates are shorter deadlines, which stop a rank as soon as a quorum waits, and the longest one with different
    times after a quorum. With the longest nothing is dropped for less than `PRICE`, and no rank is late that is behind
    the quorum by less than ``longest_s`` is above the quorum's usual time. A shorter one must be worth ``least_gain``,
    and that much more than the longest if there is a ``price``: otherwise one stall in fifty steps, which the longest
    stops as well, would pay for stopping healthy ranks in the others.
    """
    end_s = steps.end_s
    least_s = max(0.0, longest_s - quantile_of(steps.quorum_s, 0.5))
    most_s = max(least_s, float((end_s - steps.quorum_s.unsqueeze(1)).nan_to_num(0.0, posinf=0.0).max()))
    lags_s = least_s + (most_s - least_s) * torch.linspace(0, 1, _LAGS, dtype=torch.float64) ** 2
    quickest_s = min(longest_s, float((end_s - steps.entered_s).nan_to_num(longest_s).min()))
    shorter_s = torch.linspace(quickest_s, longest_s, _CANDIDATES, dtype=torch.float64)
    tau_s = torch.cat([shorter_s, torch.full_like(lags_s, longest_s)])
    after_quorum_s = torch.cat([torch.zeros_like(shorter_s), lags_s])
    done = outcomes(steps, tau_s, after_quorum_s, rules, parts)
    value, dear_value = done.value(price), done.value(PRICE)
    chosen, longest = _last_best(value[:_CANDIDATES]), _CANDIDATES + _last_best(dear_value[_CANDIDATES:])
    if not value[chosen] - (dear_value[longest] if price else 0.0) >= least_gain:
        chosen = longest
    of_it = slice(chosen, chosen + 1)
    brought = outcomes(steps, tau_s[of_it], after_quorum_s[of_it], rules, parts, whole_parts=bool(parts)).brought
    return Choice(float(tau_s[chosen]), float(1 - brought), float(done.gain[chosen]), float(after_quorum_s[chosen]))


def _last_best(value: Tensor) -> int:
    """The last of the candidates that are best up to rounding."""
    return int((value >= value.max() - 1e-6).nonzero().max())


def _usual_s(compute_s: Tensor) -> float:
    """The median rank's time in a step in which the machine is not busy with other work; ``compute_s``: (steps, ranks).

    If all ranks are slow at once, none is late: no rank is before a quorum waits. A deadline that followed such
    steps would be far too long for a rank that is stuck in the step after them.
    """
    return quantile_of(compute_s.nanmedian(dim=1).values, _BUSY)


def steps_since_dealt(weight: Tensor) -> int | None:
    """How many of the last steps have the present shares; ``None``: all of them.

    Times for other shares are forgotten, not scaled: the part of a step's time that grows with its samples is unknown.
    ``weight``, (steps, ranks): those of the ranks' steps. Shares are weights that stay for three steps. Other weights
    count as the shares before them: the last step of an epoch has fewer samples, and work drawn from a pool, or
    weighted by tokens, differs from step to step.
    """
    if torch.equal(weight[1:], weight[:-1]):
        return None
    changes = (weight[1:] != weight[:-1]).any(1)
    begins: list[int] = [0, *(changes.nonzero().flatten() + 1).tolist(), len(weight)]
    settled = [first for first, end in pairwise(begins) if end - first >= _SETTLED]
    for first, before in pairwise(reversed(settled)):
        if (weight[before] != weight[first]).any():
            return len(weight) - first
    return None


@final
class AutoDeadline(Deadline):
    """The deadline that would have brought most gradient per second in the last ``window`` steps (`choose_for`).

    The steps are simulated under different deadlines, with the time that late ranks would have taken. If the best one
    gains less than ``least_gain`` (0.1: a tenth more gradient per second), the longest is taken: ``max_over_median``
    times the median rank's time in a quick step. It stops a rank that stalls, also one that was never slow before, and
    next to nothing else. What is dropped has a price if the gain is doubtful (`price_of`). The longest is also taken if
    what was dropped in the last ``window`` steps did not bring more gradient per second than waiting, or its price
    (`kept`). Then a rank of which nothing is known has four times the median's time in one step first. ``every``: steps
    between two choices; in its first ten steps it chooses in each. It begins again when a rank's time has changed for
    good (`ChangedTimes`) and, if work is dealt out by speed, when shares change (`steps_since_dealt`): earlier times
    say nothing of those to come; nor do those of the first ``warmup_steps``. It predicts what the last choice is
    expected to drop.
    """

    wants_progress = True

    def __init__(
        self,
        *,
        window: int = 75,
        warmup_steps: int = 2,
        every: int = 25,
        least_gain: float = 0.1,
        max_over_median: float = 1.4,
    ) -> None:
        check_count("window", window, least=1)
        check_count("warmup_steps", warmup_steps, least=1)
        check_count("every", every, least=1)
        check_number("least_gain", least_gain, least=0, such_as="0.1 for a tenth")
        check_number("max_over_median", max_over_median, above=1, such_as="1.4 for 1.4 times the median time")
        self._seen = window
        self.window = window + every - 1  # steps since the last choice are not used
        self.warmup_steps = warmup_steps
        self.every = every
        self.least_gain = least_gain
        self.max_over_median = max_over_median
        self.chosen: Choice | None = None
        self._chosen_at = -1, True
        self._changed = ChangedTimes()
        self._last = 0, torch.empty(0)  # the last step's number, and the ranks' times in it
        self._late_handling = LateHandling()
        self._parts: Sequence[int] = ()

    def prepare(self, late_handling: LateHandling, parts: Sequence[int] = ()) -> None:
        self._late_handling = late_handling
        self._parts = parts if late_handling.granularity == "stage" else ()

    def decide(self, history: History) -> NextDeadline:
        if history.num_steps < self.warmup_steps or history.progress is None:
            return NextDeadline(math.inf)
        if not self._goes_on(history):
            self._chosen_at, self._changed = (-1, True), ChangedTimes()
        number, most = self._begun(history, history.progress)
        since = min(number % self.every, max(0, number - _AT_FIRST + 1))  # steps since the last choice
        if self.chosen is None or (history.num_steps - since, history.evenly) != self._chosen_at:
            self._chosen_at = history.num_steps - since, history.evenly
            self.chosen = self._choose(history, most, since)
        if self.chosen.is_probe and since:  # a rank was given more time in the step after that choice
            self.chosen = self._choose(history, most, since - 1, may_hear=False)
        return NextDeadline(self.chosen.tau_s, self.chosen.dropped, self.chosen.after_quorum_s)

    def _goes_on(self, history: History) -> bool:
        """Whether this is the last history with more steps; not that of a peer, for a rank that was out."""
        (number, times), compute_s = self._last, history.compute_s.nan_to_num(-1.0)  # a NaN is not equal to itself
        steps = history.num_steps - number
        self._last = history.num_steps, compute_s[-1:]
        return 0 <= steps < len(compute_s) and torch.equal(compute_s[len(compute_s) - 1 - steps][None], times)

    def _begun(self, history: History, progress: Progress) -> tuple[int, int]:
        """How many steps ago was the first choice from the steps that tell of those to come, and how many are these."""
        of_changes = self._changed.steps_since(history, self._late_handling.quorum_among, self.warmup_steps), CERTAIN
        begun = (steps_since_dealt(progress.weight), _SETTLED), of_changes
        steps, settled = min(((steps, own) for steps, own in begun if steps is not None), default=(None, 0))
        if steps is None:
            return history.num_steps - self.warmup_steps, max(1, history.num_steps - self.warmup_steps)
        return steps - settled, steps

    def _choose(self, history: History, most: int, since: int, may_hear: bool = True) -> Choice:
        """Choose from the steps until ``since`` steps ago; at most the last ``most`` steps are used."""
        history = history.last(min(self._seen, most - since), before=since)
        ranks, progress = history.compute_s.shape[1], history.progress
        if progress is None or not len(progress.unit_s):
            return Choice(math.inf, 0.0, 0.0)
        members = int((~progress.entered_s[-1].isnan()).sum())
        rules = StopRules.of(self, self._late_handling, ranks, members)
        steps = StepTimes.of(history, partial(self._late_handling.quorum_among, wanted=self.quorum))
        usual_s = _usual_s(history.compute_s)
        if steps is None or not usual_s < math.inf:  # no rank entered any of these steps
            return Choice(math.inf, 0.0, 0.0)
        price = price_of(steps.end_s, dealt=history.dealt and history.evenly)
        compute_s = history.compute_s[-len(progress.unit_s) :]
        broken = bool((progress.computed < 1).any()) and kept(progress, compute_s, steps.waiting_s).broken(0.0, price)
        # a rank may have been stopped in all of these steps before it had finished anything
        if broken and may_hear and any_unheard(progress, compute_s, _PROBE_TIMES):
            return Choice(_PROBE_TIMES * usual_s, 0.0, 0.0, is_probe=True)
        return choose_for(
            steps.with_work,
            rules,
            longest_s=self.max_over_median * usual_s,
            least_gain=math.inf if broken else self.least_gain,
            price=price,
            parts=self._parts,
        )
