"""Is a rank clearly slow, or do ranks only differ as they ordinarily do?

A rank is slow in a step that it ends later than 1.4 times the moment at which a quorum has. What
the others are behind the quorum is the ordinary lag: it is no reason to drop anything, however much a deadline would
seem to save. On a busy machine ranks are slow now and then by the same measure, each of them: `lag_that_drops` is the
time after the quorum with which little is dropped for that. Such a machine is known by ranks that `vary_together`, and
a slow rank on it by being slow more often than chance has it (`one_stands_out`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from straggle.policies.deadline import quantile_of

_SLOW = 1.4  # times the quorum's time, from which on a rank is slow
_MATTERS = 0.03  # of the steps' time, that slow ranks must cost
_TOGETHER = 1.5  # F, which independent ranks exceed in one of fifty windows of 50 steps
_COMMON = 0.05  # of a rank's own variance: what many ranks have in common is seen long before it matters
_FEW_STEPS = 10  # that say nothing about it
_STANDS_OUT = 3.0  # F of the ranks, which six alike exceed in one of a hundred windows of 50 steps
_ONE_IN_100 = 2.326  # standard deviations
_AT_MOST = 3.0  # times the quorum's time that a rank is behind: one stall counts as no more
_NEARLY_ALL = 0.99  # of the ranks that are not slow are behind the quorum by no more than the ordinary lag


@dataclass(frozen=True)
class Differences:
    """How the ranks of some steps differ.

    ``lag_s``: by which ranks that are not slow are ordinarily behind the quorum. ``held_up``: the share of the steps'
    time that ranks cost which are slow, and ``error`` its standard error over the steps.
    """

    lag_s: float
    held_up: float
    error: float

    @property
    def any_slow(self) -> bool:
        """Whether slow ranks cost enough, and more than noise."""
        return self.held_up >= max(_MATTERS, self.error)


def differences(end_s: Tensor, quorum_s: Tensor, overhead_s: Tensor) -> Differences:
    """Of steps with ``end_s`` (steps, ranks), when each rank ends its work, ``quorum_s`` and ``overhead_s`` (steps,).

    A rank that never ends its work counts as one that takes ten times as long as the quorum; one without work (NaN),
    as one that is absent, does not count.
    """
    quorum_s = quorum_s.to(end_s)
    end_s = end_s.minimum(10 * quorum_s.unsqueeze(1))
    ordinary = end_s <= _SLOW * quorum_s.unsqueeze(1)  # not those without work
    lags_s = (end_s - quorum_s.unsqueeze(1)).clamp(min=0.0).where(ordinary, math.nan)
    lag_s = quantile_of(lags_s, _NEARLY_ALL) if ordinary.any() else 0.0
    end_s = end_s.nan_to_num(0.0)
    last_s = end_s.amax(1)
    lost_s = last_s - end_s.where(ordinary, 0.0).amax(1)
    mean_s = float((last_s + overhead_s.to(end_s)).mean())
    if not mean_s > 0:
        return Differences(0.0, 0.0, 0.0)
    error_s = float(lost_s.std(correction=0)) / max(1, len(lost_s) - 1) ** 0.5
    return Differences(lag_s, float(lost_s.mean()) / mean_s, error_s / mean_s)


def lag_that_drops(share: float, needs_s: Tensor, of_gradient: Tensor) -> float:
    """The shortest time after the quorum with which at most ``share`` of all gradients is dropped.

    ``needs_s``: for each unit of work the time after the quorum that it needs to come in (of any shape); one that needs
    infinitely long comes in with none, and does not count. ``of_gradient``: the share of a rank's gradient that it has.
    """
    counts = needs_s.isfinite() & (of_gradient > 0)
    ordered, order = needs_s[counts].sort(descending=True)
    dropped = of_gradient[counts][order].cumsum(0)
    within = dropped <= share * float(of_gradient.sum())  # a tie is dropped, or comes in, as one
    first_kept = int(within.sum())
    return max(0.0, float(ordered[first_kept])) if first_kept < len(ordered) else 0.0


def common_variance(end_s: Tensor) -> float:
    """The variance that the ranks' times, (steps, ranks), have in common, over a rank's own; 0: no more than chance.

    By a variance analysis of the logarithm, without each rank's own mean: ``F``, the steps' part over that within the
    steps, is 1 for independent ranks, and ``(F - 1) / ranks`` is the variance that they share over a rank's own. Of few
    steps nothing is known: NaN. A time that is NaN: the rank had no work.
    """
    logs = end_s.clamp(min=1e-9).log().where(end_s.isfinite(), math.nan)
    logs = logs[(~logs.isnan()).any(1)]
    numbers = (~logs.isnan()).sum(1)
    if len(logs) < _FEW_STEPS or int(numbers.max()) < 2:
        return math.nan
    logs = logs - logs.nanmean(0)
    of_step = logs.nanmean(1)
    within = float((logs - of_step.unsqueeze(1)).nan_to_num(0.0).square().sum()) / max(1, int((numbers - 1).sum()))
    between = float((numbers * of_step.square()).sum()) / (len(logs) - 1)
    if not between > _TOGETHER * within:
        return 0.0
    return (between / within - 1) / float(numbers.double().mean()) if within > 0 else math.inf


def vary_together(end_s: Tensor) -> bool:
    """Whether the ranks' times, (steps, ranks), rise and fall together, as where all share a machine that is busy.

    A rank that is stopped there leaves its time to the others, so that less is gained than times without it say. What
    they have in common must be large beside chance and beside their own: with many ranks, what is not known of those
    that were stopped is enough for a large ``F``. Of few steps nothing is known, and the answer is yes.
    """
    return not common_variance(end_s) <= _COMMON


def one_stands_out(end_s: Tensor, quorum_s: Tensor) -> bool:
    """Whether some rank is clearly slow, and not each of them now and then; ``end_s`` (steps, ranks), ``quorum_s``.

    By a variance analysis of how far ranks are beyond 1.4 times the quorum's time: ``F``, the ranks' part over that
    within them, is 1 for ranks that are alike. Of one step nothing is known, and the answer is yes.
    """
    over = (end_s / quorum_s.to(end_s).clamp(min=1e-9).unsqueeze(1) - _SLOW).clamp(min=0.0, max=_AT_MOST)
    over = over[:, (~over.isnan()).any(0)]
    numbers = (~over.isnan()).sum(0)
    if over.shape[1] < 2 or int(numbers.min()) < 2:
        return True
    of_rank = over.nanmean(0)
    within = float((over - of_rank).nan_to_num(0.0).square().sum()) / int((numbers - 1).sum())
    between = float((numbers * (of_rank - over.nanmean()).square()).sum()) / (len(of_rank) - 1)
    return between > _stands_out(len(of_rank)) * within


def _stands_out(ranks: int) -> float:
    """``F`` that so many ranks which are alike exceed in one of a hundred windows; not less for more than six.

    The fewer they are, the further it varies. By Wilson and Hilferty, "The distribution of chi-square" (PNAS 1931).
    """
    part = 2 / (9 * (ranks - 1))
    return max(_STANDS_OUT, (1 - part + _ONE_IN_100 * math.sqrt(part)) ** 3)
