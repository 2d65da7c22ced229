"""Deadline policies around another one: with a bound on what it drops, or without stopping any rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from straggle.policies.deadline import Deadline, LateHandling, NextDeadline, as_next, check_count, is_number
from straggle.policies.history import History, Progress


class _DeadlineWrapper(Deadline):
    """Common to every policy around another: it asks the inner policy, with the history that the inner one needs."""

    def __init__(self, inner: Deadline, window: int = 1) -> None:
        if not isinstance(inner, Deadline):
            raise TypeError(f"inner={inner!r}: give a straggle.Deadline")
        if not inner.enforced:
            raise ValueError(f"{type(self).__name__}(Shadow(...)): Shadow goes around all the others")
        self.inner = inner
        self.window = max(inner.window, window)
        self.wants_progress = inner.wants_progress
        self.quorum = inner.quorum
        self.grace_s = inner.grace_s

    def prepare(self, late_handling: LateHandling, parts: Sequence[int] = ()) -> None:
        self.inner.prepare(late_handling, parts)

    def _ask(self, history: History) -> NextDeadline:
        return as_next(self.inner.decide(history.last(self.inner.window)))


@final
class DropBudget(_DeadlineWrapper):
    """``inner``, but never more than ``share`` of the gradients dropped over any ``window`` steps.

    0.05 means: of all ranks' gradients for a stage in the last ``window`` steps, at least 95 % were merged, and so for
    the entire model. If the next step could drop more than is left, all ranks are waited for, also stuck ones.
    """

    def __init__(self, inner: Deadline, share: float, *, window: int = 100) -> None:
        if not is_number(share) or not 0 < share <= 1:
            raise ValueError(f"share={share}: must lie above 0 and at most at 1, such as 0.05")
        check_count("window", window, least=1)
        if share * window < 1:
            raise ValueError(
                f"share={share}, window={window}: one step may drop nearly everything of a stage, which is more than "
                f"the budget of the full window; give window={math.ceil(1 / share)} or more"
            )
        super().__init__(inner, window)
        self.share = share
        self.over_steps = window
        self.wants_progress = True

    def decide(self, history: History) -> NextDeadline:
        decided = self._ask(history)
        if history.progress is None or len(history.progress.computed) == 0:
            return decided
        last = history.last(self.over_steps - 1).progress  # with the next step, that is the window
        assert last is not None
        dropped = dropped_per_stage(last).sum(0)
        could_drop = 1.0 - 1.0 / last.weight.shape[1]  # the first rank to finish is never late
        left = self.share * self.over_steps - torch.cat([dropped, (dropped * last.stage_share).sum().unsqueeze(0)])
        return NextDeadline(math.inf, 0.0) if float(left.min()) < could_drop else decided


@final
class Shadow(_DeadlineWrapper):
    """``inner``, but no rank is stopped: what would have happened is reported (`StepReport.shadow`).

    For a first run on a real cluster: it trains as DDP does, and its report shows what the policy would gain.
    """

    enforced = False

    def decide(self, history: History) -> NextDeadline:
        return self._ask(history)


def dropped_per_stage(progress: Progress) -> Tensor:
    """The share of all ranks' gradients that was not merged, for each step and stage: (steps, stages)."""
    weight = progress.weight / progress.weight.sum(1, keepdim=True).clamp(min=1e-12)
    return ((1.0 - progress.computed) * weight.unsqueeze(2)).sum(1)
