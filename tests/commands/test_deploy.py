"""The files in deploy/: what can be said of them without a cluster."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_jobs import wait_for_end
from machines import by_hand
from ranks import started_command, straggle_main
from repository import ROOT
from torch.distributed.run import config_from_args, get_args_parser
from torchrun import started_agent
from training import TINY

from straggle.commands.configuration.config import load
from straggle.commands.launching.launch_options import arguments as launch_arguments
from straggle.members.agents import DO_NOT_RESTART

DEPLOY = ROOT / "deploy"
SCRIPTS = [ROOT / "launch.sh", *sorted(DEPLOY.rglob("*.sbatch"))]
PROGRAMS = Path(sys.executable).parent  # torchrun, and shellcheck where the extra "deploy" is installed
KUBERNETES = "1.31"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("no shellcheck; it is in the extra deploy")
    done = subprocess.run([shellcheck, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# -- Slurm

# what the batch script needs of Slurm: the list of nodes, and the command once on each, here all on this machine
SCONTROL = """#!/bin/bash
[[ "$*" == "show hostnames node["* ]] && echo localhost && echo localhost
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do echo "$1" >>srun; shift; done
pids=()
for ((node = 0; node < SLURM_NNODES; node++)); do
  SLURM_NODEID=$node "$@" & pids+=($!)
  echo $! >pid$node
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
"""


def slurm(
    folder: Path, *keys: str, script: str = "train", srun: str = SRUN, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a batch script as Slurm does on two nodes, with these variables of the environment."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in (("scontrol", SCONTROL), ("srun", srun)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    with socket.socket() as listener:  # the script adds 20000
        listener.bind(("127.0.0.1", 0))
        job = listener.getsockname()[1] % 10000
    own = {name: value for name, value in os.environ.items() if name not in ("WORKERS", "SLURM_GPUS_ON_NODE")}
    environment = {
        **own,
        "PATH": os.pathsep.join([str(programs), str(PROGRAMS), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
        **variables,
    }
    command = ["bash", str(DEPLOY / "slurm" / f"{script}.sbatch"), *keys]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def program_of(folder: Path, name: str, body: str) -> None:
    """In place of a program, where only what the script gives to it or takes from it counts."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


@pytest.mark.slow
def test_batch_script_trains_on_two_nodes_and_goes_on_when_it_is_submitted_again(tmp_path: Path) -> None:
    """What it starts on each node is started here without the seconds of loading torch."""
    program_of(tmp_path, "torchrun", 'echo "$@"')
    for steps in (4, 7):
        nodes = slurm(tmp_path, *TINY, "faults=none", f"steps={steps}", "run_dir=run").stdout.splitlines()
        assert len(nodes) == 2
        with contextlib.ExitStack() as stack:
            agents = []
            for options, words in (node.split(" -m straggle ") for node in nodes):
                command = (options.split(), straggle_main, *words.split())
                agents.append(stack.enter_context(started_agent(*command, folder=tmp_path)))
            ended = [agent.status(200.0) for agent in agents]
            assert ended == [0, 0], "".join(agent.log.read_text() for agent in agents)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 7
    assert len(summary["parameters_sha256"]) == 2
    assert len(set(summary["parameters_sha256"])) == 1
    steps_of_trace = [json.loads(line)["step"] for line in (tmp_path / "run" / "trace.jsonl").read_text().splitlines()]
    assert steps_of_trace == list(range(7))


def test_batch_script_fails_where_the_training_does(tmp_path: Path) -> None:
    program_of(tmp_path, "torchrun", "exit $((SLURM_NODEID * 3))")
    assert slurm(tmp_path, "steps=4").returncode == 3
    program_of(tmp_path, "torchrun", "exit 0")
    assert slurm(tmp_path, "steps=4").returncode == 0


@pytest.mark.parametrize(
    ("variables", "workers"),
    [({}, 1), ({"SLURM_GPUS_ON_NODE": "3"}, 3), ({"SLURM_GPUS_ON_NODE": "3", "WORKERS": "2"}, 2)],
)
def test_batch_script_starts_a_worker_for_each_gpu_or_as_many_as_it_is_told(
    variables: dict[str, str], workers: int, tmp_path: Path
) -> None:
    program_of(tmp_path, "torchrun", 'echo "$@"')
    printed = slurm(tmp_path, "steps=4", **variables).stdout.splitlines()
    assert len(printed) == 2  # on each node
    for line in printed:
        assert f"--nnodes 2 --nproc-per-node {workers} " in line
        assert line.endswith("-m straggle train resume=auto steps=4")


# the store, which the script has to end; the first node, which ends well; and the second one, which is lost
STRAGGLE = """
case "$*" in *--store-only*) echo "$$ $*" >store.part && mv store.part store && exec sleep 1000 ;; esac
until [ -e store ]; do sleep 0.01; done
echo "$*" >node$SLURM_NODEID
[ "$SLURM_NODEID" = 0 ] || kill -KILL $$
"""


def test_batch_script_of_members_outlives_a_node_that_is_lost_and_ends_its_store(tmp_path: Path) -> None:
    program_of(tmp_path, "straggle", STRAGGLE)
    ended = slurm(tmp_path, "steps=100", "members.min_ranks=1", script="members")
    assert ended.returncode == 128 + signal.SIGKILL, ended.stdout + ended.stderr  # the task that was killed
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set((tmp_path / "srun").read_text().split())
    pid, *store = (tmp_path / "store").read_text().split()
    wait_for_end(int(pid))
    for number in range(2):
        words = (tmp_path / f"node{number}").read_text().split()
        given = launch_arguments(words[1:], {})
        assert (given.nnodes, given.node_rank, given.nproc_per_node, given.external_store) == (2, number, 1, True)
        assert (given.module, given.script, given.preload) == (True, "straggle", ("straggle.commands.train",))
        assert store == ["launch", "--store-only", "--port", str(given.rdzv_endpoint.port)]
        config = load("train", given.arguments[1:])
        assert (config.resume, config.members.min_ranks, config.steps) == ("auto", 1, 100)


# one task for each rank; what pyxis would make of its options is left out
SRUN_OF_TASKS = """#!/bin/bash
while [[ $1 == --* ]]; do echo "$1" >>srun; shift; done
pids=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
  SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_NODEID=$task "$@" & pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
"""


def test_each_task_of_the_script_with_a_container_is_a_rank(tmp_path: Path) -> None:
    variables = {"SLURM_NTASKS": "2", "IMAGE": "straggle.sqsh"}
    program_of(tmp_path, "python3", 'env -0 >"environment$SLURM_PROCID"; echo "$@"')  # the container's
    keys = (*TINY, "faults=none", "metrics=none", "report=false", "steps=4", "run_dir=run")
    done = slurm(tmp_path, *keys, script="container", srun=SRUN_OF_TASKS, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    (command,) = set(done.stdout.splitlines())
    assert command.startswith("-m straggle train resume=auto ")
    with contextlib.ExitStack() as stack:  # as python3 would, without the seconds of loading torch
        ranks = []
        for task in range(2):
            given = (tmp_path / f"environment{task}").read_text().strip("\0").split("\0")
            environment = dict(variable.split("=", 1) for variable in given)
            words = command.split()[2:]
            ranks.append(stack.enter_context(started_command(*words, folder=tmp_path, environment=environment)))
        ended = [rank.status(200.0) for rank in ranks]
        assert ended == [0, 0], "".join(rank.log.read_text() for rank in ranks)
    options = (tmp_path / "srun").read_text().splitlines()
    assert "--container-image=straggle.sqsh" in options
    assert f"--container-mounts={tmp_path}/runs:/runs" in options
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 4
    assert len(summary["parameters_sha256"]) == 2
    assert len(set(summary["parameters_sha256"])) == 1
    done = slurm(tmp_path, script="container", srun=SRUN_OF_TASKS, SLURM_NTASKS="2")
    assert done.returncode
    assert "IMAGE: the container" in done.stderr


# -- Kubernetes


def manifests(*names: str) -> dict[str, dict[str, Any]]:
    """What stands in these files, or in those of a job of a fixed number of workers, by kind."""
    files = [DEPLOY / "kubernetes" / f"{name}.yaml" for name in names or ("train", "podmonitor")]
    return {manifest["kind"]: manifest for file in files for manifest in yaml.safe_load_all(file.read_text())}


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    """The one container of a manifest's pods."""
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_every_pod_knows_how_many_there_are_and_where_the_first_one_is() -> None:
    jobset = manifests()["JobSet"]
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert int(environment["NODES"]) == spec["parallelism"] == spec["completions"]
    first = f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['spec']['network']['subdomain']}"
    assert environment["RENDEZVOUS"].partition(":")[0] == first
    config = load("train", container["args"])
    assert config.resume == "auto"
    (volume,) = spec["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == manifests()["PersistentVolumeClaim"]["metadata"]["name"]
    (mount,) = container["volumeMounts"]
    assert Path(mount["mountPath"]) in Path(config.run_dir).parents


def test_monitor_selects_the_pods_and_the_port_that_serves_metrics() -> None:
    kinds = manifests()
    pod = kinds["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    monitor = kinds["PodMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (container,), (endpoint,) = pod["spec"]["containers"], monitor["podMetricsEndpoints"]
    assert [port["name"] for port in container["ports"]] == [endpoint["port"]]
    assert load("train", container["args"]).metrics.port == container["ports"][0]["containerPort"]
    assert {"targetLabel": "job", "replacement": "straggle"} in endpoint["relabelings"]


@pytest.mark.parametrize(
    ("labels", "run"),
    [
        ({"batch_kubernetes_io_job_name": "straggle-members"}, "straggle-members"),
        ({"batch_kubernetes_io_job_name": "x-0", "jobset_sigs_k8s_io_jobset_name": "x"}, "x"),
    ],
)
def test_monitor_names_the_run_by_its_job_or_its_jobset(labels: dict[str, str], run: str) -> None:
    (endpoint,) = manifests()["PodMonitor"]["spec"]["podMetricsEndpoints"]
    named = {f"__meta_kubernetes_pod_label_{name}": value for name, value in labels.items()}
    for rule in endpoint["relabelings"]:
        value = "".join(named.get(name, "") for name in rule.get("sourceLabels", ()))
        if re.fullmatch(rule.get("regex", "(.*)"), value):
            named[rule["targetLabel"]] = rule.get("replacement", value)
    assert (named["job"], named["run"]) == ("straggle", run)


def test_commands_over_the_monitor_make_objects_of_the_rules() -> None:
    comments = re.findall(r"^#   (.*)$", (DEPLOY / "kubernetes" / "podmonitor.yaml").read_text(), re.MULTILINE)
    script = "\n".join(comments[comments.index("for file in rules alerts; do") :])
    assert script.endswith("| kubectl apply -f -")
    made = subprocess.check_output(["bash", "-c", script.replace("kubectl apply -f -", "cat")], cwd=ROOT, text=True)
    objects = [one for one in yaml.safe_load_all(made) if one]
    files = [yaml.safe_load((DEPLOY / "prometheus" / f"{name}.yml").read_text()) for name in ("rules", "alerts")]
    assert [one["spec"] for one in objects] == files
    assert {one["kind"] for one in objects} == {"PrometheusRule"}


@pytest.mark.parametrize("name", ["train", "members", "trainjob"])
def test_command_for_a_script_of_ones_own_is_one_with_variables_that_the_pod_has(name: str) -> None:
    (line,) = re.findall(rf"^\| {name}\.yaml \| `\[(.*)\]` \|$", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    text = (DEPLOY / "kubernetes" / f"{name}.yaml").read_text()
    for variable in re.findall(r"\$\((\w+)\)", line):
        assert f"- name: {variable} " in text or f"- name: {variable}\n" in text, variable
    values = {"$(RENDEZVOUS)": "a:29400", "$(STORE)": "a:29500", "$(NODE_RANK)": "3"}
    words = [re.sub(r"\$\(\w+\)", lambda found: values[found[0]], word) for word in line.split(", ")]
    if words[0] == "torchrun":
        given = get_args_parser().parse_args(words[1:])
        assert given.training_script == "train.py"
    else:
        assert words[:2] == ["straggle", "launch"]
        assert launch_arguments(words[2:], {}).script == "train.py"


def test_manifests_follow_the_schemas_of_kubernetes() -> None:
    validation = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is in the extra deploy")
    kinds = manifests()
    jobs = kinds["JobSet"]["spec"]["replicatedJobs"]
    made = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **job["template"]} for job in jobs]
    for manifest in (*made, kinds["PersistentVolumeClaim"]):
        validation.validate(manifest, KUBERNETES, strict=True)
    of_members = manifests("members")
    assert set(of_members) == {"PersistentVolumeClaim", "Service", "Deployment", "Job", "NetworkPolicy"}
    for manifest in of_members.values():
        validation.validate(manifest, KUBERNETES, strict=True)
    made[0]["spec"]["paralelism"] = 4
    with pytest.raises(validation.ValidationError):
        validation.validate(made[0], KUBERNETES, strict=True)


def test_trainjob_follows_the_types_of_kubeflow_and_leaves_to_its_runtime_what_that_sets() -> None:
    api = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is in the extra deploy")
    kinds = manifests("trainjob")
    assert kinds["PersistentVolumeClaim"] == manifests()["PersistentVolumeClaim"]
    job = kinds["TrainJob"]
    assert api.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job  # a field that it does not know gets lost
    (patch,) = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pods = patch["template"]["spec"]["template"]
    assert (patch["name"], pods["spec"]["containers"][0]["name"]) == ("node", "node")  # as in torch-distributed
    trainer = job["spec"]["trainer"]
    assert not [word for word in trainer["command"] if word.startswith("--")]  # an option would override PET_NNODES
    assert "env" not in trainer
    config = load("train", trainer["args"])
    assert config.resume == "auto"
    (mount,), (volume,) = pods["spec"]["containers"][0]["volumeMounts"], pods["spec"]["volumes"]
    assert Path(mount["mountPath"]) in Path(config.run_dir).parents
    assert volume["persistentVolumeClaim"]["claimName"] == kinds["PersistentVolumeClaim"]["metadata"]["name"]
    trainer["numNodez"] = 4
    assert api.TrainerV1alpha1TrainJob.from_dict(job).to_dict() != job


def test_variables_of_kubeflow_are_to_torchrun_what_the_options_by_hand_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job by hand trains on two machines in tests/cluster."""
    (job,) = [one for one in manifests("trainjob").values() if one["kind"] == "TrainJob"]
    program, *words = job["spec"]["trainer"]["command"]
    options = by_hand().replace("--nproc-per-node 8", "--nproc-per-node 1").split()
    assert [program, *words] == [options[0], *options[-3:]]
    expected, _, _ = config_from_args(get_args_parser().parse_args(options[1:]))
    place = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "NNODES": "2", "NPROC_PER_NODE": "1", "NODE_RANK": "0"}
    for name, value in place.items():  # what the runtime torch-distributed gives a pod
        monkeypatch.setenv(f"PET_{name}", value)
    config, _, _ = config_from_args(get_args_parser().parse_args(words))
    for name in ("min_nodes", "max_nodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_configs"):
        assert getattr(config, name) == getattr(expected, name), name


def test_members_and_their_store_find_each_other() -> None:
    kinds = manifests("members")
    store, worker, service = pod(kinds["Deployment"]), pod(kinds["Job"]), kinds["Service"]
    environment = {variable["name"]: variable.get("value") for variable in worker["env"]}
    (port,) = service["spec"]["ports"]
    assert environment["STORE"] == f"{service['metadata']['name']}:{port['port']}"
    assert store["ports"] == [{"name": port["targetPort"], "containerPort": int(store["command"][-1])}]
    store_labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= store_labels.items()
    spec = kinds["Job"]["spec"]
    assert int(environment["NODES"]) == spec["parallelism"] == spec["completions"]
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [DO_NOT_RESTART]
    # only those that the policy lets in reach a worker; the monitor finds workers, and nothing else
    policy = kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    monitor = manifests()["PodMonitor"]["spec"]["selector"]["matchLabels"]
    labels = spec["template"]["metadata"]["labels"]
    assert policy.items() <= labels.items() & store_labels.items()
    assert monitor.items() <= labels.items()
    assert not monitor.items() <= store_labels.items()
    config = load("train", ["members=elastic", *worker["args"]])
    assert config.resume == "auto"
    assert config.metrics.port == worker["ports"][0]["containerPort"]


class Pods:
    """The pods of ``members.yaml`` as processes of this machine: their own commands, three of the four workers."""

    num_workers = 3

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        kinds = manifests("members")
        self.worker, self.store = pod(kinds["Job"]), pod(kinds["Deployment"])["command"]
        self.folder, self.stack = folder, stack
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = str(listener.getsockname()[1])
        self.own = {
            **{name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"},
            "PATH": os.pathsep.join([str(PROGRAMS), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        self.start("store", [*self.store[:-1], self.port], {})

    def start(self, name: str, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """One pod; it is killed at the end."""
        log = self.stack.enter_context((self.folder / f"{name}.log").open("ab"))
        process = subprocess.Popen(command, cwd=self.folder, env=self.own | environment, stdout=log, stderr=log)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process

    def start_worker(self, rank: int, *keys: str) -> subprocess.Popen[bytes]:
        """The pod with this number, which the Job's controller would give it."""
        environment = {variable["name"]: variable.get("value") for variable in self.worker["env"]}
        assert {name for name, value in environment.items() if value is None} == {"NODE_RANK"}
        environment |= {"STORE": f"127.0.0.1:{self.port}", "NODES": str(self.num_workers), "KEYS": " ".join(keys)}
        environment |= {"NODE_RANK": str(rank)}
        (program,) = self.worker["command"]  # as the Dockerfile names it
        path = ROOT / "docker" / f"{program.removeprefix('straggle-')}.py"
        return self.start(f"rank{rank}", [sys.executable, str(path), *self.worker["args"]], environment)

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        until = time.monotonic() + 180.0
        while not done():
            if time.monotonic() > until:
                logs = "".join(path.read_text() for path in self.folder.glob("*.log"))
                raise AssertionError(f"waited in vain for {what}\n{logs}")
            time.sleep(0.1)


def lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of a run; none where there is no such file yet."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pods_of_members_are_restarted_one_by_one_while_the_others_go_on(tmp_path: Path) -> None:
    keys = (*TINY, "faults=pace", "faults.pace.factor=6", "run_dir=run", "steps=100000", "merge.check_every=5")
    keys = (*keys, "members.min_ranks=1")
    run_dir = tmp_path / "run"

    def changes() -> list[tuple[list[str], list[str]]]:
        return [(list(one["left"]), list(one["joined"])) for one in lines(run_dir / "members.jsonl")]

    with contextlib.ExitStack() as stack:
        pods = Pods(tmp_path, stack)
        workers = [pods.start_worker(rank, *keys) for rank in range(pods.num_workers)]
        pods.wait("the first steps", lambda: len(lines(run_dir / "trace.jsonl")) > 5)
        # deleted or evicted; lost with its node
        for rank, number, status in ((0, signal.SIGTERM, 128 + signal.SIGTERM), (1, signal.SIGKILL, -signal.SIGKILL)):
            workers[rank].send_signal(number)
            assert workers[rank].wait(200.0) == status
            pods.wait(f"rank {rank} to leave", lambda: changes()[-1:] == [([str(rank)], [])])  # noqa: B023
        kinds = [kind for change in lines(run_dir / "members.jsonl") for kind in change["left_kinds"].values()]
        assert kinds[0] == "notice"
        assert kinds[1] in ("silent", "ended")
        workers[:2] = [pods.start_worker(rank, *keys) for rank in range(2)]
        pods.wait("both to come back", lambda: sorted(rank for _, joined in changes() for rank in joined) == ["0", "1"])
        so_far = len(lines(run_dir / "trace.jsonl"))
        pods.wait("more steps", lambda: len(lines(run_dir / "trace.jsonl")) > so_far + 10)
        assert [worker.poll() for worker in workers] == [None] * pods.num_workers
    steps = lines(run_dir / "trace.jsonl")
    assert [step["step"] for step in steps] == list(range(len(steps)))
    compared = [step["different_ranks"] for step in steps[so_far:] if step["different_ranks"] is not None]
    assert compared
    assert not any(compared)


# -- TorchX


def test_component_starts_the_workers_that_it_is_asked_for() -> None:
    pytest.importorskip("torchx", reason="torchx is in the extra deploy")
    from torchx.specs.finder import get_component

    component = get_component(f"{DEPLOY / 'torchx' / 'component.py'}:train")
    assert component.validation_errors == []
    app = component.fn("steps=10", j="3x4", cpu=8)
    (role,) = app.roles
    assert role.num_replicas == 3
    assert role.env["OMP_NUM_THREADS"] == "2"
    (command,) = [argument for argument in role.args if "torchrun" in argument]
    assert "--nproc_per_node 4" in command
    assert command.endswith("-m straggle train resume=auto steps=10")


def test_commands_of_the_component_have_valid_keys() -> None:
    path = DEPLOY / "torchx" / "component.py"
    lines = (path.read_text().partition('"""')[2].partition('"""')[0]).splitlines()
    commands = [line.split() for line in lines if line.startswith("torchx run")]
    assert commands
    for words in commands:
        assert f"{path.relative_to(ROOT)}:train" in words
        load("train", [word for word in words if "=" in word])
