"""Workers under `straggle launch`: real processes that are killed, fail and come back, and what their peers learn."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_jobs import (
    WAITS,
    alive,
    free_port,
    launched,
    left,
    script,
    starts,
    store_of,
    wait_for,
    wait_for_end,
    wait_until,
)
from ranks import Started, started, started_command, straggle_main
from torchrun import torchrun_main

from straggle.members import agents
from straggle.members.agents import DO_NOT_RESTART, Exited

# of torchrun's own: where its `record` leaves errors, the signals of its own processes, and a name for this machine
ONLY_TORCHRUN = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
OF_THE_STORE = {"MASTER_ADDR", "MASTER_PORT"}
BOTH_WAYS = pytest.mark.parametrize("way", [(), ("--preload=json",)], ids=["new process", "forked"])
OURS = {"MALLOC_ARENA_MAX", "STRAGGLE_ELASTIC", "TORCH_GLOO_LAZY_INIT"}

# -- the environment


def test_environment_of_a_worker_is_that_of_torchrun(tmp_path: Path) -> None:
    options = ["--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=job7", "--rdzv-endpoint=127.0.0.1:0"]
    found = []
    for name, main, words in (
        ("torchrun", torchrun_main, ["--rdzv-backend=c10d", *options]),
        ("ours", straggle_main, ["launch", *options]),
    ):
        folder = tmp_path / name
        folder.mkdir()
        with started(main, *words, str(script(folder, "")), folder=folder, environment={"OMP_NUM_THREADS": "1"}) as job:
            assert job.status() == 0, job.log.read_text()
        found.append([json.loads(left(folder, "environment", rank)) for rank in range(2)])
    for torchruns, ours in zip(*found, strict=True):
        assert ours.keys() == torchruns.keys() - ONLY_TORCHRUN | OURS
        different = {name for name in ours.keys() & torchruns.keys() if ours[name] != torchruns[name]}
        assert different <= OF_THE_STORE
        assert ours["MASTER_ADDR"] == "127.0.0.1"


def test_a_worker_that_is_stopped_is_reported_and_looked_at_if_peers_miss_it(tmp_path: Path) -> None:
    body = """
    if rank == "1":
        leave("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_for("end")
    """
    with launched(tmp_path, body, "--nproc-per-node", 2) as job:
        wait_for(job, tmp_path, "environment.0.0", "pid.1.0")
        pid = int(left(tmp_path, "pid", 1))
        wait_until(job, lambda: " T " in Path(f"/proc/{pid}/stat").read_text())
        agents.post_silent(store_of(tmp_path), 1, "rank 0 has waited for it for 12 s")
        wait_until(job, lambda: f"process {pid}: state T (stopped by a signal)" in job.log.read_text())
        assert "rank 1 gives no word of itself (rank 0 has waited for it for 12 s); process" in job.log.read_text()
        wait_until(job, lambda: agents.stopped(store_of(tmp_path), 1))
        assert not agents.stopped(store_of(tmp_path), 0)
        os.kill(pid, signal.SIGCONT)
        wait_until(job, lambda: not agents.stopped(store_of(tmp_path), 1))
        (tmp_path / "end").touch()
        assert job.status() == 0


@BOTH_WAYS
def test_arguments_and_modules_reach_the_worker_as_they_stand(way: tuple[str, ...], tmp_path: Path) -> None:
    script(tmp_path, 'leave("arguments", json.dumps(sys.argv[1:]))')
    words = ["--nproc-per-node", "4", "-m", "--store-only", "a b"]
    with started_command("launch", *way, "-m", "worker", *words, folder=tmp_path) as job:
        assert job.status() == 0, job.log.read_text()
    assert json.loads(left(tmp_path, "arguments", 0)) == words


# -- a worker that dies


def test_killed_worker_is_known_in_the_store_before_it_is_started_again(tmp_path: Path) -> None:
    with launched(tmp_path, WAITS, "--nproc-per-node=2", "--restart-delay-s=30") as job:
        wait_for(job, tmp_path, "pid.0.0", "pid.1.0")
        store = store_of(tmp_path)
        assert agents.started(store, 1) == 0
        assert agents.exited(store, 1) is None
        os.kill(int(left(tmp_path, "pid", 1)), signal.SIGKILL)
        wait_until(job, lambda: agents.exited(store, 1))
        word = agents.exited(store, 1)
        assert word == Exited(0, word.ran_s, signal="SIGKILL")
        assert agents.started(store, 1) == 0  # it still waits
        assert agents.exited(store, 0) is None
        assert alive(int(left(tmp_path, "pid", 0)))


@BOTH_WAYS
def test_killed_worker_comes_back_and_the_others_do_not_notice(way: tuple[str, ...], tmp_path: Path) -> None:
    with launched(tmp_path, WAITS, *way, "--nproc-per-node=3", "--restart-delay-s=0") as job:
        wait_for(job, tmp_path, *(f"pid.{rank}.0" for rank in range(3)))
        for count in range(2):
            os.kill(int(left(tmp_path, "pid", 1, count)), signal.SIGKILL)
            wait_for(job, tmp_path, f"pid.1.{count + 1}")
        store = store_of(tmp_path)
        assert (agents.started(store, 1), agents.exited(store, 1).count) == (2, 1)
        (tmp_path / "end").touch()
        assert job.status() == 0
    assert [starts(tmp_path, rank) for rank in range(3)] == [1, 3, 1]


def test_workers_of_a_replica_come_back_together_and_the_other_replica_does_not_notice(tmp_path: Path) -> None:
    options = ["--nproc-per-node=4", "--replica-size=2", "--restart-delay-s=0", "--grace-s=0.2"]
    with launched(tmp_path, WAITS, *options) as job:
        wait_for(job, tmp_path, *(f"pid.{rank}.0" for rank in range(4)))
        before = int(left(tmp_path, "pid", 3))  # it would run on, and is killed after the grace
        os.kill(int(left(tmp_path, "pid", 2)), signal.SIGKILL)
        wait_for(job, tmp_path, "pid.2.1", "pid.3.1")
        assert not alive(before)
        (tmp_path / "end").touch()
        assert job.status() == 0
    assert [starts(tmp_path, rank) for rank in range(4)] == [1, 1, 2, 2]
    assert json.loads(left(tmp_path, "environment", 2, 1))["STRAGGLE_REPLICA_SIZE"] == "2"


@BOTH_WAYS
def test_what_a_killed_worker_had_started_dies_with_it(way: tuple[str, ...], tmp_path: Path) -> None:
    body = """
    loader = subprocess.Popen(["sleep", "1000"])
    leave("loader", str(loader.pid))
    """
    with launched(tmp_path, body + WAITS, *way, "--restart-delay-s=0") as job:
        wait_for(job, tmp_path, "pid.0.0")
        os.kill(int(left(tmp_path, "pid", 0)), signal.SIGKILL)
        wait_until(job, lambda: not alive(int(left(tmp_path, "loader", 0))))


@pytest.mark.slow
def test_restarted_worker_has_a_group_though_no_peer_comes_to_it(tmp_path: Path) -> None:
    """Its peers are in their own group all the while; the sum shows that this one worked."""
    body = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    if count == 0:
        x = torch.ones(1)
        dist.all_reduce(x)
        leave("sum", str(x.item()))
    """
    with launched(tmp_path, body + WAITS, "--nproc-per-node=2", loaded=True) as job:
        wait_for(job, tmp_path, "pid.0.0", "pid.1.0")
        os.kill(int(left(tmp_path, "pid", 1)), signal.SIGKILL)
        wait_for(job, tmp_path, "pid.1.1")
        (tmp_path / "end").touch()
        assert job.status() == 0, job.log.read_text()
    assert [left(tmp_path, "sum", rank) for rank in range(2)] == ["2.0", "2.0"]
    assert starts(tmp_path, 0) == 1


# -- the end of a job

ENDS = """
codes = json.loads(sys.argv[1])[int(rank)]
sys.exit(codes[min(count, len(codes) - 1)])
"""


@pytest.mark.parametrize(
    ("codes", "max_restarts", "status", "number_of_starts", "said"),
    [
        ([[0], [0]], 10, 0, [1, 1], ""),
        ([[3, 4, 0], [0]], 2, 0, [3, 1], "(restart 2 of 2)"),
        ([[0], [5]], 1, 5, [1, 2], "ranks [1] have not done their work"),
        ([[1], [0]], 0, 1, [1, 1], "ranks [0] have not done their work"),
        ([[DO_NOT_RESTART], [1, 0]], 10, DO_NOT_RESTART, [1, 2], "ranks [0] have not done their work"),
        ([[2], [0]], 10, 2, [1, 1], "rank 0 ended with status 2, after"),
        ([[7]], 10, 7, [2], "all ranks have failed again in the same way"),
    ],
    ids=[
        "all done",
        "done at last",
        "restarts used up",
        "no restarts",
        "job over",
        "wrong configuration",
        "always the same error",
    ],
)
def test_launcher_ends_when_all_workers_stay_down_and_its_status_says_how(
    codes: list[list[int]], max_restarts: int, status: int, number_of_starts: list[int], said: str, tmp_path: Path
) -> None:
    path = script(tmp_path, ENDS)
    options = [f"--nproc-per-node={len(codes)}", f"--max-restarts={max_restarts}", "--restart-delay-s=0.02"]
    with started_command("launch", *options, path, json.dumps(codes), folder=tmp_path) as job:
        assert job.status() == status
    assert [starts(tmp_path, rank) for rank in range(len(codes))] == number_of_starts
    assert said in job.log.read_text()


def test_error_of_all_workers_ends_the_job_before_their_restarts_are_used(tmp_path: Path) -> None:
    path = script(tmp_path, ENDS)
    options = ["--nproc-per-node=2", "--max-restarts=1000", "--restart-delay-s=0.2"]
    with started_command("launch", *options, path, "[[9], [9]]", folder=tmp_path) as job:
        assert job.status() == 9
    assert job.log.read_text().count("all ranks have failed again in the same way") == 2


def test_worker_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    body = """
    if rank == "0" and count == 0:
        os.mkdir("logs/node0.launch0/rank0.start1.log")  # no file can be opened there
        sys.exit(1)
    wait_for("end")
    """
    with launched(tmp_path, body, "--nproc-per-node=2", "--log-dir=logs", "--restart-delay-s=0.05") as job:
        wait_for(job, tmp_path, "environment.0.2")
        (tmp_path / "end").touch()
        assert job.status() == 0
    assert "rank 0 cannot be started: " in job.log.read_text()


# -- the end of a launcher


@BOTH_WAYS
def test_told_to_end_it_lets_workers_save_and_leaves_no_process(way: tuple[str, ...], tmp_path: Path) -> None:
    body = """
    if rank == "0":
        signal.signal(signal.SIGTERM, lambda *_: (leave("saved"), sys.exit(0)))
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        leave("loader", str(subprocess.Popen(["sleep", "1000"]).pid))
    """
    with launched(tmp_path, body + WAITS, *way, "--nproc-per-node=2", "--grace-s=1", "--restart-delay-s=0") as job:
        wait_for(job, tmp_path, "pid.0.0", "pid.1.0")
        os.kill(job.pid, signal.SIGTERM)
        assert job.status() == 128 + signal.SIGTERM
    assert (tmp_path / "saved.0.0").exists()
    assert "started again" not in job.log.read_text()
    for pid in (left(tmp_path, "pid", 0), left(tmp_path, "pid", 1), left(tmp_path, "loader", 1)):
        wait_for_end(int(pid))
    assert [starts(tmp_path, rank) for rank in range(2)] == [1, 1]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1])
def test_each_signal_that_torchrun_passes_on_lets_workers_save(number: signal.Signals, tmp_path: Path) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup, and so the launcher ignores it")
    body = "signal.signal(signal.SIGTERM, lambda *_: (leave('saved'), sys.exit(0)))\n"
    with launched(tmp_path, body + WAITS, "--restart-delay-s=0") as job:
        wait_for(job, tmp_path, "pid.0.0")
        os.kill(job.pid, number)
        assert job.status() == 128 + number
    assert (tmp_path / "saved.0.0").exists()


def test_told_twice_to_end_it_does_not_wait_for_its_workers(tmp_path: Path) -> None:
    with launched(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS, "--grace-s=1000") as job:
        wait_for(job, tmp_path, "pid.0.0")
        os.kill(job.pid, signal.SIGTERM)
        wait_until(job, lambda: "SIGTERM" in job.log.read_text())
        os.kill(job.pid, signal.SIGINT)
        assert job.status() == 128 + signal.SIGTERM
    wait_for_end(int(left(tmp_path, "pid", 0)))


def test_told_to_end_between_two_starts_it_starts_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, "sys.exit(1)", "--restart-delay-s=30", "--grace-s=1000") as job:
        wait_until(job, lambda: "started again in 30 s" in job.log.read_text())
        os.kill(job.pid, signal.SIGINT)
        assert job.status() == 128 + signal.SIGINT
    assert starts(tmp_path, 0) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@BOTH_WAYS
def test_worker_does_not_outlive_a_launcher_that_was_killed(way: tuple[str, ...], tmp_path: Path) -> None:
    with launched(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS, *way) as job:
        wait_for(job, tmp_path, "pid.0.0")
        pid = int(left(tmp_path, "pid", 0))
        os.kill(job.pid, signal.SIGKILL)
        assert job.status() == -signal.SIGKILL
        wait_for_end(pid)


# -- files


@BOTH_WAYS
def test_each_start_has_a_log_and_the_process_id_is_there_while_it_runs(way: tuple[str, ...], tmp_path: Path) -> None:
    body = 'print("out of", rank, count); print("err of", rank, count, file=sys.stderr)\n' + WAITS
    options = [*way, "--nproc-per-node=2", "--restart-delay-s=0", "--log-dir=logs", "--run-dir=run"]
    with launched(tmp_path, body, *options) as job:
        wait_for(job, tmp_path, "pid.0.0", "pid.1.0", "run/pids/rank1")
        first = int((tmp_path / "run" / "pids" / "rank1").read_text())
        assert first == int(left(tmp_path, "pid", 1))
        os.kill(first, signal.SIGKILL)
        wait_for(job, tmp_path, "pid.1.1", "run/pids/rank1")
        assert (tmp_path / "run" / "pids" / "rank1").read_text().strip() == left(tmp_path, "pid", 1, 1)
        (tmp_path / "end").touch()
        assert job.status() == 0
    assert list((tmp_path / "run" / "pids").iterdir()) == []
    names = {"rank0.start0.log": "0 0", "rank1.start0.log": "1 0", "rank1.start1.log": "1 1"}
    logs = tmp_path / "logs" / "node0.launch0"
    assert {path.name for path in logs.iterdir()} == names.keys()
    for name, who in names.items():
        assert (logs / name).read_text() == f"out of {who}\nerr of {who}\n"


def test_a_second_launcher_leaves_the_logs_of_the_first_where_they_are(tmp_path: Path) -> None:
    for number in range(2):
        with launched(tmp_path, f"print({number})", "--log-dir=logs") as job:
            assert job.status() == 0
        assert f"the workers' output is in logs/node0.launch{number}\n" in job.log.read_text()
    assert [(tmp_path / f"logs/node0.launch{number}/rank0.start0.log").read_text() for number in range(2)] == [
        "0\n",
        "1\n",
    ]


def test_logs_of_the_last_starts_are_kept(tmp_path: Path) -> None:
    body = "print(count)\nif int(count) < 25: sys.exit(1)"
    options = ["--restart-delay-s=0", "--max-restarts=1000", "--preload=json", "--nproc-per-node=2", "--log-dir=logs"]
    with launched(tmp_path, body + ' if rank == "1" else None\n' + WAITS, *options) as job:
        wait_for(job, tmp_path, "pid.1.25")
        (tmp_path / "end").touch()
        assert job.status() == 0
    kept = sorted(int(path.name.split(".")[1][5:]) for path in (tmp_path / "logs" / "node0.launch0").glob("rank1.*"))
    assert kept == list(range(6, 26))


def test_log_that_is_truncated_while_its_worker_writes_begins_anew(tmp_path: Path) -> None:
    body = 'print("x" * 1000)\nleave("written")\n' + WAITS + '\nprint("the rest")\n'
    with launched(tmp_path, body, "--log-dir=logs") as job:
        wait_for(job, tmp_path, "written.0.0")
        os.truncate(tmp_path / "logs" / "node0.launch0" / "rank0.start0.log", 0)
        (tmp_path / "end").touch()
        assert job.status() == 0
    assert (tmp_path / "logs" / "node0.launch0" / "rank0.start0.log").read_text() == "the rest\n"


def test_folder_of_the_process_ids_may_come_from_the_environment(tmp_path: Path) -> None:
    with launched(tmp_path, WAITS, STRAGGLE_PIDS_DIR=str(tmp_path / "ids")) as job:
        wait_for(job, tmp_path, "pid.0.0", "ids/rank0")
        assert (tmp_path / "ids" / "rank0").read_text().strip() == left(tmp_path, "pid", 0)


# -- several nodes, on one machine


@contextlib.contextmanager
def node(number: int, folder: Path, body: str, port: int, *options: object) -> Iterator[Started]:
    """The launcher of one of two nodes with two workers each."""
    words = ["--nnodes=2", "--nproc-per-node=2", f"--node-rank={number}", f"--rdzv-endpoint=127.0.0.1:{port}"]
    with launched(folder, body, *words, *options, loaded=True) as job:
        yield job


def test_nodes_number_their_ranks_and_the_store_stays_until_both_have_ended(tmp_path: Path) -> None:
    port, body = free_port(), 'leave("there")\nif rank in "23":\n    wait_for("end")'
    with node(1, tmp_path, body, port) as second:
        wait_until(second, lambda: "waits for the job's store" in second.log.read_text())
        with node(0, tmp_path, body, port) as first:
            wait_until(first, lambda: "serves the store until those of nodes [1] have" in first.log.read_text())
            wait_for(second, tmp_path, "there.2.0", "there.3.0")
            assert agents.exited(store_of(tmp_path), 1).code == 0
            (tmp_path / "end").touch()
            assert [second.status(), first.status()] == [0, 0]
    environments = [json.loads(left(tmp_path, "environment", rank)) for rank in range(4)]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    found = [tuple(environment[name] for name in names) for environment in environments]
    assert found == [(str(rank), str(rank % 2), "4", "2", str(rank // 2)) for rank in range(4)]


def test_launcher_that_waits_for_a_store_ends_when_it_is_told(tmp_path: Path) -> None:
    with node(1, tmp_path, "", free_port()) as job:
        wait_until(job, lambda: "waits for the job's store" in job.log.read_text())
        os.kill(job.pid, signal.SIGTERM)
        assert job.status() == 128 + signal.SIGTERM
    assert starts(tmp_path, 2) == 0


@contextlib.contextmanager
def store_only(folder: Path) -> Iterator[tuple[Started, int]]:
    with started_command("launch", "--store-only", "--port=0", folder=folder) as job:
        wait_until(job, lambda: "serves a job's store on port" in job.log.read_text())
        yield job, int(re.findall(r"on port (\d+)", job.log.read_text())[0])


def test_store_of_its_own_outlives_a_node_that_goes_on_counting_when_it_is_back(tmp_path: Path) -> None:
    """The second launcher of a node that died does not give a number again that its peers know already."""
    options = ["--external-store", "--restart-delay-s=0"]
    with store_only(tmp_path) as (served, port):
        with node(0, tmp_path, WAITS, port, *options) as first:
            wait_for(first, tmp_path, "pid.0.0", "pid.1.0")
            os.kill(int(left(tmp_path, "pid", 1)), signal.SIGKILL)
            wait_for(first, tmp_path, "pid.1.1")
        with node(0, tmp_path, WAITS, port, *options) as again:  # the first was killed, and its workers with it
            wait_for(again, tmp_path, "pid.0.1", "pid.1.2")
            (tmp_path / "end").touch()
            assert again.status() == 0
        os.kill(served.pid, signal.SIGTERM)
        assert served.status() == 0


@pytest.mark.slow
def test_ranks_of_two_nodes_meet_over_a_store_of_its_own(tmp_path: Path) -> None:
    body = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.tensor([float(rank) + 1.0])
    dist.all_reduce(x)
    leave("sum", str(x.item()))
    dist.barrier()
    dist.destroy_process_group()
    """
    options = ["--external-store", "--nproc-per-node=1"]
    with (
        store_only(tmp_path) as (_, port),
        node(0, tmp_path, body, port, *options) as first,
        node(1, tmp_path, body, port, *options) as second,
    ):
        assert [first.status(), second.status()] == [0, 0]
    assert [left(tmp_path, "sum", rank) for rank in range(2)] == ["3.0", "3.0"]


def test_port_that_is_taken_is_refused_without_a_traceback(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        launched(tmp_path, "", f"--rdzv-endpoint=127.0.0.1:{listener.getsockname()[1]}") as job,
    ):
        assert job.status() == 2
    assert "Address already in use" in job.log.read_text()
    assert "Traceback" not in job.log.read_text()


@pytest.mark.slow
def test_refused_worker_ends_the_wait_of_its_peers_before_the_job_has_begun(tmp_path: Path) -> None:
    body = """
    if rank == "1":
        sys.exit(2)
    import torch, torch.distributed as dist, straggle
    dist.init_process_group("gloo")
    straggle.StagedDataParallel(torch.nn.Linear(2, 2), members=straggle.Elastic())
    """
    with launched(tmp_path, body, "--nproc-per-node=2", loaded=True) as job:
        assert job.status() == 2  # the peer would wait for give_up_s, 300 s
    assert [starts(tmp_path, rank) for rank in range(2)] == [1, 1]
    assert "rank 0, before step 0: the job is over: rank 1's configuration is wrong" in job.log.read_text()


# -- loops with members

LOOP = """
import torch, torch.distributed as dist, straggle
torch.set_num_threads(1); dist.init_process_group("gloo"); torch.manual_seed(0)
net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
model = straggle.StagedDataParallel(net, deadline=0.05, members=straggle.Elastic(min_ranks=1, suspect_s=30))
optimizer = torch.optim.SGD(net.parameters(), 0.01)
step = model.register_state(optimizer=optimizer)
def train_to(last):
    global step
    while step < last:
        with model.step():
            model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step(); optimizer.zero_grad(); step = model.last_report.step + 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("around", ["plain", "caught"])
def test_rank_that_works_alone_until_the_others_are_done_is_told_so_and_ends_without_an_error(
    around: str, tmp_path: Path
) -> None:
    body = """
    train_to(20)
    try:
        if rank == "0":
            while not Path("closed.1.0").exists():
                model(torch.ones(2, 8))
        train_to(100)
    except Exception:
        if AROUND == "caught":
            leave("caught")
        raise
    finally:
        leave("finally")
    model.close(); leave("closed")
    """
    with launched(
        tmp_path,
        LOOP + f"AROUND = {around!r}\n" + textwrap.dedent(body),
        "--nproc-per-node=2",
        loaded=True,
    ) as job:
        assert job.status() == 0, job.log.read_text()
    said = job.log.read_text()
    assert "Traceback" not in said
    assert "rank 0 comes late: ranks [1] have ended their loops: there is nothing left to do for this rank" in said
    assert said.index("write `with model.pause():`") < said.index("rank 0 comes late")
    assert [(tmp_path / name).exists() for name in ("finally.0.0", "caught.0.0", "closed.0.0")] == [True, False, False]
    assert starts(tmp_path, 0) == 1


@pytest.mark.slow
def test_a_child_that_a_member_forks_and_that_ends_does_not_make_it_leave(tmp_path: Path) -> None:
    body = """
    train_to(20)
    if rank == "1":
        child = os.fork()
        if not child:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
    train_to(60)
    model.close()
    """
    options = ("--nproc-per-node=2",)
    loop = LOOP.replace("deadline=0.05, ", "")  # nobody leaves because it is slow
    with launched(tmp_path, loop + textwrap.dedent(body), *options, loaded=True) as job:
        assert job.status() == 0, job.log.read_text()
    assert "left" not in job.log.read_text()
    assert "joined" not in job.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    ["dist.all_reduce(x, group=own)", "dist.all_reduce(x, group=own, async_op=True).wait()", "dist.barrier(own)"],
)
def test_collective_of_a_group_of_the_loops_own_that_a_dead_rank_ends_says_who_that_was_and_what_to_write(
    call: str, tmp_path: Path
) -> None:
    body = f"""
    x, own = torch.ones(1), dist.new_group()
    while step < 10000:
        train_to(step + 5)
        if rank == "1" and step == 20:
            os.kill(os.getpid(), 9)
        {call}
    """
    options = ("--nproc-per-node=3", "--max-restarts=0")
    with launched(tmp_path, LOOP + textwrap.dedent(body), *options, loaded=True) as job:
        assert job.status() != 0
    said = job.log.read_text()
    for rank in (0, 2):
        ends = [line for line in said.splitlines() if line.startswith(f"[rank{rank}]: RuntimeError")]
        assert len(ends) == 1, said
    why = r"(?: \((?:its process ended by SIGKILL|no sign of life)[^)]*\))?"  # a rank may not have seen that view
    assert len(re.findall(rf"rank 1 left{why}, and a collective of", said)) >= 2, said
    assert "write step.log(loss=loss)" in said
