"""The first steps of a run, in which caches, deadlines and shares warm up: step times leave them out."""

from __future__ import annotations


def num_warmup_steps(num_steps: int) -> int:
    """The number of these steps in a run: a tenth of its steps, at most ten."""
    return min(num_steps // 10, 10)
