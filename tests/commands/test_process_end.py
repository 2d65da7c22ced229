"""The processes of a job end without freeing what they have loaded: peers, agents and launchers wait for them."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import started
from repository import ROOT

PROGRAM = """
import atexit, os, runpy, sys, threading, types
end_process = runpy.run_path(sys.argv[1])["end_process"]  # without the rest of the package, which loads torch
class Kept:
    def __del__(self):
        os.write(1, b"freed")
sys.modules["kept"] = types.ModuleType("kept")
sys.modules["kept"].it = Kept()
told = threading.Event()
threading.Thread(target=lambda: told.wait() and print("thread")).start()
atexit.register(print, "atexit")
print("main")
told.set()
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
RUN = ("train", "workload=synthetic", "steps=1", "faults=none", "metrics=none", "report=false", "run_dir=run")


def as_program(*words: str) -> None:
    """``python -m straggle ...``, and then what Python does at its end."""
    sys.argv = ["straggle", *words]
    try:
        runpy.run_module("straggle", run_name="__main__", alter_sys=True)
    finally:
        sys.stdout.write("frees all")
        sys.stdout.flush()


@pytest.mark.parametrize(
    ("words", "ends", "status"),
    [
        (RUN, "", 0),
        (("launch", "--nproc-per-node=1", "worker.py"), "", 0),
        (("launch", "--nproc-per-node=1", "--max-restarts=0", "worker.py"), "raise SystemExit(3)", 3),
    ],
    ids=["train", "launch", "launch fails"],
)
def test_command_of_a_job_frees_nothing_at_its_end(
    words: tuple[str, ...], ends: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / "worker.py").write_text(ends)
    with started(as_program, *words, folder=tmp_path) as command:
        assert command.status() == status, command.log.read_text()
    assert "frees all" not in command.log.read_text()


# -- such an end


def ended(how: str, **options: object) -> subprocess.CompletedProcess[str]:
    path = str(ROOT / "straggle" / "commands" / "process_end.py")
    command = [sys.executable, "-c", PROGRAM + how, path]
    return subprocess.run(command, env=ENVIRONMENT, text=True, timeout=200, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    ("how", "printed"),
    [("sys.exit(3)", ["main", "thread", "atexit", "freed"]), ("end_process(3)", ["main", "thread", "atexit"])],
)
def test_process_waits_for_its_threads_and_runs_what_is_registered_but_frees_nothing(
    how: str, printed: list[str]
) -> None:
    done = ended(how, stdout=subprocess.PIPE)
    assert (done.returncode, sorted(done.stdout.split())) == (3, sorted(printed))


@pytest.mark.parametrize(("how", "status"), [("end_process(0)", 120), ("end_process(3)", 3)])
def test_output_that_nobody_takes_is_no_success(how: str, status: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert ended(how, stdout=writer).returncode == status
    finally:
        os.close(writer)
