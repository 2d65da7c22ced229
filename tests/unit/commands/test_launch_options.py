"""Command lines of `straggle launch`: what is refused, and what a worker finds in its environment."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import pytest

from straggle.commands.launch import LaunchedJob, worker_environment
from straggle.commands.launching.launch_options import arguments, port_number
from straggle.commands.launching.store_host import StoreAddress

TWO_NODES = ["--nnodes", "2", "--rdzv-endpoint", "node0:29500"]
JOB = LaunchedJob(4, 2, 1, StoreAddress("node0", 29500), "job7", 10)


def test_options_end_at_the_script_and_may_be_written_with_underscores() -> None:
    given = arguments(["--nproc_per_node=3", "--max-restarts", "2", "train.py", "--nproc-per-node", "9"], {})
    assert (given.nproc_per_node, given.max_restarts, given.node_rank) == (3, 2, 0)
    assert (given.script, given.arguments) == ("train.py", ["--nproc-per-node", "9"])
    given = arguments(["--log_dir", "logs", "--standalone", "-m", "package.train"], {})
    assert (given.module, given.script, given.log_dir) == (True, "package.train", Path("logs"))


def test_torchruns_variables_are_the_defaults_as_kubeflow_sets_them() -> None:
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "3", "PET_NODE_RANK": "1", "PET_MAX_RESTARTS": "4"}
    place = {"PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29400"}
    given = arguments(["a.py"], {**variables, **place})
    assert (given.nnodes, given.nproc_per_node, given.node_rank, given.max_restarts) == (2, 3, 1, 4)
    assert given.rdzv_endpoint == StoreAddress("job-node-0-0.job", 29400)
    given = arguments([*TWO_NODES, "--node_rank", "0", "--nproc-per-node", "1", "a.py"], {**variables, **place})
    assert (given.nproc_per_node, given.node_rank, given.rdzv_endpoint) == (1, 0, StoreAddress("node0", 29500))
    given = arguments(["a.py"], {**variables, **place, "PET_RDZV_ENDPOINT": "store:1"})
    assert given.rdzv_endpoint == StoreAddress("store", 1)
    assert arguments(["--nproc-per-node", "cpu", "a.py"], {}).nproc_per_node == os.cpu_count()
    empty = {
        "PET_LOG_DIR": "",
        "PET_NNODES": "",
        "PET_MASTER_ADDR": "",
        "PET_RDZV_ENDPOINT": "",
        "PET_MAX_RESTARTS": "",
    }
    given = arguments(["a.py"], empty)
    assert (given.log_dir, given.nnodes, given.rdzv_endpoint, given.max_restarts) == (None, 1, None, 10)
    assert arguments(["--nnodes", "1", "a.py"], {"PET_NNODES": "1:2"}).nnodes == 1  # which the option overrides
    assert arguments(["a.py"], {"PET_NNODES": "1:1"}).nnodes == 1


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (["a.py"], {"PET_NNODES": "1:2"}, "PET_NNODES=1:2: 1:2: a job has a fixed number of nodes"),
        (["a.py"], {"PET_NNODES": "x:x"}, "PET_NNODES=x:x: x: must be an integer of at least 1"),
        (["a.py"], {"PET_NODE_RANK": "a"}, "PET_NODE_RANK=a: invalid literal for int() with base 10: 'a'"),
        (["a.py"], {"PET_MAX_RESTARTS": "-1"}, "PET_MAX_RESTARTS=-1: -1: must be an integer of at least 0"),
        (["a.py"], {"PET_MASTER_ADDR": "node0", "PET_MASTER_PORT": "x"}, "'node0:x' is no HOST:PORT"),
        (["--rdzv-endpoint=http://node0:1", "a.py"], {}, "'http://node0:1' is no HOST:PORT"),
        ([], {}, "the following arguments are required: script"),
        (["--nproc-per-node", "many", "a.py"], {}, "many: must be an integer of at least 1"),
        (["--restart-delay-s", "soon", "a.py"], {}, "soon: must be seconds, at least 0"),
        (["--rdzv-endpoint", "node0:99999", "a.py"], {}, "'node0:99999' is no HOST:PORT"),
        (["--nnodes", "2", "--node-rank", "0", "a.py"], {}, "need --node-rank, 0 on the first, and the same"),
        ([*TWO_NODES, "a.py"], {}, "several nodes need --node-rank, 0 on the first"),
        (["--nproc", "2", "a.py"], {}, "unrecognized arguments: --nproc"),
    ],
)
def test_wrong_command_line_is_refused_with_what_is_wrong(
    words: list[str], environment: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments(words, environment)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_help_fits_on_a_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        arguments(["--help"], {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert sum(line.startswith("  straggle launch ") for line in lines) == 3


def test_ranks_of_a_node_follow_those_of_the_node_before() -> None:
    found = [worker_environment(JOB, local_rank, {}) for local_rank in range(4)]
    assert [environment["RANK"] for environment in found] == ["4", "5", "6", "7"]
    assert {(e["WORLD_SIZE"], e["LOCAL_WORLD_SIZE"], e["GROUP_RANK"]) for e in found} == {("8", "4", "1")}
    assert {(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in found} == {("node0", "29500")}


def test_what_the_user_has_set_stays_and_what_an_outer_job_has_set_does_not() -> None:
    users = {"OMP_NUM_THREADS": "3", "MALLOC_ARENA_MAX": "7", "TORCH_GLOO_LAZY_INIT": "0", "PATH": "/bin"}
    found = worker_environment(JOB, 0, {**users, "RANK": "17", "MASTER_ADDR": "elsewhere"})
    assert found.items() >= {**users, "RANK": "4", "MASTER_ADDR": "node0"}.items()
    plain = worker_environment(replace(JOB, nproc_per_node=10**6), 0, {})
    names = ("OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "TORCH_GLOO_LAZY_INIT")
    assert [plain[name] for name in names] == ["1", "2", "1"]


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("node0:29500", StoreAddress("node0", 29500)),
        ("10.0.0.1:1", StoreAddress("10.0.0.1", 1)),
        ("[::1]:80", StoreAddress("::1", 80)),
    ],
)
def test_endpoint_is_read_as_it_is_written(text: str, endpoint: StoreAddress) -> None:
    assert StoreAddress.of(text) == endpoint
    assert str(endpoint) == text


def test_replica_that_would_be_on_two_nodes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--nproc-per-node=3", "--replica-size=2", "train.py"], {})
    assert "--nproc-per-node must be a multiple of it, and is 3" in capsys.readouterr().err
    assert arguments(["--nproc-per-node=4", "--replica-size=2", "train.py"], {}).replica_size == 2


def test_port_of_a_store_is_a_port() -> None:
    assert [port_number("0"), port_number("65535")] == [0, 65535]
    for text in "65536", "-1", "http", "1.5", "":
        with pytest.raises(argparse.ArgumentTypeError, match="must be a port, 1 to 65535"):
            port_number(text)
