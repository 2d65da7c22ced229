"""`train` with members=elastic, started as `launch.sh` does: a rank is killed, and the run goes on and is complete."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from launch_jobs import loaded_launch
from ranks import Started, run_command
from training import TINY, saved_step

from straggle.members.agents import DO_NOT_RESTART
from straggle.observe.members import read_members
from straggle.observe.numbers.reader import Trace
from straggle.report import StepReport

KEYS = ("batch_size=4", "deadline=none", "metrics=none", "report=false", "members=elastic")
SEEN_AT_ONCE = ("members.suspect_s=30",)  # its launcher tells of a rank that ends, so a busy machine may take its time


def train(folder: Path, *keys: str, world_size: int, launch: tuple[str, ...] = ()) -> tuple[int, str]:
    """The status that the launcher ends with, and what was printed."""
    words = (
        "--nproc-per-node",
        world_size,
        *launch,
        "-m",
        "straggle",
        "train",
        *KEYS,
        *SEEN_AT_ONCE,
        *keys,
        "run_dir=run",
    )
    with loaded_launch(*words, folder=folder) as job:
        return ended(job)


def ended(job: Started) -> tuple[int, str]:
    status = job.status(200.0)
    return status, job.log.read_text()


def steps_of(folder: Path) -> list[StepReport]:
    return list(Trace(folder / "run" / "trace.jsonl").reports())


@pytest.mark.slow
def test_rank_that_is_killed_comes_back_and_no_step_is_lost_or_written_twice(tmp_path: Path) -> None:
    """Rank 0, which writes, of a job whose ranks draw from a pool: what it does not draw the others do."""
    # it is killed early, and the run is long enough for a busy machine to start it again
    pace = "+faults.delay={_target_: straggle.lab.faults.RandomDelay, probability: 1, seconds: 0.15}"
    keys = (*TINY, "work=pulled", "num_microbatches=2", "steps=40", "faults=kill", "~faults.pace")
    keys += (pace, "faults.kill.rank=0", "faults.kill.step=5")
    status, printed = train(tmp_path, *keys, world_size=3, launch=("--restart-delay-s", "0"))
    assert status == 0, printed
    assert "members: rank 0 left: " in printed
    assert re.search(r"absent: 0 for \d+ s \(", printed)
    reports = steps_of(tmp_path)
    assert [report.step for report in reports] == list(range(40))
    absent = [report.step for report in reports if report.absent_ranks == (0,)]
    assert absent == list(range(absent[0], absent[-1] + 1))
    # a rank that does not come is not waited for, and the others do all
    done = {report.step: sum(own.parts for own in report.ranks if not own.absent) for report in reports}
    assert {step for step, number in done.items() if number != 6} <= {absent[0]}
    assert not any(report.late_ranks for report in reports if report.absent_ranks)
    left, joined = (change for _, change in read_members(tmp_path / "run"))
    assert (left.generation, left.kinds, left.ranks) == (1, ("ended",), (1, 2))
    assert (joined.generation, joined.kinds, joined.ranks) == (2, ("joined",), (0, 1, 2))
    assert joined.step == absent[-1] + 1
    # it gives gradients again, and ends with the others' parameters
    assert sum(report.ranks[0].reach for report in reports[absent[-1] :]) > 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["absent_steps_per_rank"][0] == len(absent)
    assert len(summary["parameters_sha256"]) == 3
    assert len(set(summary["parameters_sha256"])) == 1
    # what comes before that is repeated, and nothing else
    words = ("replay=run", "run_dir=again", "metrics=none", "report=false")
    refused = run_command("train", 3, *words, "steps=40", folder=tmp_path, status=2)
    assert f"the members of the recorded run changed in step {absent[0]} " in refused
    run_command("train", 3, *words, f"steps={absent[0]}", folder=tmp_path)
    again = list(Trace(tmp_path / "again" / "trace.jsonl").reports())
    logged = [
        [{name: number for name, number in own.scalars.items() if name != "stop"} for own in run]
        for run in (again, reports[: absent[0]])
    ]
    assert logged[0] == logged[1]  # with members no scalar says whether the run is to end


@pytest.mark.slow
def test_too_few_ranks_leave_a_checkpoint_from_which_a_run_goes_on(tmp_path: Path) -> None:
    few = (*TINY, "faults=kill", "faults.kill.rank=0", "faults.kill.step=5", "members.min_ranks=2", "steps=12")
    status, printed = train(tmp_path, *few, world_size=2)
    assert status == DO_NOT_RESTART, printed
    assert "1 of 2 ranks are left (rank 0 left: its process ended by SIGKILL" in printed
    assert saved_step(tmp_path / "run") == len(steps_of(tmp_path)) == 5
    goes_on = (*KEYS, *TINY, "faults=none", "steps=12", "resume=true", "run_dir=run")
    run_command("train", 2, *goes_on, folder=tmp_path)  # without the launcher, whose server would load torch again
    assert [report.step for report in steps_of(tmp_path)] == list(range(12))
    assert len(set(json.loads((tmp_path / "run" / "summary.json").read_text())["parameters_sha256"])) == 1


def no_room_for_a_checkpoint(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "checkpoint").symlink_to(folder / "disk" / "that" / "is gone")


@pytest.mark.slow
def test_too_few_ranks_whose_checkpoint_cannot_be_written_do_not_say_that_there_is_one(tmp_path: Path) -> None:
    no_room_for_a_checkpoint(tmp_path)
    few = (*TINY, "faults=kill", "faults.kill.rank=0", "faults.kill.step=5", "members.min_ranks=2", "steps=12")
    status, printed = train(tmp_path, *few, world_size=2)
    assert status == DO_NOT_RESTART, printed
    assert "1 of 2 ranks are left (rank 0 left: its process ended by SIGKILL" in printed
    assert "checkpoint run/checkpoint of step 5 not saved: " in printed
    assert "there is no complete one\n" in printed
    assert "resume=true" not in printed
    assert "training goes on" not in printed


@pytest.mark.slow
def test_result_that_cannot_be_saved_is_told_by_the_rank_that_saves_and_by_the_status(tmp_path: Path) -> None:
    """Rank 0 is gone for good."""
    no_room_for_a_checkpoint(tmp_path)
    alone = (*TINY, "faults=kill", "faults.kill.rank=0", "faults.kill.step=5", "members.min_ranks=1", "steps=12")
    status, printed = train(tmp_path, *alone, world_size=2, launch=("--max-restarts", "0"))
    assert status == DO_NOT_RESTART, printed
    assert printed.count("checkpoint run/checkpoint of step 12 not saved: ") == 1
    assert (tmp_path / "run" / "summary.json").exists()
    assert "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["true", "auto"])
def test_finished_run_that_is_resumed_says_that_nothing_is_left_to_train(resume: str, tmp_path: Path) -> None:
    keys = (*KEYS, *TINY, "faults=none", "run_dir=run")
    run_command("train", 2, *keys, "steps=3", folder=tmp_path)
    printed = run_command("train", 2, *keys, "steps=3", f"resume={resume}", folder=tmp_path)
    assert printed.count("nothing left to train: the checkpoint has all steps already") == 1
    assert "Traceback" not in printed
    assert [report.step for report in steps_of(tmp_path)] == [0, 1, 2]
    assert saved_step(tmp_path / "run") == 3


DIES_FIRST = """\
import os, sys
if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
    sys.exit(1)
from straggle.commands.train import main
main()
"""


@pytest.mark.slow
def test_run_whose_worker_dies_before_it_begins_does_not_go_on_from_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DIES_FIRST)
    keys = (*KEYS, *SEEN_AT_ONCE, *TINY, "faults=none", "run_dir=run")
    run_command("train", 2, *keys, "steps=3", folder=tmp_path)
    words = ("--nproc-per-node", 2, "--restart-delay-s", 0, "script.py", *keys, "steps=6")
    with loaded_launch(*words, folder=tmp_path) as job:
        status, printed = ended(job)
    assert status == 0, printed
    assert "rank 1 ended with status 1" in printed
    assert "run/checkpoint was there before this run, which starts from the beginning" in printed
    assert "step 1/6" in printed
    assert saved_step(tmp_path / "run") == 6


@pytest.mark.slow
def test_rank_that_is_out_when_the_others_end_says_so_and_ends_without_an_error(tmp_path: Path) -> None:
    pace = "+faults.delay={_target_: straggle.lab.faults.RandomDelay, probability: 1, seconds: 0.05}"
    few = (*KEYS, *TINY, "faults=none", pace, "members.min_ranks=1", "steps=30", "run_dir=run")
    launch, trace = ("--nproc-per-node", 2, "--run-dir", "run"), tmp_path / "run" / "trace.jsonl"

    def made() -> int:
        return trace.read_text().count("\n") if trace.exists() else 0

    with loaded_launch(*launch, "-m", "straggle", "train", *few, folder=tmp_path) as job:
        for steps, number in ((5, signal.SIGSTOP), (30, signal.SIGCONT)):
            until = time.monotonic() + 200  # to start, however busy the machine is
            while made() < steps:
                assert time.monotonic() < until, job.log.read_text()
                time.sleep(0.02)
            os.kill(int((tmp_path / "run" / "pids" / "rank1").read_text()), number)
        status, printed = ended(job)
    assert status == 0, printed
    assert "rank 1 comes late: ranks [0] have ended their loops: there is nothing left to do for this rank" in printed
    assert "Traceback" not in printed
    assert len(json.loads((tmp_path / "run" / "summary.json").read_text())["parameters_sha256"]) == 1


@pytest.mark.slow
def test_rank_that_is_out_when_the_only_member_is_told_to_end_says_that_steps_are_left(tmp_path: Path) -> None:
    few = (*KEYS, *TINY, "faults=none", "members.min_ranks=1", "steps=100000", "run_dir=run")
    launch = ("--nproc-per-node", 2, "--run-dir", "run", "-m", "straggle", "train", *few)
    with loaded_launch(*launch, folder=tmp_path) as job:
        wait_for_steps(tmp_path, 5, job)
        first, out = (int((tmp_path / "run" / "pids" / f"rank{rank}").read_text()) for rank in range(2))
        os.kill(out, signal.SIGSTOP)
        while not steps_of(tmp_path)[-1].absent_ranks:
            time.sleep(0.02)
        os.kill(first, signal.SIGTERM)
        while Path(f"/proc/{first}").exists():
            time.sleep(0.02)
        os.kill(out, signal.SIGCONT)
        status, printed = ended(job)
    assert status == DO_NOT_RESTART, printed
    assert "ranks [0] have ended their loops early, as ranks were told to end" in printed
    assert "Traceback" not in printed
    assert saved_step(tmp_path / "run") == len(steps_of(tmp_path)) > 0


def wait_for_steps(folder: Path, number: int, job: Started) -> None:
    trace, until = folder / "run" / "trace.jsonl", time.monotonic() + 200  # to start, however busy the machine is
    while not trace.exists() or trace.read_text().count("\n") < number:
        assert time.monotonic() < until, job.log.read_text()
        time.sleep(0.02)


@pytest.mark.slow
def test_worker_that_is_told_to_end_leaves_and_all_that_are_told_to_end_with_a_checkpoint(tmp_path: Path) -> None:
    pace = "+faults.delay={_target_: straggle.lab.faults.RandomDelay, probability: 1, seconds: 0.05}"
    few = (*KEYS, *TINY, "faults=none", pace, "members.suspect_s=30", "steps=100000", "run_dir=run")
    launch = ("--nproc-per-node", 4, "--run-dir", "run", "--grace-s", 100, "-m", "straggle", "train", *few)
    with loaded_launch(*launch, folder=tmp_path) as job:
        wait_for_steps(tmp_path, 5, job)
        told = int((tmp_path / "run" / "pids" / "rank0").read_text())  # which writes, until it leaves
        os.kill(told, signal.SIGTERM)
        while Path(f"/proc/{told}").exists():
            time.sleep(0.02)
        wait_for_steps(tmp_path, len(steps_of(tmp_path)) + 10, job)
        assert not (tmp_path / "run" / "checkpoint").exists()
        os.kill(job.pid, signal.SIGTERM)
        status, printed = ended(job)
    assert status == 128 + signal.SIGTERM, printed
    (leaving,) = re.findall(r"rank 0 was told to end: it has left after step (\d+), and the others go on", printed)
    reports = steps_of(tmp_path)
    assert [report.step for report in reports] == list(range(len(reports)))
    assert [report.step for report in reports if report.absent_ranks] == list(range(int(leaving) + 1, len(reports)))
    assert {report.absent_ranks for report in reports[int(leaving) + 1 :]} == {(0,)}
    ((_, change),) = read_members(tmp_path / "run")
    assert (change.left_kinds, change.kinds, change.step) == ({0: "notice"}, ("notice",), int(leaving) + 1)
    assert f"stopped after step {len(reports)} of 100000" in printed
    assert "started again" not in printed
    assert saved_step(tmp_path / "run") == len(reports)


@pytest.mark.slow
def test_worker_that_cannot_be_spared_ends_the_run_with_a_checkpoint_and_the_others_say_why(tmp_path: Path) -> None:
    few = (*KEYS, *TINY, "faults=none", "members.suspect_s=30", "steps=100000", "run_dir=run")
    launch = ("--nproc-per-node", 2, "--run-dir", "run", "-m", "straggle", "train", *few)
    with loaded_launch(*launch, folder=tmp_path) as job:
        wait_for_steps(tmp_path, 5, job)
        os.kill(int((tmp_path / "run" / "pids" / "rank1").read_text()), signal.SIGTERM)
        status, printed = ended(job)
    assert status == DO_NOT_RESTART, printed
    assert "others were told to end, and too few ranks would be left" in printed
    assert saved_step(tmp_path / "run") == len(steps_of(tmp_path)) > 0


@pytest.mark.slow
def test_replica_of_a_killed_rank_comes_back_and_the_run_goes_on_from_the_checkpoint_of_its_end(tmp_path: Path) -> None:
    """Two replicas of two workers. All are told to end then: they must do so after one step, or shards do not fit."""
    pace = "+faults.delay={_target_: straggle.lab.faults.RandomDelay, probability: 1, seconds: 0.02}"
    keys = (*KEYS, *SEEN_AT_ONCE, *TINY, "workload.depth=1", "parallel=sharded", "merge.check_every=5", "run_dir=run")
    killed = ("faults=kill", "~faults.pace", pace, "faults.kill.rank=1", "faults.kill.step=5", "checkpoint_every=3")
    launch = ("--nproc-per-node", 4, "--replica-size", 2, "--restart-delay-s", 0, "--grace-s", 100)
    words = (*launch, "-m", "straggle", "train", *keys)
    with loaded_launch(*words, *killed, "steps=1000000", folder=tmp_path) as job:
        wait_for_changes(tmp_path, 2, job)
        wait_for_steps(tmp_path, len(steps_of(tmp_path)) + 3, job)
        os.kill(job.pid, signal.SIGTERM)
        status, printed = ended(job)
    assert status == 128 + signal.SIGTERM, printed
    assert "members: replica 0 left: rank 1 of it: its process ended by SIGKILL" in printed
    assert "Traceback" not in printed
    left, joined = (change for _, change in read_members(tmp_path / "run"))
    assert (left.kinds, left.ranks, joined.kinds, joined.ranks) == (("ended",), (1,), ("joined",), (0, 1))
    reports = steps_of(tmp_path)
    assert [report.step for report in reports] == list(range(len(reports)))  # written by one rank at a time
    assert {report.absent_ranks for report in reports} == {(), (0,)}
    assert saved_step(tmp_path / "run") == len(reports)
    again = ("faults=none", "resume=true", f"steps={len(reports) + 2}")
    with loaded_launch(*words, *again, folder=tmp_path) as job:
        status, printed = ended(job)
    assert status == 0, printed
    assert "steps without a replica" in printed
    reports = steps_of(tmp_path)
    assert [report.step for report in reports] == list(range(saved_step(tmp_path / "run")))
    assert not any(report.different_ranks for report in reports)
    hashes = json.loads((tmp_path / "run" / "summary.json").read_text())["parameters_sha256"]
    assert (len(hashes), len(set(hashes))) == (4, 1)


def wait_for_changes(folder: Path, number: int, job: Started) -> None:
    until = time.monotonic() + 300  # to start twice, however busy the machine is
    while len(read_members(folder / "run")) < number:
        assert time.monotonic() < until, job.log.read_text()
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.slow
def test_store_that_dies_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    port, trace = free_port(), tmp_path / "run" / "trace.jsonl"
    launch = ("--nproc-per-node", 2, "--external-store", "--rdzv-endpoint", f"127.0.0.1:{port}")
    train = ("-m", "straggle", "train", *KEYS, *TINY, "late_handling.give_up_s=6", "steps=1000000", "run_dir=run")
    with (
        loaded_launch("--store-only", "--port", port, folder=tmp_path) as store,
        loaded_launch(*launch, *train, folder=tmp_path) as job,
    ):
        until = time.monotonic() + 200  # to start, however busy the machine is
        while not trace.exists() or trace.stat().st_size == 0:
            assert time.monotonic() < until, job.log.read_text()
            time.sleep(0.05)
        os.kill(store.pid, signal.SIGKILL)
        status, printed = ended(job)
    assert status != 0, printed
    assert f"the job's store at 127.0.0.1:{port} does not answer" in printed
    assert printed.count(f"the job's store at 127.0.0.1:{port} has not answered for give_up_s=6") == 2  # on both ranks
    assert saved_step(tmp_path / "run") == len(steps_of(tmp_path)) > 0
