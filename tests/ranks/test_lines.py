"""A line that cannot be written is left out and reported once; a file with such a gap is read, or refused with why."""

import contextlib
import json
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_command, run_forked, staged
from repository import ROOT
from training import TINY, features, mlp

from straggle.observe.findings import advise
from straggle.observe.lines import LineWriter
from straggle.observe.numbers.run import read_run, read_steps
from straggle.observe.numbers.run_numbers import numbers_of
from straggle.observe.recording import DecisionWriter, read_recording
from straggle.observe.trace import TraceWriter, read_trace
from straggle.replay.wing import Decision


@contextlib.contextmanager
def room_for(num_bytes):
    """No file of this process can grow beyond this size, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_line_without_room_is_left_out_as_a_whole_and_the_ones_after_it_are_written(tmp_path, caplog):
    path = tmp_path / "new" / "lines"
    writer = LineWriter(path)
    assert writer.write("first")
    with room_for(10):
        assert not writer.write("a long one, of which a part would go in")
        assert not writer.write("another")
        assert writer.write("of")  # this one has room
    assert writer.write("last")
    assert writer.num_lost == 2
    assert path.read_text() == "first\nof\nlast\n"
    writer.close()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert f"{path} cannot be written ([Errno 27] File too large): training goes on" in told[0]
    assert told[1] == f"{path} lacks 2 lines, which could not be written"


def test_file_that_cannot_be_opened_is_told_once_and_writing_goes_on(tmp_path, caplog):
    (tmp_path / "file").touch()
    writer = LineWriter(tmp_path / "file" / "lines")
    assert not writer.write("first")
    assert not writer.write("second")
    assert writer.num_lost == 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def decided(step):
    return Decision(step, 1, None, False)


def test_recording_that_lacks_a_step_is_refused_with_the_step_and_the_reason(tmp_path):
    path = tmp_path / "rank0.jsonl"
    with DecisionWriter(path) as writer:
        for step in range(5):
            with room_for(path.stat().st_size if step == 3 else resource.RLIM_INFINITY):
                writer.write(decided(step), ([0], [1.0]))
    assert len(path.read_text().splitlines()) == 1 + 4
    with pytest.raises(ValueError, match=f"{path}: .* lacks step 3: .*could not be written, as on a full disk"):
        read_recording(path)


def test_recording_whose_first_line_had_no_room_begins_when_there_is(tmp_path):
    path = tmp_path / "rank0.jsonl"
    with DecisionWriter(path) as writer:
        with room_for(0):
            writer.write(decided(0), ([0], [1.0]))
        writer.write(decided(1), ([0], [1.0]))
    with pytest.raises(ValueError, match="lacks step 0"):
        read_recording(path)


def test_recording_of_a_killed_rank_goes_without_its_half_line_and_garbage_is_refused(tmp_path):
    path = tmp_path / "rank0.jsonl"
    with DecisionWriter(path) as writer:
        for step in range(3):
            writer.write(decided(step), ([0], [1.0]))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 3, "num_g')
    assert [decision.step for decision in read_recording(path).decisions] == [0, 1, 2]
    path.write_bytes(whole + b"nonsense\n")
    with pytest.raises(ValueError, match="not a recording"):
        read_recording(path)


def train_steps(rank):
    """What six steps of one rank report."""
    reports = []
    with staged(mlp()) as model:
        for step in range(6):
            with model.step():
                model(features(rank, step)).sum().backward()
            reports.append(model.last_report)
    return reports


def test_trace_with_a_gap_is_read_and_the_report_names_what_it_lacks(tmp_path):
    (reports,) = run_forked(train_steps, 1)
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as trace:
        for report in reports:
            with room_for(path.stat().st_size if report.step in (2, 3) else resource.RLIM_INFINITY):
                trace.write(report)
    assert [record["step"] for record in read_trace(path)] == [0, 1, 4, 5]
    run = read_run(tmp_path)
    sentence = next(sentence for sentence in advise(run, numbers_of(run)) if "lacks" in sentence)
    assert sentence.startswith("The trace lacks 33% of its steps (2 of 6), the first of them step 2: they could not")


def test_line_that_was_cut_in_the_middle_of_a_trace_is_left_out(tmp_path):
    (reports,) = run_forked(train_steps, 1)
    path = tmp_path / "trace.jsonl"
    lines = [json.dumps(report.as_dict()) + "\n" for report in reports]
    lines[3] = lines[3][:40] + "?\n"
    path.write_text("".join(lines))
    run = read_run(tmp_path)
    assert run.step.tolist() == [0, 1, 2, 4, 5]
    assert read_steps(run, [3])[3].step == 4


@pytest.mark.parametrize("left", [b'{"step": 4, "sec', b"\0" * 100, b"\0" * 100 + b"\n", b""])
def test_trace_goes_on_before_whatever_a_power_failure_left_at_its_end(tmp_path, left):
    (reports,) = run_forked(train_steps, 1)
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as trace:
        for report in reports[:4]:
            trace.write(report)
    with path.open("ab") as file:
        file.write(left)
    with TraceWriter(path, first_step=5) as trace:
        trace.write(reports[5])
    assert [record["step"] for record in read_trace(path)] == [0, 1, 2, 3, 5]


def test_trace_that_goes_on_is_never_without_its_earlier_steps(tmp_path):
    """It is cut where the run goes on, not written again: a death in between would lose all of it."""
    (reports,) = run_forked(train_steps, 1)
    path = Path(tmp_path / "trace.jsonl")
    with TraceWriter(path) as trace:
        for report in reports:
            trace.write(report)
    with room_for(0):
        TraceWriter(path, first_step=4).close()
    assert [record["step"] for record in read_trace(path)] == [0, 1, 2, 3]


# -- complete runs


KEYS = (*TINY, "faults=none", "metrics=none", "report=false")


@pytest.mark.slow
def test_run_on_a_full_disk_comes_to_its_end_and_its_status_says_that_nothing_was_saved(tmp_path):
    keys = (*KEYS, "workload.width=64", "steps=30", "checkpoint_every=10", "run_dir=run")
    command = ["bash", "-c", 'ulimit -f 15 && exec "$@"', "bash", sys.executable, "-m", "straggle", "train", *keys]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "checkpoint run/checkpoint of step 10 not saved: run/checkpoint/step10/" in said
    assert "there is no complete one; training goes on" in said
    assert said.count("run/trace.jsonl cannot be written ([Errno 27] File too large): training goes on") == 1
    assert "30 steps" in said  # the summary
    assert done.stderr.strip().splitlines()[-1].startswith("checkpoint run/checkpoint of step 30 not saved")
    assert "Traceback" not in said
    assert 0 < len(list(read_trace(tmp_path / "run" / "trace.jsonl"))) < 30
    assert not list((tmp_path / "run" / "checkpoint").glob("step*/*"))


@pytest.mark.slow
def test_replay_of_a_recording_that_lacks_steps_or_ranks_is_refused(tmp_path):
    def train(*keys, status=0):
        return run_command("train", 1, *KEYS, *keys, folder=tmp_path, status=status)

    train("steps=6", "run_dir=run")
    path = tmp_path / "run" / "decisions" / "rank0.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    assert "the recording has 4 of 6 steps" in train("replay=run", "run_dir=again", status=2)
    train("replay=run", "run_dir=again", "steps=4")
    path.with_name("rank1.jsonl").write_text(path.read_text())
    refused = train("replay=run", "run_dir=again", "steps=4", status=2)
    assert "recorded on 2 ranks, and this run has 1" in refused
