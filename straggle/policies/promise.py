"""Was dropping worth it? Gradient per second as measured, against waiting for all ranks in the same steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from straggle.policies.history import Progress
from straggle.policies.price import pays

_LEAST_STEPS = 20  # steps with drops that are needed for an answer


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
