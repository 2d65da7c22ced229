"""What one rank decided in each step, so that a run in which ranks were late can be repeated bit for bit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """One rank's part in one step: what of it went into the merge, and where its pass ended.

    ``num_gradients``: how many finished gradients (of parameters, over all micro-batches) were merged; autograd
    finishes them in the same order again. ``left_at``: how often the pass had asked whether to go on before it was
    asked to leave; ``None``: it was not. ``stood_in``: the rest was submitted by the stand-in, without estimates.
    ``num_over``: how many of its backward passes were over by then; ``None`` in recordings that do not say it.
    ``drawn``: the micro-batches that it drew from the step's pool, in order; ``None``: it drew none.
    """

    step: int
    num_gradients: int
    left_at: int | None
    stood_in: bool
    num_over: int | None = None
    drawn: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Recording:
    """A rank's decisions from step 0 on, and what its stages were planned from (see `plan_stages`)."""

    order: tuple[int, ...]
    seconds: tuple[float, ...]
    decisions: tuple[Decision, ...]
