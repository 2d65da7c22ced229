"""Means for loggers: of what is known of each step, and with what is not finite in them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from pages import a_rank, a_step, content_of, write_run

from straggle.observe.numbers.registry import summarize
from straggle.observe.page.page import write_report
from straggle.observe.scalars import StepScalars


def test_loss_that_is_not_finite_is_in_its_mean_and_one_that_a_device_has_yet_to_tell_is_not() -> None:
    scalars = StepScalars()
    for step, loss in enumerate([1.0, math.nan, 3.0]):
        scalars.add(a_step(step, [a_rank(0)], scalars={"loss": loss}))
    assert math.isnan(scalars.take()["loss"])
    for step, loss in enumerate([math.nan, 1.0, 3.0]):
        scalars.add(a_step(step, [a_rank(0)], scalars={"loss": loss}), {"loss"} if step == 0 else ())
    assert scalars.take()["loss"] == 2.0


def test_step_of_which_a_rank_knows_nothing_is_in_no_mean() -> None:
    """As it was no member, its report has all ranks absent: that is not a step without drops."""
    scalars = StepScalars()
    scalars.add(a_step(0, [a_rank(0, whole=2), a_rank(1)]))
    expected = scalars.take()
    scalars.add(a_step(0, [a_rank(0, whole=2), a_rank(1)]))
    scalars.add(a_step(1, [a_rank(0, absent=True), a_rank(1, absent=True)], scalars={}))
    own = scalars.take()
    assert own == expected
    assert own["straggle/dropped"] > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_run_whose_loss_was_not_finite_says_so_and_has_no_better_one(bad: float, tmp_path: Path) -> None:
    losses = [*[2.0] * 20, *[bad] * 19, 0.5]
    reports = [a_step(step, [a_rank(0)], scalars={"loss": loss}) for step, loss in enumerate(losses)]
    summary = summarize(reports, {}, ["same"], 1)
    assert json.loads(json.dumps(summary, allow_nan=False))["loss"] is None
    text = content_of(write_report(write_run(tmp_path, reports))).text
    assert "The loss was not finite in 19 of 40 steps, first in step 20." in text
    # the device tells each a step later, and the first is not known in its own step
    behind = [
        a_step(step, [a_rank(0)], scalars={"loss": 2.0 if step else math.nan}, counts_behind=int(step > 0))
        for step in range(6)
    ]
    assert summarize(behind, {}, ["same"], 1)["loss"] == 2.0
