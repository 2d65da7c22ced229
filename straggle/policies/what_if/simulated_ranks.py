"""Ranks under a policy, step after step, in one process: the loop of the simulator and of the advice.

They differ in what the ranks have to do in a step, and in what its merge takes. The policy is one of the library's, and
sees the same history as in training: a rank that it stops looks stopped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from straggle.policies.deadline import Deadline, NextDeadline, next_deadline
from straggle.policies.history import HistoryWindow, StepProgress
from straggle.policies.what_if.step_model import SimulatedStep, StopRules, by_stage, computed_share, simulate_step


@dataclass(frozen=True)
class GivenStep:
    """What the ranks have to do in a step.

    ``unit_s``, (ranks, units): seconds from entering the step to the end of each unit; ``unit_share``, of the same
    shape: its share of the rank's gradient. ``entered_s``, (ranks,): when each rank enters, with what it still has to
    do of earlier steps (`SimulatedRanks.behind_s`); ``None``: all at once. ``away``, (ranks,): ranks that are not
    waited for, beside those that were stood in for. ``weight``, (ranks,): of each rank's step, 1 if ``None``.
    ``silent``: see `part_computed`.
    """

    unit_s: Tensor
    unit_share: Tensor
    entered_s: Tensor | None = None
    away: Tensor | None = None
    weight: Tensor | None = None
    silent: Tensor | None = None


@dataclass(frozen=True)
class EndedStep:
    """What came of a step: of its work, ``done``, and ``part``, (ranks, units), the share of each unit that comes in.

    ``deadline`` is the one that it had; ``seconds`` are those of the entire step, with its merge.
    """

    deadline: NextDeadline
    done: SimulatedStep
    part: Tensor
    seconds: float


class SimulatedRanks:
    """The ranks between two steps.

    ``stood_in``, (ranks,): who was stood in for in the last one; ``behind_s``, (ranks,): seconds that such a rank still
    has to do before it enters the next.
    """

    def __init__(
        self,
        policy: Deadline,
        rules: StopRules,
        *,
        num_ranks: int,
        stage_share: Tensor,
        in_stages: bool = True,
        max_lag: float = math.inf,
        shown: Tensor | None = None,
    ) -> None:
        """``in_stages``: the last units are stages. ``shown``: the numbers of the ranks that the policy sees, if few.

        ``max_lag``: so many merged steps wait for a rank that is stood in for (`LateHandling`).
        """
        self.stood_in, self.behind_s = torch.zeros(num_ranks, dtype=torch.bool), torch.zeros(num_ranks)
        self._policy, self._rules, self._next = policy, rules, NextDeadline(math.inf)
        self._shown = slice(None) if shown is None else shown
        self._num_stages, self._in_stages = len(stage_share), in_stages
        self._window = HistoryWindow(policy.window, num_ranks if shown is None else len(shown))
        if policy.wants_progress:
            self._window.watch(stage_share)
        self._missed = _Missed(num_ranks, max_lag)

    @property
    def most_lag(self) -> int:
        """The most merged steps that a rank still had to take at the end of a step."""
        return self._missed.most

    def step(self, given: GivenStep, merge: Callable[[SimulatedStep], float]) -> EndedStep:
        """One step; ``merge``: the seconds of the step with its merge, from what came of the ranks' work.

        The policy is shown the step, and decides the next deadline.
        """
        away = self.stood_in if given.away is None else self.stood_in | given.away
        deadline = self._next
        done = simulate_step(given.unit_s, deadline.seconds, self._rules, given.entered_s, behind=away)
        part = computed_share(given.unit_s, done, self._rules, given.silent)
        seconds = merge(done)
        overhead_s = max(0.0, seconds - float(done.seconds))
        if given.entered_s is not None:
            seconds = self._missed.seconds(given.entered_s, done.stood_in, seconds)
            self.stood_in = done.stood_in
            self.behind_s = (given.entered_s - seconds).clamp(min=0.0).where(done.stood_in, 0.0)
        self._decide(given, done, part, overhead_s)
        return EndedStep(deadline, done, part, seconds)

    def _decide(self, given: GivenStep, done: SimulatedStep, part: Tensor, overhead_s: float) -> None:
        shown = self._shown
        own_s = done.own_s[shown].masked_fill(done.stood_in[shown], math.nan)
        finished = ~done.late[shown] & (given.unit_share[shown].sum(1) > 0)
        progress = self._progress(given, done, part[shown], overhead_s) if self._policy.wants_progress else None
        decided = next_deadline(self._policy, self._window.append(own_s.tolist(), finished.tolist(), progress))
        if self._policy.enforced:
            self._next = decided
            if decided.after_quorum_s != self._rules.after_quorum_s:
                self._rules = replace(self._rules, after_quorum_s=decided.after_quorum_s)

    def _progress(self, given: GivenStep, done: SimulatedStep, part: Tensor, overhead_s: float) -> StepProgress:
        """As the ranks' telemetry has it: a rank that did not enter has been waited for until it was stood in for."""
        shown, weight = self._shown, given.weight
        unit_share, at_once = given.unit_share[shown], torch.zeros(len(part))
        entered_s = at_once if given.entered_s is None else torch.minimum(given.entered_s, done.end_s)[shown]
        return StepProgress(
            unit_s=given.unit_s[shown].where(done.reached[shown], math.nan).float(),
            unit_share=unit_share.float(),
            computed=by_stage(part, unit_share, self._num_stages, in_stages=self._in_stages).float(),
            weight=at_once + 1 if weight is None else weight[shown],
            entered_s=entered_s.float(),
            overhead_s=torch.tensor(overhead_s),
        )


class _Missed:
    """The steps that each rank has missed and not yet come to; at most ``max_lag`` of them, for more its peers wait."""

    def __init__(self, num_ranks: int, max_lag: float) -> None:
        self._entered_at: list[deque[float]] = [deque() for _ in range(num_ranks)]  # when it comes to each
        self._max_lag, self._now_s = max_lag, 0.0
        self.most = 0

    def seconds(self, begin_s: Tensor, stood_in: Tensor, step_s: float) -> float:
        """What a step of ``step_s`` takes, whose ranks enter after ``begin_s`` if they are not ``stood_in`` for."""
        for entered_at, enters_s, is_missing in zip(self._entered_at, begin_s.tolist(), stood_in.tolist(), strict=True):
            if not is_missing:
                entered_at.clear()
                continue
            entered_at.append(self._now_s + enters_s)
            if len(entered_at) > self._max_lag:
                step_s = max(step_s, entered_at.popleft() - self._now_s)
        self._now_s += step_s
        lags = [len(entered_at) for entered_at in self._entered_at]
        self.most = max(self.most, *lags)
        return step_s
