"""The metrics of numbers that are declared with one."""

import math

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from straggle.observe.metric_series import Series
from straggle.report import RankReport, StepReport
from straggle.schema import numbers_of


def value_of(series, metric):
    """What Prometheus would read; ``metric`` as it is declared."""
    name = f"straggle_{metric.name}{'_total' if metric.kind == 'counter' else ''}"
    labels = {"rank": "2"} | dict([metric.label] if metric.label else [])
    families = text_string_to_metric_families(generate_latest(series.registry).decode())
    samples = (sample for family in families for sample in family.samples)
    return next(sample.value for sample in samples if sample.name == name and sample.labels == labels)


def test_counter_is_the_sum_of_a_number_over_steps_and_gauge_its_last_value():
    series, exported = Series(2), [own for own in numbers_of(RankReport) if own.metric]
    needed = {"rank": 2, "compute_s": 1.0, "wait_s": 0.0, "reach": 1.0, "stages": (), "stage_s": ()}
    for step in (0, 10):
        numbers = {own.name: step + place + 1 for place, own in enumerate(exported)}
        series.add(RankReport(**needed | numbers))
    for place, own in enumerate(exported):
        last = 10 + place + 1
        assert value_of(series, own.metric) == (last + place + 1 if own.metric.kind == "counter" else last)


def test_numbers_of_a_step_are_exported_too():
    series = Series(2)
    for deadline_s, skipped in ((1.0, True), (math.inf, False), (2.0, True)):
        series.add(StepReport(0, 1.0, deadline_s, (), (), skipped=skipped))
    values = {own.name: value_of(series, own.metric) for own in numbers_of(StepReport) if own.metric}
    assert (values["deadline_s"], values["skipped"], values["pool_parts"]) == (2.0, 2.0, 0.0)
