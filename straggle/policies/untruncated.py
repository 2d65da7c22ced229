"""What late ranks would have taken, had nobody stopped them or stood in for them: unit by unit, over many steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from straggle.policies.history import Progress


def whole_units(progress: Progress, compute_s: Tensor) -> Tensor:
    """``progress.unit_s`` with the times that a late rank would have taken for what it did not finish.

    They are its peers' typical times, times how much longer than they it took for what it did finish; ``compute_s``
    (steps, ranks) is when it was stopped. Gives (steps, ranks, units), NaN where a rank did not enter a step.
    `telemetry.Table.whole_times` and `whatif.WaitForAllPrediction` tell a whole step's time from that step alone.
    """
    used = progress.unit_share > 0
    unit_s = progress.unit_s.where(used, math.nan)  # a micro-batch that comes in stages has a time of its own, too
    known_s = unit_s.nan_to_num(0.0).cummax(-1).values  # of a unit that the rank does not have: the one before
    spent_s = unit_s - torch.cat([torch.zeros_like(unit_s[..., :1]), known_s[..., :-1]], -1)
    typical_s = spent_s.flatten(0, 1).nanmedian(0).values.nan_to_num(0.0)
    slowness = (spent_s / typical_s.clamp(min=1e-9)).transpose(0, 1).flatten(1).nanmedian(1).values.nan_to_num(1.0)
    expected_s = typical_s * slowness.unsqueeze(1)  # (ranks, units)
    missing = unit_s.isnan() & used
    left_s = expected_s.where(missing, 0.0)
    # the first missing one did not end before the rank was stopped; NaN where it never entered
    first = missing & (missing.cumsum(-1) == 1)
    wait_s = (compute_s.to(unit_s).unsqueeze(-1) - known_s - left_s).clamp(min=0.0).where(first, 0.0)
    return known_s + (left_s + wait_s).cumsum(-1)


def whole_entries(progress: Progress, compute_s: Tensor) -> Tensor:
    """``progress.entered_s``, (steps, ranks), as it would have been, had nobody been stood in for.

    A rank that never entered a step (``compute_s``, (steps, ranks), is NaN) had its whole delay in that step: what it
    still took of it in the following one counts to the first.
    """
    never = compute_s.isnan() & (progress.weight > 0)
    entered_s = progress.entered_s.clone()
    if not never.any():
        return entered_s
    for step in range(len(entered_s) - 2, -1, -1):
        more_s, own = entered_s[step + 1].clone(), never[step]
        entered_s[step] += more_s.where(own, 0.0)
        entered_s[step + 1] = more_s.where(~own, 0.0)
    return entered_s
