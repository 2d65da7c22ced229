"""The frame of the experiments: its command line, its table, its exit status."""

import json
import sys
from types import ModuleType

import pytest

from straggle.experiments import Line, Result
from straggle.experiments.__main__ import arguments, main

FINE = Line("a", "1 +- 0.1", "1.05", True)
TOLD = Line("b", "", "7")
WRONG = Line("c", "2", "3", False)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "give one or more of"),
        (["e999"], "no experiment e999"),
        (["quik=true"], "unknown key quik"),
        (["quick=yes"], "choose one of true, false"),
    ],
)
def test_wrong_command_line_is_refused_with_what_is_valid(words, complaint):
    with pytest.raises(ValueError, match=complaint):
        arguments(words)


@pytest.mark.parametrize(("lines", "status"), [((FINE, TOLD), 0), ((FINE, WRONG), 1), ((TOLD,), 0)])
def test_exit_status_says_whether_all_came_out_as_expected(lines, status, monkeypatch, tmp_path, capsys):
    module = ModuleType("straggle.experiments.e0")
    module.run = lambda quick, out: Result(f"quick: {quick}", lines, ("why",), out / "E0.png")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("straggle.experiments.__main__.names", lambda: ["e0"])
    monkeypatch.setattr(sys, "argv", ["experiments", "E0", "quick=true", f"out={tmp_path / 'new'}"])
    assert main() == status
    written = json.loads((tmp_path / "new" / "E0.json").read_text())
    assert written["ok"] is (status == 0)
    assert [line["measured"] for line in written["lines"]] == [line.measured for line in lines]
    assert written["plot"] == "E0.png"
    printed = capsys.readouterr().out
    assert "E0: quick: True" in printed
    assert "why" in printed
    assert all(line.measured in printed for line in lines)
