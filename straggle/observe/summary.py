"""The fields of ``summary.json``: the numbers of the run's page, and what only the run itself knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from straggle.observe.run import run_of
from straggle.observe.run_numbers import numbers_of
from straggle.report import StepReport


def summarize(
    reports: Sequence[StepReport], scores: Mapping[str, float], hashes: Sequence[str], samples_per_step: int
) -> dict[str, Any]:
    """The run in numbers, as plain JSON values.

    ``scores`` are those on held-out data, ``hashes`` each rank's parameters. ``samples_per_step``: the number of a
    rank's samples in a step of weight 1.
    """
    run = run_of(reports)
    numbers = numbers_of(run)
    stages = zip(run.stages, numbers.stage_share, strict=True)
    dropped = np.where(run.ranks["absent"] == 1, 0.0, 1 - run.ranks["reach"]) * run.ranks["weight"] * samples_per_step
    fairness = numbers.fairness
    return {
        "steps": int(run.step[-1]) + 1,
        "step_seconds_median": numbers.own.median_s,
        "step_seconds_mean": numbers.own.mean_s,
        "ddp_seconds_median": numbers.ddp.median_s,
        "ddp_seconds_mean": numbers.ddp.mean_s,
        "dropped_share": numbers.dropped_share,
        "dropped_share_per_rank": [1 - rank.reach for rank in numbers.ranks],
        # stages are planned after the first step
        "dropped_share_per_stage": {stage.name: 1 - share for stage, share in stages} if run.num_steps > 1 else {},
        "dropped_samples_per_rank": [round(samples) for samples in np.nansum(dropped, axis=0).tolist()],
        "weight_per_rank": np.nanmean(run.ranks["weight"], axis=0).tolist(),
        "depth_bias": fairness.depth_bias,
        "fairness": fairness.index,
        "fairness_input_stage": fairness.input_index,
        "least_contribution": fairness.least,
        "least_contribution_input_stage": fairness.input_least,
        **_shadow(reports[run.warmup :]),
        "made_late_by": [dict(ranks) for ranks in run.replicas.made_late] or None,
        "late_steps_per_rank": [rank.late for rank in numbers.ranks],
        "stood_in_steps_per_rank": [rank.stood_in for rank in numbers.ranks],
        "absent_steps_per_rank": [rank.absent for rank in numbers.ranks],
        "drawn_per_rank": [rank.drawn for rank in numbers.ranks] if numbers.pool_parts else None,
        "put_back_per_rank": [rank.put_back for rank in numbers.ranks] if numbers.pool_parts else None,
        "loss": numbers.loss,
        "validation_loss": scores["loss"],
        **({"validation_accuracy": scores["accuracy"]} if "accuracy" in scores else {}),
        "parameters_sha256": list(hashes),
    }


def _shadow(reports: Sequence[StepReport]) -> dict[str, float | None]:
    """What a policy that stopped no rank would have made of these steps."""
    shadows = [report.shadow for report in reports if report.shadow is not None]
    return {
        "shadow_dropped_share": fmean(shadow.dropped_share for shadow in shadows) if shadows else None,
        "shadow_step_seconds_mean": fmean(shadow.seconds for shadow in shadows) if shadows else None,
    }
