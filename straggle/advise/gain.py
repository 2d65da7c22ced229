"""What each policy would have done in the recorded steps: its own class decides, and one model predicts the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from straggle.advise.timings import Timings
from straggle.observe.intervals import Interval, prediction_interval, span, steps_interval
from straggle.observe.run import Array
from straggle.policies.auto_deadline import AutoDeadline
from straggle.policies.deadline import (
    Deadline,
    FirstK,
    LateHandling,
    QuantileDeadline,
    WaitForAll,
    next_deadline,
)
from straggle.policies.history import HistoryWindow, StepProgress
from straggle.policies.step_model import StopRules, computed_share, parts_of, simulate_step
from straggle.policies.wrappers import DropBudget

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

    def since(self, first: int) -> Replayed:
        """Without the steps before the position ``first``."""
        return Replayed(self.seconds[first:], self.dropped[first:], self.late[first:])


@dataclass(frozen=True)
class Gain:
    """``saved`` is of the mean step's seconds when all ranks are waited for, ``dropped`` of all gradient elements.

    ``speedup`` is effective: gradients per second, divided by those when all ranks are waited for. The values are those
    of the cautious replay (`replay`). The intervals reach from its low end to the high end of the other replay.
    ``surely`` is the speedup's low end for these steps alone, without the noise of future runs.
    """

    code: str
    keys: str
    step_s: float
    saved: Interval
    dropped: Interval
    speedup: Interval
    surely: float


def candidates(num_ranks: int) -> list[Candidate]:
    """The policies to try."""
    some = [
        Candidate(
            "straggle.QuantileDeadline(0.5, slack=1.2)",
            "deadline=quantile deadline.q=0.5 deadline.slack=1.2",
            QuantileDeadline(0.5, slack=1.2),
        ),
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


def gains(timings: Timings, late_handling: LateHandling | None = None, first: int = 0) -> list[Gain]:
    """All candidates, the best first: what they gain from position ``first`` on, after seeing the steps before it."""
    waiting = replay(timings, WaitForAll(), late_handling).since(first)
    found = [
        gain_of(
            one,
            replay(timings, one.policy, late_handling, cautious=True).since(first),
            replay(timings, same.policy, late_handling).since(first),
            waiting,
        )
        for one, same in zip(candidates(timings.num_ranks), candidates(timings.num_ranks), strict=True)
    ]
    return sorted(found, key=lambda gain: -gain.speedup.value)


def best(found: list[Gain]) -> Gain | None:
    """The one to use, with the surest gain; ``None`` if even that may be worth nothing, or may not be measurable."""
    seen = [gain for gain in found if gain.saved.low > 0 and gain.surely >= WORTH_IT]
    return max(seen, key=lambda gain: gain.surely, default=None)


def replay(
    timings: Timings, policy: Deadline, late_handling: LateHandling | None = None, *, cautious: bool = False
) -> Replayed:
    """Step by step: the policy sees what it would have seen, so a rank that it stops looks stopped.

    ``cautious``: a late rank stops when it finishes its running stage. The merge of what it leaves comes after that and
    overlaps with nothing, so it costs the network's time once more. Otherwise a late rank stops at once.
    """
    late_handling = late_handling or LateHandling()
    rules = replace(StopRules.of(policy, late_handling, timings.num_ranks), checks=int(cautious))
    policy.prepare(late_handling, parts_of(len(timings.stage_share), late_handling.granularity, rules.checks))
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
        would = simulate_step(unit_s[step], deadline_s, rules, begin_s, behind=stood_in)
        stood_in, network_s = would.stood_in, float(timings.network_s[step])
        if cautious and bool(would.late.any()):
            network_s *= 2
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
        decided = next_deadline(policy, window.append(compute_s, (~would.late).tolist(), progress))
        deadline_s, rules = decided.seconds, replace(rules, after_quorum_s=decided.after_quorum_s)
    return Replayed(np.array(seconds), np.array(dropped), np.array(late))


def _by_stage(part: torch.Tensor, share: torch.Tensor, stages: int) -> torch.Tensor:
    """The share of each stage that each rank computed, over all its micro-batches."""
    earlier = (part[:, :-stages] * share[:, :-stages]).sum(1, keepdim=True)
    return (earlier + share[:, -stages:].sum(1, keepdim=True) * part[:, -stages:]).float()


def gain_of(candidate: Candidate, cautious: Replayed, bold: Replayed, waiting: Replayed) -> Gain:
    """What a candidate gains over ``waiting``, by two replays of it."""

    def between(statistic: Callable[..., Array]) -> Interval:
        one, other = (
            prediction_interval(statistic, 1 - own.dropped, own.seconds, waiting.seconds) for own in (cautious, bold)
        )
        return span(one, other)

    def speedup(kept: Array, own_s: Array, all_s: Array) -> Array:
        return kept * all_s / own_s

    dropped = between(lambda kept, *_: 1 - kept)
    return Gain(
        candidate.code,
        candidate.keys,
        step_s=float(cautious.seconds.mean()),
        saved=between(lambda _, own_s, all_s: 1 - own_s / all_s),
        dropped=replace(dropped, low=max(0.0, dropped.low)),
        speedup=between(speedup),
        surely=steps_interval(speedup, 1 - cautious.dropped, cautious.seconds, waiting.seconds).low,
    )
