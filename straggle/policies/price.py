"""What a dropped gradient must bring: nothing but more gradient per second, or, if that gain is doubtful, a price.

Some of the gain that recorded times promise does not come. If all ranks share a busy machine, a rank that is stopped
leaves its time to the others. If work is dealt out by speed, the ranks' times differ by noise alone. There each share
of the gradients that is dropped must bring `PRICE` times as much gradient per second.
"""

from __future__ import annotations

import math

from torch import Tensor

# noise of a busy machine gains 0.2 to 4 times the dropped share, a rank that is slow or stalls 5 to 8 times
PRICE = 4.5
_BY_CHANCE = 1.5  # F, which independent ranks exceed in one of fifty windows of 50 steps
_COMMON = 0.05  # of a rank's own variance: with many ranks, common variance shows long before it matters
_FEW_STEPS = 10  # so few steps show nothing
_CLEARLY = 1.3  # times the median rank's time


def pays(gain: float, dropped: float, price: float) -> bool:
    """Whether a ``gain`` (0.1: a tenth more gradient per second) is worth the share that is dropped for it."""
    return gain >= price * dropped


def price_of(end_s: Tensor, *, dealt: bool) -> float:
    """`PRICE` if work is dealt out by speed, or ranks share a machine and none is clearly slow; else 0.

    ``end_s``, (steps, ranks): when each rank ends its work; NaN: it has none.
    """
    return PRICE if dealt or (vary_together(end_s) and not one_is_slow(end_s)) else 0.0


def vary_together(end_s: Tensor) -> bool:
    """Whether the ranks' times rise and fall together, as on a busy machine that all share; of few steps, yes.

    By a variance analysis of the logarithm, without each rank's own mean: ``F``, the steps' part over that within the
    steps, is 1 for independent ranks, and ``(F - 1) / ranks`` is the variance that they share over a rank's own. Both
    must be large.
    """
    logs = _logs(end_s)
    numbers = (~logs.isnan()).sum(1)
    if len(logs) < _FEW_STEPS or int(numbers.max()) < 2:
        return True
    logs = logs - logs.nanmean(0)
    of_step = logs.nanmean(1)
    within = float((logs - of_step.unsqueeze(1)).nan_to_num(0.0).square().sum()) / max(1, int((numbers - 1).sum()))
    between = float((numbers * of_step.square()).sum()) / (len(logs) - 1)
    return between > max(_BY_CHANCE, 1 + _COMMON * float(numbers.double().mean())) * within


def one_is_slow(end_s: Tensor) -> bool:
    """Whether some rank clearly takes longer than the median rank, by the mean over steps, and not now and then."""
    logs = _logs(end_s)
    of_rank = (logs - logs.nanmean(1, keepdim=True)).nanmean(0)
    return bool((of_rank - of_rank.nanmedian() > math.log(_CLEARLY)).any())


def _logs(end_s: Tensor) -> Tensor:
    """Logarithms of times, without steps in which no rank has one."""
    logs = end_s.clamp(min=1e-9).log().where(end_s.isfinite(), math.nan)
    return logs[(~logs.isnan()).any(1)]
