"""What one rank decided in each step, so that a run in which ranks were late can be repeated bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """One rank's part in one step: how much of it went into the merge, and where its pass ended.

    ``num_gradients``: how many finished gradients (of parameters, over all micro-batches) were merged; autograd
    finishes them in the same order again. ``left_at``: how often the pass had checked whether to go on before it was
    stopped; ``None`` if it was not. ``stood_in``: the stand-in submitted the rest, without estimates. ``num_over``: how
    many of its backward passes were over then; ``None`` if not recorded. ``idle``: it had no data for the last step
    that it had entered; ``None``: the loop decides. ``entered``: false if it was stood in for before it entered this
    step. ``members_changed``: the job's members had changed by the end of the step, which cannot be repeated.
    ``parts``: the numbers of its micro-batches, in order, if it drew them from a shared pool; ``None`` if they were the
    loop's own. ``had_work``: whether gradients that were not computed are missing; ``None`` if none were, or not
    recorded. ``num_parts``: how many of ``parts`` it had when its part was submitted; ``None``: all, or not recorded.
    ``joins_over``: if it was stood in for, the loops over `join` for which it was known to have no more data.
    """

    step: int
    num_gradients: int
    left_at: int | None
    stood_in: bool
    num_over: int | None = None
    idle: bool | None = None
    entered: bool = True
    members_changed: bool = False
    parts: tuple[int, ...] | None = None
    had_work: bool | None = None
    num_parts: int | None = None
    joins_over: int | None = None


def check_members(decisions: Iterable[Decision]) -> None:
    """Raise ``ValueError`` if the decisions include a step in which the members changed, or a later one."""
    if (changed := next((own for own in decisions if own.members_changed), None)) is not None:
        raise ValueError(
            f"the members of the recorded run changed in step {changed.step} (a rank left, came back or was not heard "
            f"of): only the steps before that can be replayed; repeat them with steps={changed.step}, or give the "
            f"first {changed.step} decisions alone"
        )


@dataclass(frozen=True)
class Recording:
    """A rank's decisions from step 0 on, and the order and seconds from which its stages were planned."""

    order: tuple[int, ...]
    seconds: tuple[float, ...]
    decisions: tuple[Decision, ...]
