"""The deadline that makes most of the ranks' own times: DropCompute's rule, on stages as well as on micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import final

from torch import Tensor

from straggle.policies.deadline import Deadline, LateHandling, NextDeadline, check_count, check_number, quantile_of
from straggle.policies.dealt import SETTLED, steps_since_dealt
from straggle.policies.history import History
from straggle.policies.ordinary import common_variance, differences, lag_that_drops, one_stands_out, vary_together
from straggle.policies.price import CLEARLY, EVEN, HIGH, HIGHEST, LOW, pays
from straggle.policies.promise import kept
from straggle.policies.step_model import StopRules, simulate_step
from straggle.policies.thresholds import StepTimes, Threshold, by_running_units, by_the_rule, expected, expected_drop
from straggle.policies.untruncated import any_unheard, untruncated_entries, untruncated_times

_NOISE = 1.0  # standard errors by which a shorter threshold must be better
_BUSY = 0.1  # this quantile over steps is that of a machine without other work
_AT_FIRST = 10  # first steps: AutoDeadline chooses in each
_LONGER = 1.5  # windows that show how ranks vary: in one, independent ranks too often seem to share a machine
# gain from which on gradients are dropped where no rank is slow, but each varies by itself; less than that beyond the
# longest threshold is what noise brings
_ORDINARY = 0.05
_HEARD = 4.0  # times the median rank's time, which a rank is given of which nothing is known
_LITTLE = 0.005  # of all gradients: as much may be dropped for what ranks are behind a quorum now and then


def choose_for(
    steps: StepTimes,
    rules: StopRules,
    *,
    longest_s: float,
    least_gain: float,
    noise: float = _NOISE,
    price: float = LOW,
    waits: bool = False,
    parts: Sequence[int] = (),
) -> Threshold:
    """`AutoDeadline`'s choice: the longest threshold unless a rank is clearly slow and a shorter one pays (`pays`).

    Where ranks vary, each by itself (``price`` is `LOW`), one that gains much (`_ORDINARY`) is taken, too. With
    ``waits`` it is the longest in any case. Then no rank is late by what ranks are behind a quorum (`after_quorum_s`).
    So where all are slow at once, as on a busy machine, what is dropped is what a slow rank leaves, and not the
    ordinary difference between ranks.

    Whether it pays to drop anything is decided as if only whole stages came in. The threshold is then chosen with the
    ``parts`` of the last units that come in one by one (`Deadline.prepare`): less is lost by a shorter one.

    Where the price is more than `LOW`, what a shorter one drops beyond the longest is paid by what it gains beyond it
    (`brings_more`). One stall in fifty steps gains a tenth with either, and would pay for dropping noise in all others.
    """
    seen = differences(steps.end_s, steps.quorum_s, steps.overhead_s)
    longest = Threshold(longest_s, 0.0, 0.0, after_quorum_s(steps, rules, longest_s, seen.lag_s, max(price, HIGH)))
    if waits or not (seen.any_slow or price == LOW):
        return longest

    def worth_it(one: Threshold) -> bool:
        enough = one.gain >= max(least_gain, 0.0 if seen.any_slow else _ORDINARY)
        return enough and pays(one.gain, one.dropped, price) and (price == LOW or brings_more(one))

    def brings_more(one: Threshold) -> bool:
        """Whether it brings enough beyond the longest, which stops a rank that stalls as well."""
        ours, other = (expected(steps, each, rules, parts) for each in (one, longest))
        gain, dropped = ours.gain_over(other), other.brought - ours.brought
        return gain >= least_gain and pays(gain, dropped, EVEN if gain >= _ORDINARY else price)

    if rules.finish_running:
        outcomes = by_running_units(steps, rules, longest_s)
    else:
        outcomes = by_the_rule(steps, rules.grace_s, longest_s, waits_until_tau=True)
    chosen = outcomes.best(least_gain, noise)
    if not worth_it(chosen):
        return longest
    if parts:
        outcomes = by_the_rule(steps.in_parts(parts), rules.grace_s, longest_s, waits_until_tau=True)
        finer = outcomes.best(least_gain, noise)
        return finer if worth_it(finer) else chosen
    return chosen


def price_of(steps: StepTimes, *, dealt: bool) -> float:
    """What a dropped gradient must bring: much where little but noise is left to be late."""
    common = common_variance(steps.end_s)
    if vary_together(steps.end_s) and not one_stands_out(steps.end_s, steps.quorum_s):
        return HIGHEST if common >= CLEARLY else HIGH
    return HIGH if dealt or math.isnan(common) else LOW


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


def _usual_s(compute_s: Tensor) -> float:
    """The median rank's time in a step, (steps, ranks) given, in which the machine is not busy with other work.

    Where all ranks are slow at once, none is late: no rank is before a quorum waits. A deadline that followed such
    steps would be far too long for a rank that is stuck in the step after them.
    """
    return quantile_of(compute_s.nanmedian(dim=1).values, _BUSY)


@final
class AutoDeadline(Deadline):
    """The threshold of DropCompute's rule (`choose_threshold`) over the last ``window`` steps, chosen again and again.

    It weighs what is dropped against the seconds that are saved, on the clock that it is enforced by. A late rank is
    waited for until the threshold, and not until its last unit before, as the rule has it for micro-batches; of the
    unit that it is in, what it has finished counts (`StepTimes.in_parts`). It takes the longest threshold where no rank
    is clearly slow, that is where ranks that need more than 1.4 times as long as a quorum cost less than 3 % of the
    steps' time; where each rank varies by itself, unless a shorter one gains 5 %. It takes it, too, where the best one
    promises less than ``least_gain`` (0.01: a hundredth more gradient per second), or less than the price of what it
    drops: 0.3 times it, or three times it where work is dealt out by speed (`Rebalance`, `Step.pull`) or all ranks
    share a busy machine and none stands out (`vary_together`), or five times where they clearly do (`price_of`; how
    ranks vary is seen over 1.5 times ``window`` steps). There it must be worth that beyond the longest one, too, or
    gain 5 % beyond it. The longest is ``max_over_median`` times the median rank's time in a quick step (the quickest
    tenth). So a rank that was never slow before and stalls is not waited for either. With it, no rank is late by what
    ranks are behind a quorum now and then (`after_quorum_s`), however slow all of them are at once. It takes the
    longest, too, where what was dropped in the last ``window`` steps did not bring that much: gradient per second as it
    came, against waiting in the same steps (`kept`). Where nothing is known of some rank by then, that rank has four
    times the median's time in one step first. Of thresholds that differ by no more than noise (one standard error), it
    takes the longest. ``every``: steps between two choices; in its first ten steps it chooses in each. Where work is
    dealt out by speed, it begins again when shares change: times from before are not those of the new shares
    (`steps_since_dealt`). It predicts what the last choice is expected to drop.
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
        most = history.num_steps if dealt is None else dealt
        if self.chosen is None or history.num_steps - since != self._chosen_at:
            self._chosen_at, self.chosen = history.num_steps - since, self._choose(history, most, since)
        if self.chosen.hears and since:  # a rank was heard out in the step after that choice
            self.chosen = self._choose(history, most, since - 1, may_hear=False)
        return NextDeadline(self.chosen.tau_s, self.chosen.dropped, self.chosen.after_quorum_s)

    def _choose(self, history: History, most: int, since: int, may_hear: bool = True) -> Threshold:
        """From the steps until ``since`` steps ago; of the last ``most`` steps no more are looked at."""
        seen, longer = (history.last(min(steps, most - since), before=since) for steps in (self._seen, self._longer))
        return self._choose_from(seen, longer, may_hear)

    def _choose_from(self, history: History, longer: History, may_hear: bool) -> Threshold:
        ranks, progress = history.compute_s.shape[1], history.progress
        if progress is None or not len(progress.unit_s):
            return Threshold(math.inf, 0.0, 0.0)
        members = int((~progress.entered_s[-1].isnan()).sum())
        rules = StopRules.of(self, self._late_handling, ranks, members)
        quorum = partial(self._late_handling.quorum_among, wanted=self.quorum)
        more, with_data = StepTimes.of(longer, quorum), int((progress.weight > 0).any(1).sum())
        longest_s = self.max_over_median * _usual_s(history.compute_s)
        if more is None or not with_data or not longest_s < math.inf:  # no rank came to a step that is seen
            return Threshold(math.inf, 0.0, 0.0)
        steps, price = more.last(with_data), price_of(more, dealt=history.dealt)
        waits = self._broken(history, price)
        if waits and may_hear and self._unheard(history):
            return Threshold(_HEARD * _usual_s(history.compute_s), 0.0, 0.0, hears=True)
        chosen = choose_for(
            steps,
            rules,
            longest_s=longest_s,
            least_gain=self.least_gain,
            price=price,
            waits=waits,
            parts=self._parts,
        )
        rules = replace(rules, after_quorum_s=chosen.after_quorum_s)
        return replace(chosen, dropped=expected_drop(steps, chosen.tau_s, rules, self._parts))

    def _unheard(self, history: History) -> bool:
        """Whether some rank was stopped in all of these steps before it had finished anything."""
        assert history.progress is not None
        compute_s = history.compute_s[-len(history.progress.unit_s) :]
        return any_unheard(history.progress, compute_s, _HEARD)

    def _broken(self, history: History, price: float) -> bool:
        """Whether what was dropped in these steps brought less than it should have.

        Where ranks vary by themselves it was worth it if it was a gain: with as much gradient per second there are more
        steps. Elsewhere it must have brought its price, because what is dropped for noise seems to pay now and then.
        """
        progress = history.progress
        assert progress is not None
        if not bool((progress.computed < 1).any()):  # nothing was dropped
            return False
        compute_s = history.compute_s[-len(progress.unit_s) :]
        unit_s = untruncated_times(progress, compute_s.nan_to_num(0.0)).nan_to_num(0.0)
        waiting_s = (untruncated_entries(progress, compute_s) + unit_s.amax(-1)).amax(1)
        return kept(progress, compute_s, waiting_s).broken(self.least_gain, price if price > LOW else 0.0)
