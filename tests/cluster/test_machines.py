"""Two machines, as far as one can be two: the cluster commands of docs/cluster.md, behind its firewall."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from machines import BY_ENDPOINT, Machine, by_hand, commands_of_several_nodes, lines_of, made_machines
from network import Network
from repository import ROOT
from training import TINY

KEYS = (*TINY, "faults=none", "metrics=none", "report=false")


@contextlib.contextmanager
def fire_walled(folder: Path) -> Iterator[tuple[Network, list[Machine]]]:
    """Two machines with nothing open but what the page says; at the end nothing else has been asked for."""
    rules = lines_of("docs/cluster.md", "Several machines", "text")
    assert any("--dports" in rule for rule in rules)
    with made_machines(folder) as (network, machines):
        for machine in machines:
            for rule in rules:
                machine.run(rule)
            machine.count_refused()
        yield network, machines
        assert [machine.refused() for machine in machines] == [0, 0]


def start(command: str, number: int, machine: Machine, folder: Path, *keys: str) -> subprocess.Popen[bytes]:
    """A command of a page as it is given on this machine, with one worker there."""
    command = re.sub(r"--node-rank 0", f"--node-rank {number}", command)
    command = re.sub(r"--nproc-per-node \d+", "--nproc-per-node 1", command)
    return machine.start(["bash", "-c", " ".join([command, *keys])], folder / f"{machine.host}.log", WORKERS="1")


# one for each kind of rendezvous; the others start torchrun in the same way, as tests/commands sees
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", [BY_ENDPOINT, by_hand()])
def test_cluster_commands_train_on_two_machines_behind_the_documented_firewall(command: str, tmp_path: Path) -> None:
    assert command in [*commands_of_several_nodes(), by_hand()]
    if "launch.sh" in command and not [*ROOT.glob(".venv/.installed-dev-*"), *ROOT.glob(".venv/.installed-train-*")]:
        pytest.skip("launch.sh would install its environment, and no registry is reached from there")
    run_dir = tmp_path / "run"
    keys = (*KEYS, "steps=6", f"run_dir={run_dir}")
    with fire_walled(tmp_path) as (_, machines):
        started = [start(command, number, machine, tmp_path, *keys) for number, machine in enumerate(machines)]
        ended = [process.wait(400.0) for process in started]
        said = "".join(path.read_text() for path in tmp_path.glob("*.log"))
        assert ended == [0, 0], said
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 6
    assert len(summary["parameters_sha256"]) == 2  # one of each rank
    assert len(set(summary["parameters_sha256"])) == 1


def lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of a run; none if there is no such file yet."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Job:
    """A run with members: a launcher on each machine, and the store on the first.

    Each machine has one worker or, if the run is ``sharded``, a replica of two.
    """

    def __init__(self, machines: list[Machine], folder: Path, *, sharded: bool = False) -> None:
        self.machines, self.folder, self.run_dir, self.sharded = machines, folder, folder / "run", sharded
        self.processes: list[subprocess.Popen[bytes]] = []

    def start_store(self) -> None:
        words = ["straggle", "launch", "--store-only", "--port", "29500"]
        self.processes.append(self.machines[0].start(words, self.folder / "store.log"))

    def start(self, number: int) -> None:
        """The launcher of a machine: the same command at first and after each of its ends."""
        words = ["straggle", "launch", "--nnodes", "2", "--node-rank", str(number), "--external-store"]
        size = "2" if self.sharded else "1"
        words += ["--rdzv-endpoint", "node0:29500", "--nproc-per-node", size, "--replica-size", size]
        words += ["--preload", "straggle.commands.train", "-m", "straggle", "train"]
        words += ["parallel=sharded"] if self.sharded else []
        words += [*KEYS, "members=elastic", "members.min_ranks=1", "resume=auto", "merge.check_every=5"]
        words += ["faults=pace", "faults.pace.factor=6", "steps=1000000", f"run_dir={self.run_dir}"]
        machine = self.machines[number]
        self.processes.append(machine.start(words, self.folder / f"{machine.host}.log"))

    def reboot(self, number: int) -> None:
        """All processes of a machine are gone, and then its commands are given again."""
        self.machines[number].kill_all()
        if number == 0:
            self.start_store()
        self.start(number)

    def changes(self) -> list[tuple[list[str], list[str]]]:
        """Who left and who joined, in the order in which it happened."""
        return [(list(one["left"]), list(one["joined"])) for one in lines(self.run_dir / "members.jsonl")]

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        until = time.monotonic() + 240.0
        while not done():
            if time.monotonic() > until:
                logs = "".join(path.read_text() for path in sorted(self.folder.glob("*.log")))
                raise AssertionError(f"waited in vain for {what}: {self.changes()}\n{logs}")
            time.sleep(0.1)

    def wait_to_leave(self, member: int) -> None:
        self.wait(f"member {member} to leave", lambda: self.changes()[-1:] == [([str(member)], [])])

    def wait_to_join(self, member: int) -> None:
        self.wait(f"member {member} to come back", lambda: self.changes()[-1:] == [([], [str(member)])])

    def wait_for_steps(self, num_steps: int) -> None:
        before = len(lines(self.run_dir / "trace.jsonl"))
        self.wait("more steps", lambda: len(lines(self.run_dir / "trace.jsonl")) >= before + num_steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_host_that_is_cut_off_or_rebooted_comes_back_and_the_other_goes_on(tmp_path: Path) -> None:
    with fire_walled(tmp_path) as (network, machines):
        job = Job(machines, tmp_path)
        job.start_store()
        job.start(0)
        job.start(1)
        job.wait_for_steps(5)

        network.cut(1)
        job.wait_to_leave(1)
        job.wait_for_steps(5)  # without it
        network.heal(1)
        job.wait_to_join(1)
        job.wait_for_steps(10)  # a comparison of both ranks' parameters among them

        job.reboot(0)  # with the store: the other waits until that is back, and gives it what it knows
        job.wait_to_leave(0)
        job.wait_for_steps(5)
        job.wait_to_join(0)
        job.wait_for_steps(10)
    check_trace(job)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_host_with_a_replica_that_is_rebooted_comes_back_and_the_other_goes_on(tmp_path: Path) -> None:
    with fire_walled(tmp_path) as (_, machines):
        job = Job(machines, tmp_path, sharded=True)
        job.start_store()
        job.start(0)
        job.start(1)
        job.wait_for_steps(5)

        for replica in (1, 0):  # the second with the store
            job.reboot(replica)
            job.wait_to_leave(replica)
            job.wait_for_steps(5)
            job.wait_to_join(replica)
            job.wait_for_steps(10)
    check_trace(job)


def check_trace(job: Job) -> None:
    """Each step was written once, and parameters were equal whenever they were compared."""
    for process in job.processes:
        process.wait()
    steps = lines(job.run_dir / "trace.jsonl")
    assert [step["step"] for step in steps] == list(range(len(steps)))
    compared = [step["different_ranks"] for step in steps if step["different_ranks"] is not None]
    assert compared
    assert not any(compared)
