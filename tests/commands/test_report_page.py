"""The command that draws a page of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pages import content_of, slow_run, write_run
from ranks import run_command


@pytest.mark.slow
def test_page_of_a_real_run_agrees_with_its_summary(tmp_path: Path) -> None:
    keys = ["workload=digits", "faults=none", "steps=25", f"run_dir={tmp_path}"]
    assert f"report: {tmp_path / 'report.html'}" in run_command("train", 1, *keys, folder=tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    shown = content_of(tmp_path / "report.html").values
    names = "step_seconds_median step_seconds_mean ddp_seconds_median ddp_seconds_mean dropped_share"
    for name in [*names.split(), "loss", "validation_loss", "validation_accuracy"]:
        assert shown[name] == [pytest.approx(summary[name])]
    assert shown["late"] == [sum(summary["late_steps_per_rank"])]
    assert shown["replicas_identical"] == [True]


def test_command_writes_the_page_and_says_where(tmp_path: Path) -> None:
    write_run(tmp_path, slow_run())
    printed = run_command("report", 1, str(tmp_path), "steps=3,7", "out=deep/page.html", folder=tmp_path)
    assert printed.startswith("report: deep/page.html (")
    assert "Step 7: as asked for" in (tmp_path / "deep" / "page.html").read_text()


def test_command_refuses_in_one_line(tmp_path: Path) -> None:
    assert run_command("report", 1, str(tmp_path), folder=tmp_path, status=2) == (
        f"{tmp_path / 'trace.jsonl'}: no such file; give the run_dir of a run of straggle train or straggle.watch\n"
    )


def test_library_does_not_import_what_only_the_page_needs() -> None:
    without = "import sys; sys.modules.update(dict.fromkeys(('plotly', 'omegaconf', 'hydra', 'rich'))); import straggle"
    subprocess.run([sys.executable, "-c", without], check=True, timeout=200)
