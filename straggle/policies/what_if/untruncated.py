"""What late ranks would have taken, if no rank had stopped them or stood in for them.

One assumption answers it everywhere: a late rank goes on from the last thing that it finished, at its usual pace, and
had not finished the next one when it was stopped. Its usual pace is so many times that of its peers in the same work;
if nothing but this step is known, it is the pace that it had in it. `untruncated_time` is for a rank in one step,
`untruncated_times` for many steps, unit by unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from straggle.policies.history import Progress

_MORE = 1.25  # a stopped rank is assumed to need so many times the time that it had


class Mark(NamedTuple):
    """A place in a rank's work: the ``share`` that is done there, and when the rank came to it (NaN: it did not)."""

    share: float
    at_s: float


@dataclass(frozen=True)
class UntruncatedTime:
    """Seconds of a rank's own work in a step; NaN: it never entered. ``at_least``: it was late, and may take more."""

    seconds: float
    at_least: bool = False


def untruncated_time(
    own_s: float, marks: Sequence[Mark], usual_s: float = math.nan, *, is_stuck: bool = False
) -> UntruncatedTime:
    """The time of a rank that was stopped after ``own_s`` seconds; ``marks`` in the order of its work.

    ``usual_s``: what it usually takes for all of this work; NaN: its pace until the last mark that it passed counts, or
    until the next one, to which it had not come. ``is_stuck``: it stands still since that mark, so that all of the rest
    begins only now.
    """
    marks = [mark for mark in marks if mark.share > 0]
    passed = [mark for mark in marks if not math.isnan(mark.at_s)]
    if math.isnan(usual_s):
        at_its_pace = [mark.at_s / mark.share for mark in passed[-1:]]
        ahead = [own_s / mark.share for mark in marks if math.isnan(mark.at_s)]
        return UntruncatedTime(max([own_s, *at_its_pace, *ahead[:1]]), at_least=not passed)
    last = passed[-1] if passed else Mark(0.0, 0.0)
    return UntruncatedTime(max(own_s, (own_s if is_stuck else last.at_s) + (1 - last.share) * usual_s))


def untruncated_step(
    compute_s: Sequence[float],
    finished: Sequence[bool],
    num_microbatches: Sequence[int],
    microbatch_s: Sequence[Sequence[float]],
    stage_s: Sequence[Sequence[float]],
) -> list[UntruncatedTime]:
    """For each rank the time of all its own work in one step.

    A rank's marks are the ends of its micro-batches (``microbatch_s``) and, in the last of these, of the stages
    (``stage_s``): where these lie is known from the ranks that finished.
    """
    after: list[list[float]] = [[] for _ in stage_s[0]]  # micro-batches' time that is left after each stage
    for rank in (rank for rank, done in enumerate(finished) if done and compute_s[rank] > 0):
        for stage, at_s in enumerate(stage_s[rank]):
            if not math.isnan(at_s):
                after[stage].append(num_microbatches[rank] * (1 - at_s / compute_s[rank]))
    left = [median(seen) if seen else 1.0 for seen in after]
    return [
        UntruncatedTime(own_s)
        if done or math.isnan(own_s)
        else untruncated_time(own_s, [*_microbatch_marks(microbatch_s[rank], m), *_stage_marks(stage_s[rank], left, m)])
        for rank, (own_s, done, m) in enumerate(zip(compute_s, finished, num_microbatches, strict=True))
    ]


def _microbatch_marks(microbatch_s: Sequence[float], num_microbatches: int) -> list[Mark]:
    """Marks of each micro-batch but the last; if there are more micro-batches than times, several share one."""
    slots, marks = len(microbatch_s), list[Mark]()
    for slot in range(min(num_microbatches, slots)):
        done = slot + 1 if num_microbatches <= slots else -(-(slot + 1) * num_microbatches // slots)
        marks.append(Mark(done / num_microbatches, microbatch_s[slot]))
    return marks[:-1]


def _stage_marks(stage_s: Sequence[float], left: Sequence[float], num_microbatches: int) -> list[Mark]:
    """Marks of each stage; ``left``: micro-batches' time that is left after it."""
    return [Mark(1 - after / num_microbatches, at_s) for after, at_s in zip(left, stage_s, strict=True)]


def untruncated_times(progress: Progress, compute_s: Tensor) -> Tensor:
    """``progress.unit_s`` with the times that a late rank would have taken for what it did not finish.

    Usual are its peers' typical times, multiplied by its slowness in what it did finish; ``compute_s`` (steps, ranks)
    is when it was stopped. If it finished nothing, only that is known: it is taken to need a quarter more. So a rank
    that comes to its first unit in its quickest steps alone is not taken to be that quick. In such a step a rank that
    is no slower otherwise did not end just when it was stopped: it is taken to have needed more by as much as its times
    vary, a quarter at most (`_beyond`). Gives (steps, ranks, units), NaN if a rank did not enter a step.
    """
    seen = _seen(progress, compute_s)
    slowness = seen.slowness.where(~seen.slowness.isnan(), (_MORE * seen.at_least).clamp(min=1.0))
    left_s = (seen.typical_s * slowness.unsqueeze(1)).where(seen.missing, 0.0)
    # the first missing one did not end before the rank was stopped; NaN if it never entered
    stopped_s = (compute_s.to(left_s) * (1 + seen.beyond)).unsqueeze(-1)
    wait_s = (stopped_s - seen.known_s - left_s).clamp(min=0.0).where(seen.first_missing, 0.0)
    return seen.known_s + (left_s + wait_s).cumsum(-1)


def any_unheard(progress: Progress, compute_s: Tensor, times: float) -> bool:
    """Whether next to nothing is known of some rank: it finished nothing, and was stopped before ``times`` as long.

    ``compute_s`` (steps, ranks): when ranks were stopped. A rank that has entered no step, or has no data, does not
    count.
    """
    seen = _seen(progress, compute_s)
    return bool((seen.slowness.isnan() & (seen.at_least > 0) & (seen.at_least < times)).any())


class _Seen(NamedTuple):
    """What some steps show: (steps, ranks, units) of ``known_s`` and the masks, (units,), and (ranks,) of the rest.

    ``slowness``: how much longer than its peers a rank takes, the median over steps; NaN: it finished nothing in any.
    ``at_least``: how much longer than they for their first unit it had taken when it was stopped; 0: it never was.
    ``beyond`` (steps, ranks): see `_beyond`.
    """

    known_s: Tensor
    missing: Tensor
    first_missing: Tensor
    typical_s: Tensor
    slowness: Tensor
    at_least: Tensor
    beyond: Tensor


def _seen(progress: Progress, compute_s: Tensor) -> _Seen:
    used = progress.unit_share > 0
    unit_s = progress.unit_s.where(used, math.nan)  # a micro-batch that comes in stages has a time of its own, too
    known_s = unit_s.nan_to_num(0.0).cummax(-1).values  # of a unit that the rank does not have: the one before
    spent_s = unit_s - torch.cat([torch.zeros_like(unit_s[..., :1]), known_s[..., :-1]], -1)
    typical_s = spent_s.flatten(0, 1).nanmedian(0).values.nan_to_num(0.0)
    slower = (spent_s / typical_s.clamp(min=1e-9)).nanmedian(2).values  # in each step
    missing = unit_s.isnan() & used
    first_missing = missing & (missing.cumsum(-1) == 1)
    stopped_s = compute_s.to(unit_s).nan_to_num(0.0).unsqueeze(-1).where(first_missing & (typical_s > 0), 0.0)
    at_least = (stopped_s / typical_s.clamp(min=1e-9)).amax(2)
    heard = slower.nanmedian(0).values
    # a rank that finishes something only if it is quick is slower than in those steps
    unheard = slower.isnan() & (at_least > 0)
    with_unheard = slower.where(~unheard, (_MORE * at_least).clamp(min=1.0)).nanmedian(0).values
    slowness = torch.maximum(heard, with_unheard)  # NaN if nothing was heard
    return _Seen(known_s, missing, first_missing, typical_s, slowness, at_least.amax(0), _beyond(slower, unheard))


def _beyond(slower: Tensor, unheard: Tensor) -> Tensor:
    """The share by which a rank needed more than it was given, in steps in which it finished nothing (``unheard``).

    ``slower``, (steps, ranks): how much longer than its peers it took, NaN if unknown. Its spread shows how
    far beyond. Nothing is added if some rank finishes nothing in most steps: a threshold is for that one, and
    what the others lose by noise would only shorten it.
    """
    entered = unheard | ~slower.isnan()
    if bool((2 * unheard.sum(0) > entered.sum(0)).any()):
        return torch.zeros_like(slower)
    logs = slower.clamp(min=1e-9).log()
    spread = (logs - logs.nanmean(0)).square().nanmean(0).sqrt().nan_to_num(0.0)
    return spread.clamp(max=_MORE - 1) * unheard


def untruncated_stages(stage_s: Tensor, compute_s: Tensor, stage_share: Tensor) -> Tensor:
    """`untruncated_times` if only the stages' times, (steps, ranks, stages), are known, as from a trace."""
    weight, at_once = torch.ones_like(compute_s), torch.zeros_like(compute_s)
    share = stage_share.expand_as(stage_s)
    progress = Progress(stage_s, share, share, stage_share, weight, at_once, at_once[:, 0])
    return untruncated_times(progress, compute_s)


def untruncated_entries(progress: Progress, compute_s: Tensor) -> Tensor:
    """``progress.entered_s``, (steps, ranks), as it would have been, if no rank had been stood in for.

    A rank that never entered a step (``compute_s``, (steps, ranks), is NaN) had its full delay in that step: what it
    still took of it in the following one counts to the first. A rank that is no member entered at once.
    """
    never = compute_s.isnan() & (progress.weight > 0)
    entered_s = progress.entered_s.nan_to_num(0.0)
    if not never.any():
        return entered_s
    for step in range(len(entered_s) - 2, -1, -1):
        more_s, own = entered_s[step + 1].clone(), never[step]
        entered_s[step] += more_s.where(own, 0.0)
        entered_s[step + 1] = more_s.where(~own, 0.0)
    return entered_s
