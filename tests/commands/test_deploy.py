"""The files in deploy/: what can be said of them without a cluster."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from repository import ROOT
from training import TINY

from straggle.commands.config import load

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
[ "$*" = "show hostnames node[0-1]" ] && echo localhost && echo localhost
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
pids=()
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || exit; done
"""


def slurm(folder: Path, *keys: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the batch script as Slurm does on two nodes, with these variables of the environment."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
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
    command = ["bash", str(DEPLOY / "slurm" / "train.sbatch"), *keys]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_batch_script_trains_on_two_nodes_and_goes_on_when_it_is_submitted_again(tmp_path: Path) -> None:
    for steps in (4, 7):
        done = slurm(tmp_path, *TINY, "faults=none", f"steps={steps}", "run_dir=run")
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["steps"] == steps
        assert len(summary["parameters_sha256"]) == 2
        assert len(set(summary["parameters_sha256"])) == 1
    steps_of_trace = [json.loads(line)["step"] for line in (tmp_path / "run" / "trace.jsonl").read_text().splitlines()]
    assert steps_of_trace == list(range(7))


@pytest.mark.slow
def test_batch_script_fails_where_the_training_does(tmp_path: Path) -> None:
    assert slurm(tmp_path, "stepz=4", SLURM_NNODES="1").returncode != 0


@pytest.mark.parametrize(
    ("variables", "workers"),
    [({}, 1), ({"SLURM_GPUS_ON_NODE": "3"}, 3), ({"SLURM_GPUS_ON_NODE": "3", "WORKERS": "2"}, 2)],
)
def test_batch_script_starts_a_worker_for_each_gpu_or_as_many_as_it_is_told(
    variables: dict[str, str], workers: int, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "torchrun").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    printed = slurm(tmp_path, "steps=4", **variables).stdout.splitlines()
    assert len(printed) == 2  # on each node
    for line in printed:
        assert f"--nnodes 2 --nproc-per-node {workers} " in line
        assert line.endswith("-m straggle train resume=auto steps=4")


# -- Kubernetes


def manifests() -> dict[str, dict[str, Any]]:
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return {manifest["kind"]: manifest for file in files for manifest in yaml.safe_load_all(file.read_text())}


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


def test_manifests_follow_the_schemas_of_kubernetes() -> None:
    validation = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is in the extra deploy")
    kinds = manifests()
    jobs = kinds["JobSet"]["spec"]["replicatedJobs"]
    made = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **job["template"]} for job in jobs]
    for manifest in (*made, kinds["PersistentVolumeClaim"]):
        validation.validate(manifest, KUBERNETES, strict=True)
    made[0]["spec"]["paralelism"] = 4
    with pytest.raises(validation.ValidationError):
        validation.validate(made[0], KUBERNETES, strict=True)


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
