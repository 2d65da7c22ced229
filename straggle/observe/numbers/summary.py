"""The fields of ``summary.json``: the numbers of the run's page, and what only the run itself knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from straggle.observe.numbers.goodput import Goodput
from straggle.observe.numbers.registry import NUMBERS, fields_of
from straggle.observe.numbers.run import run_of
from straggle.observe.numbers.run_numbers import numbers_of
from straggle.report import StepReport

FIELDS = fields_of(NUMBERS.values())


def summarize(
    reports: Sequence[StepReport],
    scores: Mapping[str, float],
    hashes: Sequence[str],
    samples_per_step: int,
    goodput: Goodput | None = None,
) -> dict[str, Any]:
    """The run in numbers, as plain JSON values: `FIELDS`.

    ``scores`` are those on held-out data, ``hashes`` each rank's parameters. ``samples_per_step``: the number of a
    rank's samples in a step of weight 1. ``goodput``: of all the run, if ``reports`` are those since a `resume`.
    """
    run = run_of(reports)
    run = run if goodput is None else replace(run, goodput=goodput)
    numbers = numbers_of(run)
    dropped = np.where(run.ranks["absent"] == 1, 0.0, 1 - run.ranks["reach"]) * run.ranks["weight"] * samples_per_step
    of_job = {
        "dropped_samples_per_rank": [round(samples) for samples in np.nansum(dropped, axis=0).tolist()],
        **_shadow(reports[run.warmup :]),
        **{f"validation_{name}": scores[name] for name in ("loss", "accuracy") if name in scores},
        "parameters_sha256": list(hashes),
    }
    known = {
        name: of_job[name] if one.of is None else one.of(run, numbers)
        for name, one in NUMBERS.items()
        if one.of is not None or name in of_job
    }
    return {name: known[name] for name in FIELDS if name in known}


def _shadow(reports: Sequence[StepReport]) -> dict[str, float | None]:
    """What a policy that stopped no rank would have made of these steps."""
    shadows = [report.shadow for report in reports if report.shadow is not None]
    return {
        "shadow_dropped_share": fmean(shadow.dropped_share for shadow in shadows) if shadows else None,
        "shadow_step_seconds_mean": fmean(shadow.seconds for shadow in shadows) if shadows else None,
    }
