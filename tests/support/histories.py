"""Histories made by hand, for policies."""

import torch

from straggle import History, Progress


def history(unit_s, num_steps=None, computed=None, overhead_s=0.0, unit_share=None, entered_s=None):
    """Steps in which no rank was stopped, unless ``computed`` says so."""
    unit_s = torch.as_tensor(unit_s, dtype=torch.float64)
    steps, ranks, units = unit_s.shape
    share = torch.full_like(unit_s, 1 / units) if unit_share is None else torch.as_tensor(unit_share).expand_as(unit_s)
    computed = torch.ones(steps, ranks, units) if computed is None else torch.as_tensor(computed)
    finished = (computed == 1).all(-1)
    entered_s = torch.zeros(steps, ranks) if entered_s is None else torch.as_tensor(entered_s)
    weight, overhead_s = torch.ones(steps, ranks), torch.full((steps,), float(overhead_s))
    progress = Progress(unit_s, share, computed, share[0, 0], weight, entered_s, overhead_s)
    return History(steps if num_steps is None else num_steps, unit_s[..., -1], finished, progress)
