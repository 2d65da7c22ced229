"""A signal to one rank ends the run on all, after the same step, and a resumed run goes on as if nothing had been."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import rank_environment, run_command, run_forked, staged, started, straggle_main
from repository import ROOT
from stores import serve_store
from torchrun import torchrun_main
from training import TINY, Signals, features, mlp, saved_step

from straggle import FixedDeadline, LateHandling
from straggle.stop_signal import StopSignal

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
KEYS = (*TINY, "faults=none", "deadline=none", "rebalance=none")  # a busy machine is no reason to deal anew


def train_until_asked(rank, signalled, at_step):
    before = signal.getsignal(signal.SIGTERM)
    with staged(mlp()) as model:
        with StopSignal() as stop:
            for number in range(20):
                if (rank, number) == (signalled, at_step):
                    os.kill(os.getpid(), signal.SIGTERM)
                with model.step() as step:
                    stop.tell(step)
                    model(features(rank, number)).sum().backward()
                if stop.agreed(model.last_report):
                    break
        return model.last_report.step, signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_rank_is_asked_and_all_end_after_the_same_step(world_size):
    assert run_forked(train_until_asked, world_size, world_size - 1, 4) == [(4, True)] * world_size


def test_request_before_the_first_step_ends_the_run_after_it():
    assert run_forked(train_until_asked, 2, 1, 0) == [(0, True)] * 2


def test_run_that_nobody_ends_goes_on():
    assert run_forked(train_until_asked, 2, None, 0) == [(19, True)] * 2


class AskedMeanwhile(dist.HashStore):
    """A store in which no rank has asked yet; the signal comes while it is looked into."""

    def check(self, keys):
        found = super().check(keys)
        os.kill(os.getpid(), signal.SIGTERM)
        return found


def ask_while_it_looks(rank):
    with staged(mlp()) as model, StopSignal(poll_s=0.0, store=AskedMeanwhile()) as stop:
        for number in range(10_000):
            with model.step() as step:
                stop.tell(step)
                model(features(rank, number)).sum().backward()
            if stop.agreed(model.last_report):
                return number
    return None


def test_signal_that_comes_while_the_store_is_looked_into_is_not_lost():
    assert run_forked(ask_while_it_looks, 1) != [None]


def ask_while_stuck(rank):
    """Rank 1 is asked in step 2, and is stood in for from then until its peers have ended."""
    signals, late_handling = Signals(), LateHandling(grace_s=0.0, max_lag=10_000)
    with staged(mlp(), deadline=FixedDeadline(0.02), late_handling=late_handling) as model, StopSignal() as stop:
        for number in range(10_000):
            if (rank, number) == (1, 2):
                os.kill(os.getpid(), signal.SIGTERM)
            with model.step() as step:
                stop.tell(step)
                if (rank, number) == (1, 2):
                    signals.wait("ended")
                model(features(rank, number)).sum().backward()
            if stop.agreed(model.last_report):
                break
        if rank == 0:
            signals.send("ended")
        return model.last_report.step


def test_rank_that_is_stood_in_for_is_heard_and_ends_after_the_same_step():
    first, second = run_forked(ask_while_stuck, 2)
    assert first == second
    assert 2 < first < 9_999


# -- torchrun


def wait_for_steps(runs, trace, number):
    while not trace.exists() or trace.read_text().count("\n") < number:
        assert runs(), "ended before it had made these steps"
        time.sleep(0.05)


@contextlib.contextmanager
def run_of_torchrun(folder, *keys):
    """A run of one rank, whose process loads all anew, and the process that is to be told to end."""
    options = ("--standalone", "--nproc-per-node=1", "-m", "straggle", "train")
    with started(torchrun_main, *options, *keys, folder=folder, environment=ENVIRONMENT) as agent:
        yield agent, [agent]


@contextlib.contextmanager
def run_of_ranks(folder, *keys):
    """The same of two ranks alone, the second of which is to be told."""
    store = serve_store()
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(started(straggle_main, "train", *keys, folder=folder, environment=own))
            for own in (rank_environment(rank, 2, store.port) for rank in range(2))
        ]
        yield ranks[1], ranks


@pytest.mark.slow
@pytest.mark.parametrize("run_of", [run_of_torchrun, run_of_ranks])
def test_terminated_run_leaves_a_checkpoint_and_goes_on_as_if_it_had_not_been(run_of, tmp_path):
    run = tmp_path / "run"
    with run_of(tmp_path, *KEYS, "steps=100000", "run_dir=run") as (told, processes):
        wait_for_steps(told.process.is_alive, run / "trace.jsonl", 10)
        os.kill(told.pid, signal.SIGTERM)
        codes = [process.status() for process in processes]
        printed = "".join(process.log.read_text() for process in processes)
    done = saved_step(run)
    assert done == (run / "trace.jsonl").read_text().count("\n") < 100_000
    assert f"stopped after step {done} of 100000" in printed
    if run_of is run_of_torchrun:
        assert codes == [1]  # it says that it was ended by a signal; what its ranks leave is what the others leave
        return
    assert codes == [0, 0]
    for name in ("run", "whole"):
        keys = (*KEYS, f"steps={done + 5}", f"run_dir={name}", "resume=auto")
        run_command("train", 2, *keys, folder=tmp_path)
    parts, whole = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "whole"))
    assert parts["parameters_sha256"] == whole["parameters_sha256"]
    assert parts["steps"] == whole["steps"] == done + 5


# -- Ctrl-C of launch.sh, which the terminal sends to each of its processes


@contextlib.contextmanager
def launch_script(folder, *keys):
    """launch.sh with a worker in a process group of its own, as a shell starts it; with its output."""
    command = [str(ROOT / "launch.sh"), *KEYS, *keys, "run_dir=run"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**ENVIRONMENT, "WORKERS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=listen_to_ctrl_c,
        )
    try:
        yield process, folder / "log"
    finally:
        process.terminate()  # torchrun ends its workers, which are in sessions of their own
        try:
            process.wait(200)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def listen_to_ctrl_c():
    """Tests that run in the background of a shell ignore SIGINT, and so would all that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ctrl_c(process):
    os.killpg(process.pid, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="launch.sh would set up its environment")
def test_ctrl_c_ends_a_run_after_its_step_with_a_checkpoint_and_a_page_and_leaves_no_target(tmp_path):
    run = tmp_path / "run"
    with launch_script(tmp_path, "steps=100000", "metrics=prometheus", "metrics.port=0") as (process, log):
        wait_for_steps(lambda: process.poll() is None, run / "trace.jsonl", 5)
        ctrl_c(process)
        assert process.wait(200) == 0
        printed = log.read_text()
    assert "Traceback" not in printed
    assert printed.count("Ctrl-C: the run ends after the step that it is in") == 1
    assert f"stopped after step {saved_step(run)} of 100000" in printed
    assert f"report: {Path('run', 'report.html')}" in printed
    assert "steps" in (run / "report.html").read_text()
    assert not list((run / "targets").iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="launch.sh would set up its environment")
@pytest.mark.parametrize(
    "words",
    [(), ("faults=random_delay", "faults.delay.probability=1", "faults.delay.seconds=60")],
    ids=["loading", "in a long step"],
)
def test_ctrl_c_before_the_first_step_or_twice_ends_all_processes_without_a_traceback(words, tmp_path):
    with launch_script(tmp_path, "steps=100000", *words) as (process, log):
        while "train with 1 workers" not in log.read_text():
            time.sleep(0.05)
        if words:
            wait_for_steps(lambda: process.poll() is None, tmp_path / "run" / "decisions" / "rank0.jsonl", 0)
        ctrl_c(process)
        if words:
            wait_until(lambda: "again: it ends at once" in log.read_text())
            ctrl_c(process)
        assert process.wait(200) == (128 + signal.SIGTERM if words else 130)
        printed = log.read_text()
    assert "Traceback" not in printed
    assert ("SIGTERM: the workers have ended" if words else "stopped before it began") in printed


def workers_of(pid):
    """The processes that this one has started to train."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(number) for own in lists for number in own.read_text().split()]
    words = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return [child for child, command in words.items() if b"-m\0straggle\0train\0" in command]


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="launch.sh would set up its environment")
def test_worker_that_dies_ends_the_run_with_torchruns_table_and_no_traceback_of_the_launcher(tmp_path):
    with launch_script(tmp_path, "steps=100000") as (process, log):
        wait_until(lambda: workers_of(process.pid))
        (worker,) = workers_of(process.pid)
        os.kill(worker, signal.SIGKILL)
        assert process.wait(200) == 1
        printed = log.read_text()
    assert "Root Cause (first observed failure)" in printed
    assert f"Signal 9 (SIGKILL) received by PID {worker}" in printed
    assert "at_terminal.py" not in printed


# -- the worker of docker/, which is torchrun on several nodes

STOPPED = 128 + signal.SIGTERM


@contextlib.contextmanager
def worker_of_two(folder, port, *keys):
    """One worker of two; the first one hosts the rendezvous."""
    environment = {**ENVIRONMENT, "RENDEZVOUS": f"localhost:{port}", "NODES": "1 + 1"}
    command = [sys.executable, str(ROOT / "docker" / "worker.py"), *KEYS, *keys]
    process = subprocess.Popen(command, cwd=folder, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(condition):
    while not condition():
        time.sleep(0.05)


def hosts_rendezvous(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.slow
def test_worker_ends_when_it_is_told_though_it_waits_for_one_that_has_ended(tmp_path):
    port = free_port()
    keys = (tmp_path, port, "steps=100000", "run_dir=run")
    with worker_of_two(*keys) as first:
        wait_until(lambda: hosts_rendezvous(port))
        with worker_of_two(*keys) as second:
            wait_for_steps(lambda: second.poll() is None, tmp_path / "run" / "trace.jsonl", 5)
            second.terminate()
            assert second.wait(200) == STOPPED
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children")
        wait_until(lambda: not children.read_text())  # its training has ended, and torchrun waits for the second one's
        assert first.poll() is None
        first.terminate()
        assert first.wait(200) == STOPPED
    assert saved_step(tmp_path / "run")


@pytest.mark.slow
def test_worker_that_waits_for_another_to_come_ends_when_it_is_told(tmp_path):
    port = free_port()
    with worker_of_two(tmp_path, port, "steps=1", "run_dir=run") as process:
        wait_until(lambda: hosts_rendezvous(port))
        process.terminate()
        assert process.wait(200) == STOPPED
