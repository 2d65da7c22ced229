"""A run in numbers, for its page, its advice and ``summary.json``, so that these agree."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from straggle.observe.numbers.fairness import Fairness
from straggle.observe.numbers.run import Array, Run
from straggle.report import CAUSES, Cause

Flags: TypeAlias = NDArray[np.bool_]
_LAST = 20  # steps, of which the loss is
_ENOUGH_STEPS = 5  # for a median that means something


@dataclass(frozen=True)
class Times:
    """Seconds of a run's steps, without the first ones (`Run.warmup`)."""

    median_s: float
    mean_s: float
    p95_s: float
    max_s: float


@dataclass(frozen=True)
class RankInRun:
    """One rank over all steps of the run; ``causes`` counts its late steps, and those with gradients missing otherwise.

    ``absent`` counts the steps in which it was no member: they are in no other number. ``causes`` goes by what a late
    rank was doing, or by why its gradients are missing. ``steps`` are those in which it had data. ``reach`` is the mean
    share of the gradient elements that it computed in these steps, of what it had drawn if it drew (`Run.part`).
    ``slowness`` is its median compute time, over steps that it finished, divided by the median of the other ranks'
    medians: 2.0 means that it takes twice as long. ``drawn``: micro-batches that it computed of a step's pool, in the
    mean (NaN: the ranks did not draw). ``put_back``: those that it had drawn and gave back.
    """

    rank: int
    steps: int
    late: int
    stood_in: int
    causes: Mapping[Cause, int]
    reach: float
    compute_s: float
    wait_s: float
    slowness: float
    nonfinite_steps: int
    absent: int
    drawn: float
    put_back: int

    @property
    def late_share(self) -> float:
        """Share of its steps in which it was late: 0 to 1."""
        return self.late / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class RunNumbers:
    """A complete run. ``saved_share`` is of the mean step's seconds: 0.3 means 30 % less than under DDP.

    ``pool_parts``: micro-batches in all pools that the ranks drew from; ``not_computed``: those that no rank computed.
    """

    own: Times
    ddp: Times
    saved_share: float
    seconds: float
    dropped_share: float
    late: int
    rank_steps: int
    stood_in: int
    skipped: int
    loss: float
    wait_share: float
    ranks: tuple[RankInRun, ...]
    stage_share: tuple[float, ...]
    with_deadline: int
    fairness: Fairness
    pool_parts: int
    not_computed: int


def numbers_of(run: Run) -> RunNumbers:
    """The run's numbers; NaN if the trace does not have them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of nothing is NaN, which is what we want
        return _numbers_of(run)


def _numbers_of(run: Run) -> RunNumbers:
    own, ddp = _times(run.seconds[run.warmup :]), _times(run.ddp_s[run.warmup :])
    has_data = has_data_of(run)
    return RunNumbers(
        own=own,
        ddp=ddp,
        saved_share=1 - own.mean_s / ddp.mean_s if ddp.mean_s else math.nan,
        seconds=float(np.nansum(run.seconds)),
        dropped_share=float(np.nanmean(run.dropped)),
        late=int(np.nansum(run.ranks["late"])),
        rank_steps=int(has_data.sum()),
        stood_in=int(np.nansum(run.ranks["stood_in"])),
        skipped=int(run.skipped.sum()),
        loss=math.nan if run.bad_loss[-_LAST:].any() else float(np.nanmean(run.loss[-_LAST:])),
        wait_share=float(
            np.nanmean(np.where(run.ranks["absent"] == 1, np.nan, run.ranks["wait_s"])) / np.nanmean(run.seconds)
        ),
        ranks=tuple(_rank_numbers(run, has_data, *each) for each in enumerate(map(float, _slowness(run)))),
        stage_share=tuple(map(float, run.stage_came)),
        with_deadline=int(np.isfinite(run.deadline_s).sum()),
        fairness=run.fairness,
        pool_parts=int(run.pool_parts.sum()),
        not_computed=int(run.pool_parts.sum() - np.nansum(run.ranks["parts"])),
    )


def has_data_of(run: Run) -> Flags:
    """Whether a rank was a member in the run and had data, shape (steps, ranks)."""
    return np.asarray((run.ranks["idle"] == 0) & (run.ranks["absent"] == 0))


def _times(seconds: Array) -> Times:
    return Times(
        float(np.nanmedian(seconds)),
        float(np.nanmean(seconds)),
        float(np.nanquantile(seconds, 0.95)),
        float(np.nanmax(seconds)) if np.isfinite(seconds).any() else math.nan,
    )


def _rank_numbers(run: Run, has_data: Flags, rank: int, slowness: float) -> RankInRun:
    with_data = has_data[:, rank]
    of = {name: values[with_data, rank] for name, values in run.ranks.items()}
    late = of["late"] == 1
    causes = Counter(CAUSES[int(cause)] for cause in of["cause"] if not math.isnan(cause))
    return RankInRun(
        rank=rank,
        steps=int(with_data.sum()),
        late=int(late.sum()),
        stood_in=int((of["stood_in"] == 1).sum()),
        causes=dict(causes.most_common()),
        reach=_mean(of["reach"], run.part[with_data, rank]),
        compute_s=float(np.nanmedian(of["compute_s"])),
        wait_s=float(np.nanmean(of["wait_s"])),
        slowness=slowness,
        nonfinite_steps=int((of["nonfinite"] > 0).sum()),
        absent=int((run.ranks["absent"][:, rank] == 1).sum()),
        drawn=float(np.nanmean(run.ranks["parts"][(run.pool_parts > 0) & (run.ranks["absent"][:, rank] == 0), rank])),
        put_back=int(np.nansum(run.ranks["put_back"][:, rank])),
    )


def _mean(values: Array, weights: Array) -> float:
    """Of those that are known; NaN if they weigh nothing."""
    weights = np.where(np.isfinite(values), weights, 0.0)
    total = float(weights.sum())
    return float((np.nan_to_num(values) * weights).sum()) / total if total > 0 else math.nan


def _slowness(run: Run) -> Array:
    """How many times as long as the others each rank takes, in steps that it finished; NaN if these are too few."""
    finished_s = np.where((run.ranks["late"] == 0) & has_data_of(run), run.ranks["compute_s"], np.nan)
    median_s = np.nanmedian(finished_s, axis=0)
    median_s[np.isfinite(finished_s).sum(axis=0) < _ENOUGH_STEPS] = np.nan
    others_s = np.array([np.nanmedian(np.delete(median_s, rank)) for rank in range(run.num_ranks)])
    return np.asarray(median_s / others_s)
