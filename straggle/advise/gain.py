"""What each policy would make of the recorded steps: the same classes, step by step, by the one model of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from straggle.advise.bootstrap import Interval, interval
from straggle.advise.timings import Array, Timings
from straggle.around import DropBudget
from straggle.deadline import Deadline, FirstK, MedianDeadline, Patience, QuantileDeadline, WaitForAll
from straggle.history import HistoryWindow, StepProgress
from straggle.outcome import Rules, computed_share, outcome
from straggle.threshold import AutoDeadline

WORTH_IT = 1.01  # effective speedup, from which on a policy is recommended


@dataclass(frozen=True)
class Candidate:
    """A policy, and how it is written in Python and on the command line."""

    code: str
    keys: str
    policy: Deadline


@dataclass(frozen=True)
class Replayed:
    """The recorded steps under a policy: ``seconds`` and ``dropped`` (steps,), ``late`` (steps, ranks)."""

    seconds: Array
    dropped: Array
    late: Array


@dataclass(frozen=True)
class Gain:
    """``saved`` is of the mean step's seconds with everyone waited for, ``dropped`` of all gradient elements.

    ``speedup`` is effective: gradients per second, over those with everyone waited for.
    """

    code: str
    keys: str
    step_s: float
    saved: Interval
    dropped: Interval
    speedup: Interval


def candidates(num_ranks: int) -> list[Candidate]:
    """What is tried."""
    some = [
        Candidate(
            "straggle.QuantileDeadline(0.5, slack=1.2)",
            "deadline=quantile deadline.q=0.5 deadline.slack=1.2",
            QuantileDeadline(0.5, slack=1.2),
        ),
        Candidate("straggle.MedianDeadline()", "deadline=median", MedianDeadline()),
        Candidate("straggle.AutoDeadline()", "deadline=auto", AutoDeadline()),
        Candidate(
            "straggle.DropBudget(straggle.QuantileDeadline(0.5, slack=1.2), share=0.05)",
            "deadline=budget deadline.share=0.05 deadline.inner.q=0.5 deadline.inner.slack=1.2",
            DropBudget(QuantileDeadline(0.5, slack=1.2), share=0.05),
        ),
    ]
    for k in sorted({num_ranks - 1, num_ranks // 2 + 1} - {num_ranks}, reverse=True):
        some.append(Candidate(f"straggle.FirstK({k})", f"deadline=first_k deadline.k={k}", FirstK(k)))
    return some


def gains(timings: Timings, patience: Patience | None = None) -> list[Gain]:
    """All candidates, the best first."""
    everyone = replay(timings, WaitForAll(), patience)
    found = [_gain(one, replay(timings, one.policy, patience), everyone) for one in candidates(timings.num_ranks)]
    return sorted(found, key=lambda gain: -gain.speedup.value)


def best(found: list[Gain]) -> Gain | None:
    """The one to use; ``None`` where even the best may be worth nothing."""
    sure = max(found, key=lambda gain: gain.speedup.low)
    return sure if sure.speedup.low >= WORTH_IT else None


def replay(timings: Timings, policy: Deadline, patience: Patience | None = None) -> Replayed:
    """Step by step: what the policy sees is what it would have seen, so a rank that it stops looks stopped."""
    patience = patience or Patience()
    policy.prepare(patience)
    rules = Rules.of(policy, patience, timings.num_ranks)
    window = HistoryWindow(policy.window, timings.num_ranks)
    stage_share = torch.from_numpy(timings.stage_share).float()
    if policy.wants_progress:
        window.watch(stage_share)
    unit_s, share, entered_s = (torch.from_numpy(a) for a in (timings.unit_s, timings.unit_share, timings.entered_s))
    weight, stages = torch.ones(timings.num_ranks), len(stage_share)
    seconds, dropped, late = list[float](), list[float](), list[Array]()
    deadline_s = math.inf
    behind_s = torch.zeros(timings.num_ranks)  # what a rank that was stood in for still has to do, and whether it was
    stood_in = torch.zeros(timings.num_ranks, dtype=torch.bool)
    for step in range(timings.num_steps):
        begin_s = entered_s[step] + behind_s
        would = outcome(unit_s[step], deadline_s, rules, begin_s, behind=stood_in)
        stood_in, network_s = would.stood_in, float(timings.network_s[step])
        step_s = float(would.seconds) + network_s
        behind_s = (begin_s - step_s).clamp(min=0.0).where(stood_in, 0.0)
        part = computed_share(unit_s[step], would, rules)
        seconds.append(step_s)
        dropped.append(float(1 - (part * share[step]).sum(-1).mean()))
        late.append(would.late.numpy())
        progress = StepProgress(
            unit_s=unit_s[step].where(part >= 1, math.nan).float(),
            unit_share=share[step].float(),
            computed=_by_stage(part, share[step], stages),
            weight=weight,
            entered_s=torch.minimum(begin_s, would.end_s).float(),
            overhead_s=torch.tensor(network_s),
        )
        compute_s = would.own_s.masked_fill(stood_in, math.nan).tolist()
        deadline_s = policy.decide(window.append(compute_s, (~would.late).tolist(), progress))
    return Replayed(np.array(seconds), np.array(dropped), np.array(late))


def _by_stage(part: torch.Tensor, share: torch.Tensor, stages: int) -> torch.Tensor:
    """The share of each stage that each rank computed, over all its micro-batches."""
    earlier = (part[:, :-stages] * share[:, :-stages]).sum(1, keepdim=True)
    return (earlier + share[:, -stages:].sum(1, keepdim=True) * part[:, -stages:]).float()


def _gain(candidate: Candidate, own: Replayed, everyone: Replayed) -> Gain:
    kept = 1 - own.dropped
    return Gain(
        candidate.code,
        candidate.keys,
        step_s=float(own.seconds.mean()),
        saved=interval(lambda own_s, all_s: 1 - own_s / all_s, own.seconds, everyone.seconds),
        dropped=interval(lambda share: share, own.dropped),
        speedup=interval(lambda share, own_s, all_s: share * all_s / own_s, kept, own.seconds, everyone.seconds),
    )
