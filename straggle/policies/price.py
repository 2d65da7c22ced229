"""What a dropped gradient must bring: nothing but more gradient per second, or, if that gain is doubtful, a price.

Some of the gain that recorded times promise does not come. If all ranks share a busy machine, a rank that is stopped
leaves its time to the others. If work is dealt out by speed, the ranks' times differ by noise alone. There each share
of the gradients that is dropped must bring `PRICE` times as much gradient per second. Whether dropping was worth it is
`kept`: gradient per second as measured, against waiting for all ranks in the same steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from straggle.policies.history import Progress

# noise of a busy machine gains 0.2 to 4 times the dropped share, a rank that is slow or stalls 5 to 8 times
PRICE = 4.5
_BY_CHANCE = 1.5  # F, which independent ranks exceed in one of fifty windows of 50 steps
_COMMON = 0.05  # of a rank's own variance: with many ranks, common variance shows long before it matters
_FEW_STEPS = 10  # so few steps show nothing
_CLEARLY = 1.3  # times the median rank's time
_LEAST_STEPS = 20  # steps with drops that are needed to judge them


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


@dataclass(frozen=True)
class Kept:
    """The ``gain`` in gradient per second (0.1: a tenth more) over ``num_steps`` in which something was dropped.

    ``error`` is its standard error over these steps, and ``dropped`` the share of all gradients that was.
    """

    gain: float
    error: float
    num_steps: int
    dropped: float = 0.0

    def broken(self, least_gain: float, price: float = 0.0) -> bool:
        """Whether it was less than ``least_gain``, or than the ``price`` of what was dropped, for more than noise."""
        best = self.gain + self.error
        return self.num_steps >= _LEAST_STEPS and (best < least_gain or not pays(best, self.dropped, price))


def kept(progress: Progress, compute_s: Tensor, waiting_s: Tensor) -> Kept:
    """The gain over the last steps, with ``compute_s`` (steps, ranks) as measured.

    ``waiting_s``, (steps,): when the slowest rank would have ended its work, had all been waited for. A step took until
    the last rank ended its own work, or was stood in for, and its overhead.
    With the means ``b`` of the share that came, ``s`` of the seconds and ``w`` of those with waiting, the gain is
    ``b w / s - 1``, and its error that of the sum of their relative deviations.
    """
    brought = _brought(progress)
    entered_s = progress.entered_s.nan_to_num(0.0)  # NaN: ranks that are no members
    ended_s = (entered_s + compute_s.to(entered_s).nan_to_num(0.0)).amax(1)
    step_s, waited_s = ended_s + progress.overhead_s, waiting_s.to(ended_s) + progress.overhead_s
    counts = (brought < 1 - 1e-6) & (step_s > 0) & waited_s.isfinite()
    num_steps = int(counts.sum())
    if not num_steps:
        return Kept(0.0, 0.0, 0)
    parts = torch.stack([brought, waited_s, step_s])[:, counts].double()
    b, w, s = parts.mean(1).tolist()
    if not b * w * s > 0:
        return Kept(-1.0, 0.0, num_steps, 1 - b)
    apart = parts[0] / b + parts[1] / w - parts[2] / s
    error = float(apart.std(correction=0)) / max(1, num_steps - 1) ** 0.5
    return Kept(b * w / s - 1, b * w / s * error, num_steps, 1 - b)


def _brought(progress: Progress) -> Tensor:
    """The share of all ranks' gradients that was merged, for each step."""
    weight = progress.weight / progress.weight.sum(1, keepdim=True).clamp(min=1e-12)
    return ((progress.computed @ progress.stage_share.to(progress.computed)) * weight).sum(1)
