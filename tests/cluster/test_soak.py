"""A quarter of a minute of the long run that anyone can repeat for hours."""

import subprocess
import sys

import pytest
from repository import ROOT


@pytest.mark.slow
def test_a_quarter_of_a_minute_of_faults_leaves_equal_ranks_and_nothing_behind() -> None:
    command = [sys.executable, "benchmarks/members.py", "soak", "--minutes=0.25", "--changes=12", "--preload"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert "different at 0" in ended.stdout
