"""The cluster of docker/: built, started, scraped, disturbed and stopped, in a Docker engine of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from repository import ROOT

from straggle.commands.configuration.config import load

TOOLS = ROOT.parent / "shared" / "tools"  # beside the checkout: an engine, and a base image where there is no registry
FILES = ("docker-compose.yml", "docker-compose.gpu.yml")
MEMBERS = (FILES[0], "docker-compose.members.yml")
BASE = "python:3.11-slim"
NUM_WORKERS = 4
PACE = 8.0  # longer sleeps than the cluster has by itself leave the cores to other tests
SLOW_CPUS = 0.05  # well below the eighth of a core that a rank of that pace wants; torch is imported before
STOPPED_BY_SIGTERM = 128 + 15


def run(*command: str, **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=options.pop("timeout", 120), **options)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


def works(*command: str) -> bool:
    return shutil.which(command[0]) is not None and not subprocess.run(command, capture_output=True).returncode


# -- files


@pytest.fixture
def plugin() -> None:
    if not works("docker", "compose", "version"):
        pytest.skip("no docker compose plugin")


def configuration(*files: str, **variables: str) -> dict[str, Any]:
    arguments = [argument for file in files for argument in ("-f", str(ROOT / "docker" / file))]
    arguments += ["--profile", "*", "config", "--format", "json"]
    environment = {**os.environ, **variables}
    found: dict[str, Any] = json.loads(run("docker", "compose", *arguments, env=environment))
    return found


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("files", [FILES[:1], FILES, MEMBERS])
def test_compose_accepts_its_files_and_mounts_only_folders_that_exist(files: tuple[str, ...]) -> None:
    services = configuration(*files)["services"]
    binds = [mount for service in services.values() for mount in service.get("volumes", []) if mount["type"] == "bind"]
    assert binds
    assert [mount["source"] for mount in binds if not Path(mount["source"]).is_dir()] == []


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("fast", [3, 7])
def test_one_variable_sets_the_number_of_workers_and_one_of_them_is_slow(fast: int) -> None:
    services = configuration(FILES[0], FAST=str(fast))["services"]
    assert services["worker"]["deploy"]["replicas"] == fast
    assert "deploy" not in services["slow"]
    assert "cpus" not in services["worker"]
    (pace,) = [word.partition("=")[2] for word in services["slow"]["command"] if word.startswith("faults.pace.factor=")]
    wanted = 1 / float(pace)  # of a core, by a rank that sleeps the rest of its time
    assert services["slow"]["cpus"] < wanted / 2
    for name in ("worker", "slow"):
        assert services[name]["environment"]["NODES"] == f"{fast} + 1"


@pytest.mark.usefixtures("plugin")
def test_ports_are_open_to_this_machine_only() -> None:
    services = configuration(FILES[0])["services"]
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert len(ports) == 2
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}


@pytest.mark.usefixtures("plugin")
def test_grafana_finds_the_dashboards_and_prometheus_where_its_provisioning_says() -> None:
    services = configuration(FILES[0])["services"]
    mounts = {mount["target"]: Path(mount["source"]) for mount in services["grafana"]["volumes"]}
    folder = mounts["/etc/grafana/provisioning"]
    (provider,) = [yaml.safe_load(path.read_text()) for path in (folder / "dashboards").iterdir()]
    assert {entry["options"]["path"] for entry in provider["providers"]} <= mounts.keys()
    (source,) = [yaml.safe_load(path.read_text()) for path in (folder / "datasources").iterdir()]
    assert [entry["url"] for entry in source["datasources"]] == ["http://prometheus:9090"]
    assert "--web.listen-address" not in " ".join(services["prometheus"]["command"])  # 9090 is its default


@pytest.mark.usefixtures("plugin")
def test_each_member_is_a_node_with_a_number_of_its_own_and_the_store_is_in_none_of_them() -> None:
    services = configuration(*MEMBERS)["services"]
    members = [services[f"rank{rank}"] for rank in range(NUM_WORKERS)]
    said = [member["environment"] for member in members]
    assert [words["NODE_RANK"] for words in said] == [str(rank) for rank in range(NUM_WORKERS)]
    assert {words["NODES"] for words in said} == {str(NUM_WORKERS)}
    assert {words["STORE"] for words in said} == {f"store:{services['store']['entrypoint'][-1]}"}
    assert {member["restart"] for member in members} == {"no"}
    assert all(services[name]["deploy"]["replicas"] == 0 for name in ("worker", "slow"))
    load("train", ["members=elastic", *members[0]["command"]])


def test_what_the_image_is_made_of_is_in_the_build_context() -> None:
    kept = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", dockerfile, re.MULTILINE) for word in line.split()]
    copied += re.findall(r"source=([^,]*)", dockerfile)
    assert set(copied) == set(kept)
    assert all((ROOT / path).exists() for path in kept)


# -- a cluster


def base_image() -> None:
    """The image that the Dockerfile begins with."""
    if works("docker", "image", "inspect", BASE) or works("docker", "pull", BASE):
        return
    if not (TOOLS / "base-image").exists():
        pytest.skip(f"no {BASE} here, and no registry that has it")
    run(str(TOOLS / "base-image"), BASE)


def worker_image() -> str:
    """The Dockerfile's image; where there are wheels in docker/wheels, of nothing else."""
    arguments = ["--network", "host"]
    if (TOOLS / "base-image").exists():
        wheels = ROOT / "docker" / "wheels"
        constraint = ("--constraint", str(ROOT / "constraints.txt"))
        wanted = ("torch", f"{ROOT}[train]", "hatchling")
        pip = (sys.executable, "-m", "pip", "wheel", "--quiet")
        run(*pip, "--wheel-dir", str(wheels), *constraint, *wanted, timeout=600)
        arguments += ["--build-arg", "PIP_NO_INDEX=1"]
    dockerfile = str(ROOT / "docker" / "Dockerfile")
    build = ("docker", "build", *arguments, "-f", dockerfile, "-t", "straggle-test", str(ROOT))
    run(*build, env={**os.environ, "DOCKER_BUILDKIT": "1"}, timeout=900)
    return "straggle-test"


def prometheus_image(folder: Path) -> str:
    """The image that the compose file names, or else one of this machine's Prometheus."""
    named = configuration(FILES[0])["services"]["prometheus"]["image"]
    if works("docker", "image", "inspect", named) or works("docker", "pull", named):
        return str(named)
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip(f"neither {named} nor a prometheus of this machine")
    shutil.copy(binary, folder / "prometheus")
    user = "RUN mkdir /prometheus && chmod 1777 /prometheus\nUSER 65534:65534"
    (folder / "Dockerfile").write_text(f'FROM {BASE}\nCOPY prometheus /bin/\n{user}\nENTRYPOINT ["prometheus"]\n')
    build = ("docker", "build", "--network", "host", "-t", "straggle-test-prometheus", str(folder))
    run(*build, env={**os.environ, "DOCKER_BUILDKIT": "1"})
    return "straggle-test-prometheus"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Cluster:
    """Compose files under a name and in a subnet of their own: two runs of the tests may share an engine."""

    name = f"straggle-test-{os.getpid()}"

    def __init__(self, images: dict[str, str], *files: str) -> None:
        self.port = free_port()
        self.files = [argument for file in files or FILES[:1] for argument in ("-f", str(ROOT / "docker" / file))]
        self.variables = {
            **images,
            "PROMETHEUS_PORT": str(self.port),
            "SUBNET": f"10.213.{os.getpid() % 256}.0/24",
            "FAST": str(NUM_WORKERS - 1),
        }

    def compose(self, *arguments: str, keys: str = "") -> str:
        command = ("docker", "compose", "-p", self.name, *self.files, *arguments)
        return run(*command, env={**os.environ, **self.variables, "KEYS": keys}, timeout=300)

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Series and their values; empty while Prometheus does not answer."""
        address = f"http://127.0.0.1:{self.port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                found = json.load(answer)["data"]["result"]
        except OSError:
            return []
        return [(series["metric"], float(series["value"][1])) for series in found]

    def steps(self) -> dict[str, float]:
        """Steps of each rank."""
        return {labels["rank"]: value for labels, value in self.query("straggle_steps_total")}

    def num_alerts(self, container: str) -> float | None:
        """How many alerts named the rank of a container as slow; ``None`` while Prometheus does not answer."""
        host = run("docker", "inspect", "-f", "{{.Config.Hostname}}", container)
        firing = f'ALERTS{{alertname="StragglerRank",alertstate="firing",instance=~"{host}:.*"}}'
        return next((value for _, value in self.query(f"count({firing}) or vector(0)")), None)

    def limit(self, container: str, cpus: float | None) -> None:
        """Let a container have this share of a core; ``None``: as much as there is."""
        run(
            "docker",
            "update",
            "--cpus",
            run("docker", "info", "-f", "{{.NCPU}}") if cpus is None else str(cpus),
            container,
        )

    def wait(self, what: str, done: Callable[[], Any], timeout_s: float = 180.0) -> float:
        """Seconds until ``done`` is true."""
        began_at = time.monotonic()
        while not done():
            if time.monotonic() - began_at > timeout_s:
                logs = self.compose("logs", "--tail", "30") + self.compose("top")
                slowness = {labels["rank"]: value for labels, value in self.query("rank:straggle_slowness:ratio30s")}
                found = f"steps {self.steps()}, slowness {slowness}"
                raise AssertionError(f"waited {timeout_s} s in vain for {what}; {found}\n{logs}")
            time.sleep(0.5)
        return time.monotonic() - began_at

    def wait_for_more_steps(self, number: int, timeout_s: float = 180.0) -> float:
        before = self.steps()
        assert len(before) == NUM_WORKERS
        return self.wait(
            f"{number} more steps of each rank",
            lambda: all(self.steps().get(rank, 0) >= steps + number for rank, steps in before.items()),
            timeout_s,
        )

    def exit_codes(self) -> dict[str, int | None]:
        """Of each worker's container; ``None`` while it runs."""
        lines = self.compose("ps", "--all", "--format", "json", "worker", "slow").splitlines()
        workers = [json.loads(line) for line in lines]
        assert len(workers) == NUM_WORKERS
        return {entry["Name"]: entry["ExitCode"] if entry["State"] == "exited" else None for entry in workers}

    def file(self, path: str) -> str:
        """A file of the run, out of the volume; its name may be a pattern."""
        return run(
            *("docker", "run", "--rm", "--network", "none", "-v", f"{self.name}_runs:/runs:ro", "--entrypoint", "sh"),
            *(self.variables["STRAGGLE_IMAGE"], "-c", f"cat /runs/latest/{path}"),
        )


@pytest.fixture(scope="module")
def image() -> dict[str, str]:
    """The workers' image, in an engine that runs."""
    if not works("docker", "version") and (TOOLS / "engine-up").exists():
        subprocess.run([TOOLS / "engine-up"], capture_output=True, timeout=600)
    if not works("docker", "version"):
        pytest.skip("no Docker engine, and none could be started")
    if not works("docker", "compose", "version"):
        pytest.skip("no docker compose plugin")
    base_image()
    return {"STRAGGLE_IMAGE": worker_image()}


@contextlib.contextmanager
def made(cluster: Cluster) -> Iterator[Cluster]:
    """Nothing is left of it before and after."""
    cluster.compose("down", "--volumes")
    try:
        yield cluster
    finally:
        cluster.compose("down", "--volumes", "--timeout", "2")


@pytest.fixture
def cluster(image: dict[str, str], tmp_path: Path) -> Iterator[Cluster]:
    with made(Cluster({**image, "PROMETHEUS_IMAGE": prometheus_image(tmp_path)})) as cluster:
        yield cluster


def check_links(cluster: Cluster) -> None:
    """What the link of docker/README.md asks finds all ranks, and the run's page can be made."""
    (link,) = re.findall(r"<http://127.0.0.1:9090(/graph\?[^>]+)>", (ROOT / "docker" / "README.md").read_text())
    (asked,) = urllib.parse.parse_qs(urllib.parse.urlsplit(link).query)["g0.expr"]
    assert len(cluster.query(asked)) == NUM_WORKERS
    run("docker", "exec", f"{cluster.name}-worker-1", "straggle", "report", "/runs/latest")


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_cluster_trains_is_scraped_survives_and_stops(cluster: Cluster, record_property: Any) -> None:
    began_at = time.monotonic()
    cluster.compose("up", "--detach", "--no-build", keys=f"steps=100000 faults.pace.factor={PACE}")
    cluster.wait("the first scraped step of every rank", lambda: len(cluster.steps()) == NUM_WORKERS)
    record_property("seconds_to_the_first_scraped_step", time.monotonic() - began_at)

    # each rank says which container it is in
    workers = [labels["worker"] for labels, _ in cluster.query("straggle_steps_total")]
    assert sorted(workers) == ["fast"] * (NUM_WORKERS - 1) + ["slow"]
    who = run("docker", "exec", f"{cluster.name}-worker-1", "id", "-u")
    assert who != "0"
    names = ("docker", "ps", "--format", "{{.Names}}", "--filter", f"name={cluster.name}-")
    healthy = (*names, "--filter", "health=healthy")
    cluster.wait("all workers to be healthy", lambda: len(run(*healthy).split()) == NUM_WORKERS)

    slow, victim = f"{cluster.name}-slow-1", f"{cluster.name}-worker-2"
    cluster.limit(slow, SLOW_CPUS)
    seconds = cluster.wait("the alert for the slow worker", lambda: cluster.num_alerts(slow) == 1, 300.0)
    record_property("seconds_to_the_alert", seconds)
    assert cluster.num_alerts(victim) == 0
    check_links(cluster)
    cluster.limit(slow, None)
    record_property("seconds_to_its_end", cluster.wait("its end", lambda: cluster.num_alerts(slow) == 0, 300.0))
    cluster.wait_for_more_steps(5)

    # a loaded engine sometimes cannot freeze a busy container at once
    cluster.wait("the victim to be frozen", lambda: works("docker", "pause", victim), 60.0)
    time.sleep(4.0)
    run("docker", "unpause", victim)
    cluster.wait_for_more_steps(5)

    network = f"{cluster.name}-training"
    address = run("docker", "inspect", "-f", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", victim)
    run("docker", "network", "disconnect", network, victim)
    time.sleep(5.0)
    run("docker", "network", "connect", "--ip", address, network, victim)
    cluster.wait_for_more_steps(5)

    began_at = time.monotonic()
    cluster.compose("stop", "worker", "slow")
    record_property("seconds_to_stop", time.monotonic() - began_at)
    logs = cluster.compose("logs", "--timestamps", "--tail", "10", "worker", "slow")
    assert set(cluster.exit_codes().values()) == {STOPPED_BY_SIGTERM}, logs  # 137 would be the engine's SIGKILL
    stopped_after = json.loads(cluster.file("checkpoint/step*/state.json"))["step"]
    assert cluster.file("trace.jsonl").count("\n") + 1 == stopped_after

    # up again goes on from there
    cluster.compose("up", "--detach", "--no-build", keys=f"steps={stopped_after + 10}")
    cluster.wait("the end of the run", lambda: set(cluster.exit_codes().values()) == {0}, 300.0)
    summary = json.loads(cluster.file("summary.json"))
    assert summary["steps"] == stopped_after + 10
    assert len(summary["parameters_sha256"]) == NUM_WORKERS
    assert len(set(summary["parameters_sha256"])) == 1


# -- members that come and go


class Members(Cluster):
    """Workers that are killed, paused, cut off and stopped, without a Prometheus; the last one is the one asked."""

    ranks = tuple(f"rank{rank}" for rank in range(NUM_WORKERS))

    def lines(self, file: str) -> list[dict[str, Any]]:
        """Of a file of the run; none if there is none yet, or the engine cannot look, which it says like one."""
        command = ("docker", "exec", f"{self.name}-{self.ranks[-1]}-1", "cat", f"/runs/latest/{file}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            return []
        return [json.loads(line) for line in done.stdout.splitlines(keepends=True) if line.endswith("\n")]

    def wait_changed(self, rank: int, how: str) -> None:
        """Until the last change is that this rank left, or joined."""

        def changed() -> bool:
            changes = self.lines("members.jsonl")
            return bool(changes) and set(changes[-1][how]) == {str(rank)}

        self.wait(f"rank {rank}, which {how}", changed, 90.0)

    def wait_more_steps(self) -> None:
        """Until the job has made a few steps more."""
        before = len(self.lines("trace.jsonl"))
        self.wait("more steps", lambda: len(self.lines("trace.jsonl")) > before + 5, 60.0)


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_worker_that_is_killed_paused_cut_off_or_stopped_comes_back_while_the_others_go_on(
    image: dict[str, str],
) -> None:
    with made(Members(image, *MEMBERS)) as cluster:
        keys = "steps=100000 merge.check_every=5"
        cluster.compose("up", "--detach", "--no-build", "store", *cluster.ranks, keys=keys)
        cluster.wait("the first steps", lambda: len(cluster.lines("trace.jsonl")) > 5)
        network = f"{cluster.name}-training"
        for rank, away, back in (
            (0, ("kill",), ("start",)),
            (1, ("pause",), ("unpause",)),
            (2, ("network", "disconnect", network), ("network", "connect", network)),
        ):
            container = f"{cluster.name}-rank{rank}-1"
            # a loaded engine sometimes cannot freeze a busy container at once
            cluster.wait(f"{' '.join(away)} of rank {rank}", lambda: works("docker", *away, container), 60.0)  # noqa: B023
            cluster.wait_changed(rank, "left")
            cluster.wait_more_steps()
            run("docker", *back, container)
            cluster.wait_changed(rank, "joined")
            cluster.wait_more_steps()
        steps = cluster.lines("trace.jsonl")
        changes = cluster.lines("members.jsonl")
        stopped = f"{cluster.name}-rank1-1"
        run("docker", "stop", stopped)  # SIGTERM: it leaves
        cluster.wait_changed(1, "left")
        assert run("docker", "inspect", "-f", "{{.State.ExitCode}}", stopped) == str(STOPPED_BY_SIGTERM)  # not SIGKILL
        cluster.wait_more_steps()
        (told,) = cluster.lines("members.jsonl")[len(changes) :]
        seen, asked = (f"{cluster.name}-rank{rank}-1" for rank in (0, NUM_WORKERS - 1))
        metrics = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9640/metrics').read().decode())"
        served = run("docker", "exec", seen, "python", "-c", metrics)
        run("docker", "exec", asked, "straggle", "report", "/runs/latest")
        page = run("docker", "exec", asked, "cat", "/runs/latest/report.html")
        run("docker", "start", stopped)
        cluster.wait_changed(1, "joined")
        cluster.compose("stop", *cluster.ranks)
        codes = {
            run("docker", "inspect", "-f", "{{.State.ExitCode}}", f"{cluster.name}-{name}-1") for name in cluster.ranks
        }
        # all were told, and the last of them left a checkpoint
        logs = cluster.compose("logs", "--timestamps", "--tail", "20", *cluster.ranks)
        assert codes == {str(STOPPED_BY_SIGTERM)}, logs
        saved = json.loads(cluster.file("checkpoint/step*/state.json"))["step"]
    assert saved > told["step"]
    assert told["left_kinds"] == {"1": "notice"}
    assert re.search(r'straggle_members_changes_total\{.*reason="notice".*\} 1\.0', served), served
    assert "rank 1 left: was told to end, and handed its place over" in page
    assert [step["step"] for step in steps] == list(range(len(steps)))
    # nobody else was taken for dead, and nobody was started again beside the one that was killed
    assert [(list(change["left"]), list(change["joined"])) for change in changes] == [
        *(([str(rank)], []) if half == 0 else ([], [str(rank)]) for rank in range(3) for half in range(2))
    ]
    # whoever came back has the others' parameters
    compared = [step["different_ranks"] for step in steps if step["different_ranks"] is not None]
    assert len(compared) >= len(steps) // 6
    assert not any(compared)
    assert not any(rank["absent"] for rank in steps[-1]["ranks"])
