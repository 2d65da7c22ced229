"""The frame of the experiments: its command line, its table, its exit status."""

import json

import pytest
import torch

from experiments.__main__ import arguments, perform
from experiments.e1 import literal_threshold
from experiments.e3 import expected_slowest
from experiments.e9 import expected_s
from experiments.result import Line, Result
from straggle.policies.thresholds import StepTimes, choose_threshold

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
    def experiment(quick, out):
        return Result(f"quick: {quick}", lines, ("why",), out / "E0.png")

    assert perform("e0", experiment, quick=True, out=tmp_path) is ok
    written = json.loads((tmp_path / "E0.json").read_text())
    assert written["ok"] is ok
    assert [line["measured"] for line in written["lines"]] == [line.measured for line in lines]
    assert written["plot"] == "E0.png"
    printed = capsys.readouterr().out
    assert "E0: quick: True" in printed
    assert "why" in printed
    assert all(line.measured in printed for line in lines)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 2, 3), (3, 1, 6), (2, 4, 5), (4, 3, 12), (8, 16, 12), (5, 7, 20), (1, 64, 8)]
)
@pytest.mark.parametrize("overhead", [0.0, 3.0])
def test_threshold_is_that_of_the_rule_as_it_is_written(shape, overhead):
    generator = torch.Generator().manual_seed(sum(shape))
    for spread in (0.1, 0.5, 2.0):
        t = (torch.randn(shape, generator=generator, dtype=torch.float64) * spread).exp()
        overhead_s = overhead * torch.rand(shape[0], generator=generator, dtype=torch.float64)
        chosen = choose_threshold(StepTimes.entered_at_once(t.cumsum(-1), overhead_s))
        literal = literal_threshold(t, overhead_s, min(5, shape[-1] - 1))
        assert chosen.tau_s == pytest.approx(literal.tau_s)
        assert chosen.dropped == pytest.approx(literal.dropped)
        assert chosen.gain == pytest.approx(literal.gain)


def test_closed_forms_that_experiments_are_held_to():
    assert [round(expected_s(k, n), 2) for k, n in ((6, 6), (5, 6), (100, 100), (96, 100))] == [3.45, 2.45, 6.19, 4.10]
    draws = torch.randn(20000, 200, generator=torch.Generator().manual_seed(0)) * 0.5
    assert expected_slowest(200, 3.0, 0.5, microbatches=1) == pytest.approx(
        3.0 + float(draws.amax(1).mean()), rel=0.002
    )
