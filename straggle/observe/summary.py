"""The fields of ``summary.json``: the numbers of the run's page, and what only the run itself knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from straggle.observe.run import run_of
from straggle.observe.run_numbers import numbers_of
from straggle.report import StepReport
from straggle.schema import described

FIELDS = {
    "steps": described("steps trained, including those before a `resume`", stable=True),
    "step_seconds_median": described("of a step; without the first tenth of the steps, at most ten", stable=True),
    "step_seconds_mean": described("the same, the mean", stable=True),
    "ddp_seconds_median": described(
        "predicted from the telemetry: the same steps under DDP, with an equal share of the samples for each rank",
        stable=True,
    ),
    "ddp_seconds_mean": described("the same, the mean"),
    "dropped_share": described(
        "share of all gradient elements, over ranks, that no backward pass delivered in time", stable=True
    ),
    "dropped_share_per_rank": described("the same for each rank", stable=True),
    "dropped_share_per_stage": described("the same for each stage"),
    "dropped_samples_per_rank": described(
        "the rank's samples times the share of its gradients that was dropped, over all steps"
    ),
    "weight_per_rank": described(
        "mean weight of the rank's steps; with `rebalance=by_speed` its samples, or micro-batches"
    ),
    "depth_bias": described(
        "share of the gradients that came in for the first stage of backward, minus that of the last stage"
    ),
    "fairness": described("Jain's index of the ranks' contributions to the model"),
    "fairness_input_stage": described("the same of the stage at the input"),
    "least_contribution": described("contribution of the rank that gave least, divided by the mean over ranks"),
    "least_contribution_input_stage": described("the same of the stage at the input"),
    "shadow_dropped_share": described(
        "with `deadline=shadow`, without the same first steps: the share that would have been dropped; null otherwise"
    ),
    "shadow_step_seconds_mean": described("the mean step then"),
    "made_late_by": described(
        "for each replica the ranks that made it late, and in how many steps; null if each rank has a copy of the model"
    ),
    "late_steps_per_rank": described("steps in which the rank was late", stable=True),
    "stood_in_steps_per_rank": described("of these, steps in which the stand-in submitted for it"),
    "absent_steps_per_rank": described("steps in which the rank was no member; they are in no other field"),
    "drawn_per_rank": described(
        "with `work=pulled`: micro-batches of a step's pool that the rank computed, on average; null otherwise"
    ),
    "put_back_per_rank": described("how many of them it gave back in all"),
    "loss": described("mean over ranks and the last 20 steps", stable=True),
    "validation_loss": described("after the last step", stable=True),
    "validation_accuracy": described("the same; only if the workload has one", stable=True),
    "parameters_sha256": described("of each rank's parameters: equal hashes, equal bit for bit", stable=True),
}


def summarize(
    reports: Sequence[StepReport], scores: Mapping[str, float], hashes: Sequence[str], samples_per_step: int
) -> dict[str, Any]:
    """The run in numbers, as plain JSON values: `FIELDS`.

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
