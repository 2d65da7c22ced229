"""The frame of the experiments: its command line, its table, its exit status."""

import json
import math
from itertools import islice
from statistics import fmean

import pytest
import torch

from experiments import _logical, e6, e7
from experiments.__main__ import arguments, perform
from experiments._intervals import difference_interval, mean_interval
from experiments.e1 import threshold
from experiments.e3 import expected_slowest
from experiments.e9 import expected_s
from experiments.result import Line, Result
from straggle.lab.workloads.digits import Digits

FINE = Line("a", "1 +- 0.1", "1.05", True)
TOLD = Line("b", "", "7")
WRONG = Line("c", "2", "3", False)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "give one or more of"),
        (["e999"], "no experiment E999"),
        (["quik=true"], "unknown key quik"),
        (["quick=yes"], "choose one of true, false"),
    ],
)
def test_wrong_command_line_is_refused_with_what_is_valid(words, complaint):
    with pytest.raises(ValueError, match=complaint):
        arguments(words)


@pytest.mark.parametrize(("lines", "ok"), [((FINE, TOLD), True), ((FINE, WRONG), False), ((TOLD,), True)])
def test_what_came_out_is_printed_and_written(lines, ok, tmp_path, capsys):
    def experiment(quick):
        return Result(f"quick: {quick}", lines, ("why",))

    assert perform("e0", experiment, quick=True, out=tmp_path) is ok
    written = json.loads((tmp_path / "E0.json").read_text())
    assert written["ok"] is ok
    assert [line["measured"] for line in written["lines"]] == [line.measured for line in lines]
    printed = capsys.readouterr().out
    assert "E0: quick: True" in printed
    assert "why" in printed
    assert all(line.measured in printed for line in lines)


def literal_threshold(t, overhead_s, first):
    """The rule as it is written, in loops; of several equally good thresholds the longest."""
    a = t.cumsum(-1)
    best = 0.0, 0.0, -math.inf
    for tau in torch.linspace(float(a[..., first:].min()), float(a.max()), 200, dtype=a.dtype):
        gains, drops = [], []
        for step, overhead in zip(a, overhead_s.tolist(), strict=True):
            slowest, before = float(step.max()), step[step < tau]
            saved = (slowest - (float(before.max()) if len(before) else 0.0)) / (slowest + overhead)
            drops.append(float((step >= tau).sum()) / step.numel())
            gains.append((1 - drops[-1]) / (1 - saved) - 1 if saved < 1 else -1.0)
        if fmean(gains) >= best[-1]:
            best = float(tau), fmean(drops), fmean(gains)
    return best


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 2, 3), (3, 1, 6), (2, 4, 5), (4, 3, 12), (8, 16, 12), (5, 7, 20), (1, 64, 8)]
)
@pytest.mark.parametrize("overhead", [0.0, 3.0])
def test_threshold_is_that_of_the_rule_as_it_is_written(shape, overhead):
    generator = torch.Generator().manual_seed(sum(shape))
    for spread in (0.1, 0.5, 2.0):
        t = (torch.randn(shape, generator=generator, dtype=torch.float64) * spread).exp()
        overhead_s = overhead * torch.rand(shape[0], generator=generator, dtype=torch.float64)
        first = min(5, shape[-1] - 1)
        chosen = threshold(t, overhead_s, first)
        expected = pytest.approx(literal_threshold(t, overhead_s, first), abs=1e-5)
        assert (chosen.tau_s, chosen.dropped, chosen.gain) == expected


def test_closed_forms_that_experiments_are_held_to():
    assert [round(expected_s(k, n), 2) for k, n in ((6, 6), (5, 6), (100, 100), (96, 100))] == [3.45, 2.45, 6.19, 4.10]
    draws = torch.randn(20000, 200, generator=torch.Generator().manual_seed(0)) * 0.5
    assert expected_slowest(200, 3.0, 0.5, microbatches=1) == pytest.approx(
        3.0 + float(draws.amax(1).mean()), rel=0.002
    )


def share(lateness, steps=400, num_ranks=6, num_units=6):
    """In which share of the steps each rank finishes each unit."""
    drawn = islice(lateness(num_ranks, num_units, torch.Generator().manual_seed(0)), steps)
    return torch.stack(list(drawn)).float().mean(0)


def test_late_ranks_of_the_experiments_reach_a_unit_as_often_as_they_should():
    uniform = share(_logical.same_ranks(4, e7.uniform), 4000)
    assert uniform[:2].unique().tolist() == [1.0]
    assert uniform[2:].mean(0).tolist() == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6], abs=0.02)
    poisson = share(_logical.same_ranks(6, e7.poisson), 4000).mean(0)
    assert poisson.tolist() == pytest.approx([1, 0.950, 0.801, 0.577, 0.353, 0.185], abs=0.02)
    assert share(_logical.same_ranks(1, e6.half))[5].tolist() == [1, 1, 1, 0, 0, 0]
    assert bool(share(e6.by_deadline).all())
    for lateness in (e6.other_ranks, e6.other_ranks_per_unit):
        assert share(lateness(2), 2000).flatten().tolist() == pytest.approx([4 / 6] * 36, abs=0.05)


def test_seldom_finished_units_count_by_the_inverse_of_their_chance_in_the_rounds_before():
    finished = [torch.tensor([[True, round_ % 2 == 0, round_ == 0]]) for round_ in range(61)]
    weights = [e7.by_inverse_chance(each, finished[:round_]).tolist()[0] for round_, each in enumerate(finished)]
    assert weights[0] == [1.0, 1.0, 1.0]
    assert weights[2] == weights[60] == [1.0, 2.0, 0.0]
    assert e7.by_inverse_chance(torch.tensor([[True, True, True]]), finished[1:]).tolist()[0] == [1.0, 2.0, 10.0]


@pytest.mark.parametrize("by_class", [False, True])
def test_each_logical_rank_goes_through_samples_of_its_own(by_class):
    workload = Digits(channels=4, depth=1)
    samples = _logical.of_their_own(workload, 5, 8, 1, by_class=by_class)
    epoch = torch.stack([samples(step) for step in range(workload.num_samples // 40)], 1).flatten(1)
    assert len(epoch.unique()) == epoch.numel()
    classes = [len(workload.batch(part)[1].unique()) for part in epoch]
    assert max(classes) <= 4 if by_class else classes == [10] * 5


def test_interval_of_a_mean_is_students():
    values = [1.0, 2.0, 4.0, 5.0]
    for count, quantile in ((4, 3.182), (8, 2.365), (20, 2.093)):
        sample = (values * 5)[:count]
        expected = quantile * torch.tensor(sample).std().item() / count**0.5
        assert mean_interval(sample).half == pytest.approx(expected, rel=2e-3)
    assert mean_interval(values).value == 3.0
    assert f"{difference_interval([2.0, 3.0], [1.0, 2.0]):+.1f}" == "+1.0 +- 0.0"
