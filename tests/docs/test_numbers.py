"""The pages' rows of numbers of a rank, and of metrics, are those that the numbers are declared with.

A row that lacks is in the failure, to be copied into the page.
"""

from pathlib import Path

import pytest

import straggle
from straggle.observe.metric_series import COUNTERS, GAUGES
from straggle.report import RankReport, StepReport
from straggle.schema import numbers_of

DOCS = Path(straggle.__file__).parents[1] / "docs"
KEPT = {"rank", "compute_s", "wait_s", "reach", "late", "stood_in"}  # fields with a star
OF_BOTH = {"weight", "reach"}  # names that a stage, or a shadow, has as well


def row_of(number):
    kept = " *" if number.name in KEPT else ""
    return f"| `{number.name}`{kept}{' (of a rank)' if number.name in OF_BOTH else ''} | {number.text} |"


@pytest.mark.parametrize("number", numbers_of(RankReport), ids=lambda number: number.name)
def test_number_of_a_rank_has_its_row_in_the_page_of_the_trace(number):
    assert number.text
    assert row_of(number) in (DOCS / "configuration.md").read_text().splitlines()


DECLARED = [own.metric for report in (StepReport, RankReport) for own in numbers_of(report) if own.metric]


@pytest.mark.parametrize("metric", DECLARED, ids=lambda metric: metric.name)
def test_metric_of_a_number_is_exported_with_its_text_and_has_a_row_in_its_page(metric):
    assert metric.text == {"counter": COUNTERS, "gauge": GAUGES}[metric.kind][metric.name]
    name = f"straggle_{metric.name}{'_total' if metric.kind == 'counter' else ''}"
    label = f" `{metric.label[0]}` " if metric.label else " "
    rows = (DOCS / "metrics.md").read_text().splitlines()
    assert any(row.startswith(f"| `{name}` | {metric.kind} |{label}| ") for row in rows), (
        f"| `{name}` | {metric.kind} |{label}| {metric.text} |"
    )
