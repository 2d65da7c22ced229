"""Real replicas are compared while they are trained: one that differs is named, one that is only behind is not."""

import logging

import pytest
import torch
from ranks import run_forked, staged
from training import Signals, features, mlp

from straggle import FixedDeadline, LateHandling, Merge


def drift(rank, at_step, num_steps, check_every):
    """Rank 1 changes one of its parameters by hand before ``at_step``."""
    module = mlp(seed=rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("straggle.loop.step_warnings").addHandler(handler)
    reports = []
    with staged(module, merge=Merge(check_every=check_every)) as model:
        for number in range(num_steps):
            if number == at_step and rank == 1:
                with torch.no_grad():
                    module[0].weight[0, 0] += 1e-6
            with model.step():
                model(features(rank, number)).square().mean().backward()
            reports.append(model.last_report.different_ranks)
            optimizer.step()
            optimizer.zero_grad()
    return reports, warnings


def test_parameter_changed_by_hand_is_found_on_all_ranks_and_rank_0_warns():
    results = run_forked(drift, 3, 4, 8, 3)
    expected = [None, None, None, (), None, None, (1,), None]
    assert [reports for reports, _ in results] == [expected] * 3
    assert [len(warnings) for _, warnings in results] == [1, 0, 0]
    assert "step 6: the parameters of ranks [1]" in results[0][1][0]


def test_replicas_are_not_compared_where_that_is_off():
    for reports, warnings in run_forked(drift, 2, 1, 4, 0):
        assert reports == [None] * 4
        assert warnings == []


def fall_behind(rank, place):
    """Rank 2 is stuck from step 3 until step 6 is merged, while every step compares parameters."""
    module = mlp(seed=rank)
    signals = Signals()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    stuck, entered = [rank == 2], []

    def hang(*_):
        if stuck[0] and entered[-1] == 3:
            stuck[0] = False
            signals.wait("merged 6")

    module[2].register_forward_pre_hook(hang if place == "forward" else lambda *_: None)
    reports = []
    options = {
        "deadline": FixedDeadline(0.2),
        "late_handling": LateHandling(grace_s=0.0),
        "merge": Merge(check_every=1),
    }
    with staged(module, **options) as model:
        for number in range(10):
            entered.append(number)
            if place == "data":
                hang()
            with model.step():
                model(features(rank, number)).square().mean().backward()
            reports.append(model.last_report)
            if rank == 0:
                signals.send(f"merged {number}")
            optimizer.step()
            optimizer.zero_grad()
    return [(report.different_ranks, report.ranks[2].stood_in) for report in reports]


@pytest.mark.parametrize("place", ["data", "forward"])
def test_rank_that_is_behind_does_not_count_as_different(place):
    results = run_forked(fall_behind, 3, place)
    assert {tuple(reports) for reports in results} == {tuple(results[0])}
    assert [different for different, _ in results[0]] == [None] + [()] * 9
    assert all(stood_in for _, stood_in in results[0][3:7])
