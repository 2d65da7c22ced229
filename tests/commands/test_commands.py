"""The commands as a user starts them: real processes, real files."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from machines import BY_ENDPOINT, by_hand, commands_of_several_nodes
from ranks import run_command
from repository import ROOT
from rich.console import Console
from training import TINY, saved_step

import straggle
from straggle import MembersReport, RankReport, StageReport, StepReport
from straggle.__main__ import COMMANDS, main
from straggle.commands.configuration.config import load
from straggle.commands.configuration.schema import ConfigurationError
from straggle.commands.launching.launch_options import arguments as launch_arguments
from straggle.commands.result import deeds, mean_shares
from straggle.lab.build import build_faults
from straggle.observe.console import LiveView
from straggle.observe.numbers.replicas import Replicas
from straggle.observe.trace import TraceWriter, read_trace

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def rank(number: int, compute_s: float, stage_s: tuple[float, ...], **rest: Any) -> RankReport:
    whole = tuple(float(not math.isnan(at)) for at in stage_s)
    times = dict.fromkeys(("outside_s", "data_s", "forward_s", "backward_s", "wait_s"), 0.0)
    own = {"compute_s": compute_s, "reach": sum(whole) / len(whole), "stages": whole, "stage_s": stage_s}
    return RankReport(rank=number, **times, **own, **rest)


def report(*ranks: RankReport, step: int = 0, seconds: float = 1.5) -> StepReport:
    return StepReport(step, seconds, 1.2, ranks, (StageReport("head", 4, 2.0, False),), {"loss": 2.5})


# -- the trace


def test_trace_gives_back_what_was_written_and_goes_on_where_a_run_resumes(tmp_path: Path) -> None:
    path = tmp_path / "run" / "trace.jsonl"
    with TraceWriter(path) as trace:
        for step in range(4):
            trace.write(report(rank(0, math.nan, (math.nan,)), step=step))
    with TraceWriter(path, first_step=2) as trace:
        trace.write(report(rank(0, 1.0, (1.0,)), step=2))
    records = list(read_trace(path))
    assert [record["step"] for record in records] == [0, 1, 2]
    assert records[0]["ranks"][0]["compute_s"] is None  # JSON has no NaN
    assert records[2]["ranks"][0]["compute_s"] == 1.0


def test_trace_without_its_last_half_line_can_be_read_and_garbage_cannot(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"step": 0}\n{"step": 1')
    assert list(read_trace(path)) == [{"step": 0}]
    path.write_text('{"step": 0}\nnonsense\n')
    with pytest.raises(ValueError, match="not a trace"):
        list(read_trace(path))


# -- the view


def test_view_prints_plain_lines_where_there_is_no_terminal() -> None:
    console = Console(force_terminal=False, width=120, record=True)
    with LiveView(20, console=console) as view:
        view.show(report(rank(0, 1.0, (1.0,)), rank(1, 1.0, (math.nan,), late=True), step=0))
    assert "step 1500 ms (DDP: ~1500 ms)  rank 1 was stopped in 1 of 1 steps  loss 2.500" in console.export_text()


def test_line_of_a_narrow_terminal_is_cut_and_not_the_number_of_the_step() -> None:
    shown = io.StringIO()
    with LiveView(20, console=Console(force_terminal=True, width=60, file=shown)) as view:
        view.show(report(rank(0, 1.0, (1.0,)), rank(1, 1.0, (math.nan,), late=True), step=0))
    last = shown.getvalue().rpartition("1/20")[2]
    assert "step 1500 ms (DDP: ~1500 ms)  rank 1" in last
    assert "…" in last


def test_view_names_absent_ranks_and_says_when_the_members_change() -> None:
    console = Console(force_terminal=False, width=160, record=True)
    one, two = (dataclasses.replace(rank(number, math.nan, (math.nan,)), absent=True) for number in (1, 2))
    now = iter([100.0, 112.4])
    with LiveView(20, console=console, clock=lambda: next(now)) as view:
        view.changed(
            MembersReport(2, 0, (0,), 3, left={2: "its process ended by SIGKILL, after 3.0 s"}, left_kinds={2: "ended"})
        )
        view.show(report(rank(0, 1.0, (1.0,)), one, two, step=0))  # rank 1 had left before
    lines = console.export_text().splitlines()
    assert lines[0].rstrip() == "members: rank 2 left: its process ended by SIGKILL, after 3.0 s (1 of 3 ranks)"
    absent = "absent: 1; 2 for 12 s (its process ended by SIGKILL, after 3.0 s)"
    assert lines[1].rstrip().endswith(f"no rank is late  loss 2.500  {absent}")


# -- the configuration


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["stepz=3"], "unknown key stepz; valid keys: steps, seed"),
        (
            ["deadline=soon"],
            "deadline=soon: choose one of auto, budget, first_k, fixed, none, quantile, shadow",
        ),
        (["deadline.budget_s=1"], "unknown key deadline.budget_s; deadline has window, warmup_steps, every"),
        (["deadline.k=3"], "max_over_median; deadline=first_k has k"),
        (["members.min_ranks=2"], "unknown key members.min_ranks; members has no keys; members=elastic has min_ranks"),
        (["+faults.slow.speed=1"], "faults.slow: Slowdown.__init__() got an unexpected keyword argument 'speed'"),
        (["steps=many"], "steps=many: must be an integer"),
        (["steps=true"], "steps=True: must be an integer"),
        (["batch_size=4.0"], "batch_size=4.0: must be an integer"),
        (["checkpoint_every='5'"], "checkpoint_every=5: must be an integer"),
        (["report=3"], "report=3: must be true or false"),
        (["run_dir=3"], "run_dir=3: must be text"),
        (["replay=3"], "replay=3: must be text"),
        (["merge=mean"], "merge=mean: must be a part with keys of its own"),
        (["~deadline"], "deadline has no value: leave out what takes it away, such as ~deadline"),
        (["steps=0"], "steps=0: must be an integer of at least 1"),
        (["+foo=1"], "unknown key foo; valid keys: steps, seed"),
        (["~report"], "report has no value: leave out what takes it away, such as ~report"),
        (["deadline=quantile", "deadline.q=1.5"], "q=1.5: a quantile lies between 0 and 1"),
        (["workload.path=/nowhere"], "text path not found: /nowhere"),
        (["tset"], "'tset' is no key=value"),
        (["=5"], "'=5' is no key=value"),
        (["steps==5"], "'steps==5' is no key=value"),
        (["--steps=5"], "unknown option --steps=5; keys are written without dashes, such as steps=10"),
        (["run_dir="], "run_dir=: give a folder"),
        (["faults.slow.ranks=3"], "faults.slow.ranks=3: must be a list of numbers, such as [0,1]"),
        (["faults.slow.ranks=all"], "faults.slow.ranks=all: must be a list of numbers, such as [0,1]"),
        (["faults.slow.factor=abc"], "faults.slow.factor=abc: must be a number"),
        (["optimizer.lr=abc"], "optimizer.lr=abc: must be a number"),
        (["stages=200"], "stages=200: this model can be divided into 1 to"),
        (["stages=[blocks.9]"], "stages not found in GPT: ['blocks.9']; it has embedding"),
        (["estimator=last_own", "estimator.weight=2"], "weight=2: relative to a computed gradient's weight of 1"),
        (["estimator=optimizer_momentum", "optimizer=sgd", "optimizer.momentum=0"], "SGD keeps no momentum"),
        (["deadline=auto", "deadline.max_over_median=null"], "max_over_median=None: must be a number above 1"),
        (["deadline=quantile", "deadline.q=null"], "q=None: a quantile lies between 0 and 1"),
        (
            ["+deadline.foo=1", "deadline=shadow"],
            "__init__() got an unexpected keyword argument 'foo'",
        ),
        (["deadline=shadow", "deadline.inner.foo=1"], "unknown key deadline.inner.foo; deadline.inner has q, slack"),
        (["merge.check_every=2.5"], "check_every=2.5: must be an integer"),
        (["rebalance=by_speed", "rebalance.window=0"], "window=0: must be an integer of at least 2"),
        (["delays=none"], "unknown key delays; valid keys: steps"),
        (["members=elastic", "members.suspect_s=0"], "suspect_s=0: must be a finite number of seconds, at least 0.5"),
        (["members=elastic", "members.absence_gain=0.5"], "absence_gain=0.5: must be a number, at least 1"),
        (["links=maybe"], "links=maybe: must be true or false"),
        (
            ["members=elastic", "members.foo=1"],
            "unknown key members.foo; members has min_ranks, suspect_s, absence_gain",
        ),
        (
            ["parallel=sharded", "rebalance=by_speed"],
            "rebalance=by_speed and parallel=sharded exclude each other: samples are dealt out to ranks",
        ),
        (["parallel=sharded", "workload=paced"], "workload=paced and parallel=sharded exclude each other"),
        (["resume=true", "run_dir=/nowhere"], "resume=true: there is no checkpoint in run_dir=/nowhere"),
    ],
)
def test_wrong_key_or_value_is_refused_with_the_valid_ones(keys: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        load("train", keys)
    assert message in str(error.value)


def test_other_options_are_named_only_where_the_chosen_one_has_no_such_key() -> None:
    with pytest.raises(ConfigurationError) as error:
        load("train", ["members=elastic", "members.min_rank=2"])
    assert str(error.value) == "unknown key members.min_rank; members has min_ranks, suspect_s, absence_gain"


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("train", ["deadline=first_k", "deadline.k=5"], "quorum=5: there are only 4 ranks"),
        ("train", ["members=elastic", "members.min_ranks=5"], "min_ranks=5: there are only 4 ranks"),
        ("train", ["parallel=sharded", "parallel.shards=3"], "4 ranks cannot be dealt out to replicas of 3: start 6"),
        ("train", ["parallel=sharded", "late_handling.quorum=3"], "quorum=3: there are only 2 ranks"),
        ("train", ["late_handling.quorum=5"], "quorum=5: there are only 4 ranks"),
        ("train", ["rebalance=by_speed", "rebalance.min_share=9"], "total=32: .* 9 at least for each of 4 ranks"),
        (
            "train",
            ["rebalance=by_speed", "num_microbatches=2", "rebalance.multiple_of=3"],
            "total=8: must be a multiple of 3",
        ),
        ("compare", ["methods=[ddp,majority]", "methods.majority.deadline.k=5"], "quorum=5: there are only 4 ranks"),
    ],
)
def test_what_too_few_ranks_are_there_for_is_refused_once_their_number_is_known(
    name: str, keys: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    load(name, keys)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigurationError, match=message):
        load(name, keys)


# started with -c it checks, and starts torchrun or the launcher; here it says how
PYTHON = """#!/bin/sh
if [ "$1" != -c ]; then echo python "${WORLD_SIZE:-none}" "$@" && exit; fi
ranks=$4 count=$5 name=$6
shift 6
echo python "${ranks:-none}" -m straggle check "$name" "$@"
shift "$count"
by=$1
shift
case $by in torchrun) echo torchrun none "$@" ;; *) echo python none -m straggle "$by" "$@" ;; esac
"""


def launch_of(folder: Path, *words: str, **environment: str) -> str:
    """What launch.sh would start: its programs print their command lines."""
    for part in (".venv/bin", "conf/parallel"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for name in ("pyproject.toml", "constraints.txt", "launch.sh", "conf/train.yaml", "conf/parallel/sharded.yaml"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    python = folder / ".venv" / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    (folder / "launch.sh").chmod(0o755)
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "RDZV", "NNODES", "PET_"))}
    command = [str(folder / "launch.sh"), *words]
    done = subprocess.run(
        command, env={**plain, **environment}, capture_output=True, text=True, timeout=200, check=True
    )
    return done.stdout


PRELOAD = "--preload straggle.commands.train " if sys.platform == "linux" else ""


def test_launch_checks_the_configuration_for_its_number_of_workers(tmp_path: Path) -> None:
    for nodes, ranks in ({"WORKERS": "3"}, "3"), ({"WORKERS": "3", "NNODES": "2"}, "6"), ({"NNODES": "1:2"}, "none"):
        printed = launch_of(tmp_path, "steps=2", **{"MASTER_ADDR": "node0", "NODE_RANK": "0", **nodes})
        assert f"python {ranks} -m straggle check train steps=2" in printed
        assert "torchrun none" in printed  # it sets the variable itself


KUBEFLOW = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node0", "PET_MASTER_PORT": "29"}


def test_launch_takes_torchruns_variables_and_its_own_come_first(tmp_path: Path) -> None:
    printed = launch_of(tmp_path, "steps=2", PET_NPROC_PER_NODE="3", **KUBEFLOW)
    node = "--nnodes 2 --node-rank 1 --master-addr node0 --master-port 29"
    assert f"torchrun none {node} --nproc-per-node 3 -m straggle train" in printed
    assert "python 6 -m straggle check train" in printed
    printed = launch_of(tmp_path, "steps=2", NODE_RANK="0", WORKERS="2", PET_NPROC_PER_NODE="auto", **KUBEFLOW)
    assert "--node-rank 0 --master-addr node0 --master-port 29 --nproc-per-node 2 -m" in printed


def slurm_of_two(folder: Path) -> dict[str, str]:
    """What `srun` gives the task of the second node, and Slurm's other command that launch.sh asks."""
    (folder / "bin").mkdir()
    (folder / "bin" / "scontrol").write_text("#!/bin/sh\nprintf 'node0\\nnode1\\n'\n")
    (folder / "bin" / "scontrol").chmod(0o755)
    job = {"SLURM_JOB_ID": "9500", "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[0-1]"}
    return {**job, "SLURM_NODEID": "1", "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])}


def test_each_command_for_several_machines_starts_torchrun_as_one_that_trains_on_two(tmp_path: Path) -> None:
    """Those two are run in tests/cluster: torchrun by hand, and launch.sh with an endpoint."""
    static, endpoint, slurm = commands_of_several_nodes()
    assert endpoint == BY_ENDPOINT
    assert slurm == "srun --nodes=2 --ntasks-per-node=1 ./launch.sh"
    variables = dict(word.split("=") for word in static.split()[:-1])
    words, train = by_hand().replace("--node-rank 0", "--node-rank 1").split(" --nproc-per-node 8 ")
    for environment in ({**variables, "NODE_RANK": "1"}, slurm_of_two(tmp_path)):
        printed = launch_of(tmp_path, "steps=2", WORKERS="1", **environment)
        expected = f"torchrun none {words.removeprefix('torchrun ')} --nproc-per-node 1 {train} steps=2"
        assert expected in " ".join(printed.split())


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("WORKERS", ("abc", "0", "-1", "2.5"), "give the number of workers on this machine, 1 or more"),
        ("PET_NPROC_PER_NODE", ("two", "0"), "give the number of workers on this machine, 1 or more"),
        ("PET_NNODES", ("two", "0", "1:", "1:2:3"), "give the number of nodes, or a range such as 1:4"),
        ("NNODES", ("-2",), "give the number of nodes, or a range such as 1:4"),
        ("NODE_RANK", ("first", "-1"), "give this node's number, 0 to NNODES - 1"),
        ("MASTER_PORT", ("http", "0", "123456"), "give a port, 1 to 65535"),
        ("RDZV_ENDPOINT", ("node0", "http://node0:29500", "node0:"), "give HOST:PORT, such as node0:29500"),
    ],
)
def test_launch_refuses_a_variable_with_a_sentence(
    name: str, values: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    for value in values:
        with pytest.raises(subprocess.CalledProcessError) as refused:
            launch_of(tmp_path, "steps=2", **{name: value})
        assert refused.value.returncode == 2
        assert refused.value.stderr.endswith((f"{name}={value}: {message}\n", f"{name[4:]}={value}: {message}\n"))
    assert launch_of(tmp_path, "steps=2", **{name: ""})  # empty is as not given


def test_what_is_installed_with_the_extra_dev_is_not_installed_again(tmp_path: Path) -> None:
    launch_of(tmp_path, "steps=2")
    (stamp,) = (tmp_path / ".venv").glob(".installed-train-*")
    stamp.rename(stamp.with_name(stamp.name.replace("-train-", "-dev-")))
    assert "pip" not in launch_of(tmp_path, "steps=2")
    assert not stamp.exists()


@pytest.mark.parametrize(
    ("environment", "where"),
    [
        ({}, "--standalone"),
        (KUBEFLOW, "--nnodes 2 --node-rank 1 --rdzv-endpoint node0:29"),
        (
            {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29"},
            "--nnodes 2 --node-rank 1 --rdzv-endpoint node0:29",
        ),
        (
            {"NNODES": "2", "NODE_RANK": "1", "RDZV_ENDPOINT": "node0:29"},
            "--nnodes 2 --rdzv-endpoint node0:29 --node-rank 1",
        ),
    ],
)
def test_workers_that_may_come_back_are_started_by_straggle_launch(
    environment: dict[str, str], where: str, tmp_path: Path
) -> None:
    printed = launch_of(tmp_path, "members=elastic", "steps=2", WORKERS="3", **environment)
    expected = (
        f"-m straggle launch {where} --nproc-per-node 3 --run-dir runs/latest {PRELOAD}"
        "-m straggle train members=elastic steps=2"
    )
    assert expected in " ".join(printed.split())
    assert "torchrun" not in printed
    words = expected.removeprefix("-m straggle launch ").split()
    assert launch_arguments(words, {}).script == "straggle"


def test_workers_of_replicas_that_may_come_back_are_started_together(tmp_path: Path) -> None:
    for keys, size in (((), 2), (("parallel.shards=4",), 4)):
        printed = launch_of(tmp_path, "parallel=sharded", "members=elastic", *keys, WORKERS="4")
        assert f"--nproc-per-node 4 --replica-size {size} --run-dir" in " ".join(printed.split())


def test_process_ids_of_workers_that_may_come_back_are_in_the_folder_of_the_run(tmp_path: Path) -> None:
    printed = launch_of(tmp_path, "members=elastic", "run_dir=my runs/first", WORKERS="3")
    assert f"--nproc-per-node 3 --run-dir my runs/first {PRELOAD}-m straggle train" in " ".join(printed.split())


def test_null_switches_one_fault_off() -> None:
    assert list(build_faults(load("train", ["faults=slow_rank", "faults.stall=null"]))) == ["pace", "slow"]
    assert build_faults(load("train", ["faults=none"])) == {}


@pytest.mark.parametrize(("words", "said"), [([], ""), (["trian"], "no command trian\n")])
def test_without_a_command_that_exists_they_are_listed(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["straggle", *words])
    assert main() == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"{said}python -m straggle COMMAND")
    assert set(re.findall(r"^  (\w+) ", printed, re.MULTILINE)) == COMMANDS.keys()


@pytest.mark.parametrize("word", COMMANDS)
def test_every_command_has_help(word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["straggle", word, "--help"])
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main())
    assert not ended.value.code
    assert re.search(rf"\b{word}\b", capsys.readouterr().out)


def test_wrong_key_ends_the_command_with_one_message_and_no_traceback(tmp_path: Path) -> None:
    said = run_command("train", 1, "stepz=3", folder=tmp_path, status=2)
    assert said.startswith("unknown key stepz")
    assert "Traceback" not in said
    said = run_command("train", 1, "--steps=5", folder=tmp_path, status=2)
    assert said.startswith("unknown option --steps=5; keys are written without dashes")


def test_end_of_a_run_says_which_rank_was_dealt_less_and_which_was_cut() -> None:
    shares = mean_shares([(0, (8, 8, 8, 8)), (20, (9, 9, 10, 4))], 80)
    assert [own.share for own in shares] == [8.75, 8.75, 9.5, 5.0]
    late = {"late_steps_per_rank": [0, 9, 0, 4], "stood_in_steps_per_rank": [0, 2, 0, 4], "steps_per_rank": [80] * 4}
    first, second, third = deeds({**late, "dropped_share_per_rank": [0.0, 0.06, 0.0, 0.05]}, shares, Replicas())
    assert first.startswith("Dealt less: rank 3 is slow in most steps, so it had 5.0 of 32 that are dealt out")
    assert second.startswith("Cut: rank 1 was late in 9 of 80 steps; it stopped its own pass in 7 of these")
    assert second.endswith("Of all its gradients 94.0% came in.")
    assert "rank 3 was late in 4 of 80 steps; it was stuck" in third
    assert not list(
        deeds({**late, "late_steps_per_rank": [0] * 4, "dropped_share_per_rank": [0.0] * 4}, (), Replicas())
    )


# -- complete runs


@pytest.mark.slow
def test_training_writes_its_files_and_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    keys = (*TINY, "faults=none", "deadline=none", "estimator=moving_average", "metrics=none", "report=false")
    run_command("train", 2, *keys, "steps=8", "run_dir=whole", folder=tmp_path)
    run_command("train", 2, *keys, "steps=5", "run_dir=parts", folder=tmp_path)
    run_command("train", 2, *keys, "steps=8", "run_dir=parts", "resume=true", folder=tmp_path)
    whole, parts = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts"))
    assert whole["parameters_sha256"] == parts["parameters_sha256"]
    assert len(set(whole["parameters_sha256"])) == 1
    assert [record["step"] for record in read_trace(tmp_path / "parts" / "trace.jsonl")] == list(range(8))
    assert whole["dropped_share"] == 0.0
    assert whole["late_steps_per_rank"] == [0, 0]
    stable = "steps step_seconds_median step_seconds_mean ddp_seconds_median loss validation_loss"
    assert set(stable.split()) <= whole.keys()
    files = {path.name for path in (tmp_path / "whole" / "checkpoint" / "step8").iterdir()}
    assert {"common.pt", "rank0.pt", "rank1.pt", "state.json"} <= files
    assert (tmp_path / "whole" / "config.yaml").exists()


@pytest.mark.slow
def test_slow_rank_is_late_and_the_replicas_stay_identical(tmp_path: Path) -> None:
    keys = ("steps=14", "batch_size=4", "workload.depth=2", "faults=slow_rank", "faults.stall.step=8")
    out = run_command("train", 4, *keys, "run_dir=run", folder=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["parameters_sha256"]) == 4
    assert len(set(summary["parameters_sha256"])) == 1
    assert summary["late_steps_per_rank"][3] > 0
    assert summary["dropped_share_per_rank"][3] > 0
    assert "of its time under DDP" in out


SHARDED = (*TINY, "workload.depth=1", "parallel=sharded", "metrics=none", "deadline=fixed")


@pytest.mark.slow
def test_replica_of_two_workers_is_late_as_one_if_one_of_them_is_slow(tmp_path: Path) -> None:
    keys = (*SHARDED, "faults=slow_rank", "faults.stall.step=4", "deadline.budget_s=0.2", "steps=8")
    out = run_command("train", 4, *keys, "run_dir=run", folder=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["parameters_sha256"]) == 4
    assert len(set(summary["parameters_sha256"])) == 1
    assert len(summary["late_steps_per_rank"]) == 2
    assert summary["late_steps_per_rank"][1] > 0
    late = [record for record in read_trace(tmp_path / "run" / "trace.jsonl") if record["ranks"][1]["late"]]
    assert 3 in {record["slowest_ranks"][1] for record in late}
    assert "identical" in out


@pytest.mark.slow
def test_sharded_run_that_goes_on_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    keys = (*SHARDED, "faults=none", "deadline.budget_s=1000")
    run_command("train", 4, *keys, "steps=4", "run_dir=whole", folder=tmp_path)
    run_command("train", 4, *keys, "steps=3", "run_dir=run", "checkpoint_every=2", folder=tmp_path)
    assert saved_step(tmp_path / "run") == 3
    run_command("train", 4, *keys, "steps=4", "run_dir=run", "resume=auto", folder=tmp_path)
    whole, parts = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "run"))
    assert parts["steps"] == 4
    assert len(set(parts["parameters_sha256"])) == 1
    assert parts["validation_loss"] == pytest.approx(whole["validation_loss"], rel=1e-5)


@pytest.mark.slow
def test_compare_trains_a_sharded_model_as_fsdp_does_when_nobody_is_late(tmp_path: Path) -> None:
    methods = "methods=[ddp,backup_workers,dropcompute,majority,straggle]"  # majority's are both of two replicas
    keys = (*SHARDED, methods, "faults=none", "deadline.budget_s=1000", "steps=4", "block=2", "num_microbatches=2")
    run_command("compare", 4, *(key for key in keys if key != "metrics=none"), "run_dir=run", folder=tmp_path)
    results = json.loads((tmp_path / "run" / "compare.json").read_text())
    assert all(fields["replicas_identical"] for fields in results.values())
    for method in ("straggle", "majority"):
        assert results[method]["dropped_share"] == 0.0
        assert results[method]["validation_loss"] == pytest.approx(results["ddp"]["validation_loss"], rel=1e-4)


@pytest.mark.slow
def test_compare_trains_ddp_and_straggle_to_the_same_parameters_when_nobody_is_late(tmp_path: Path) -> None:
    faults = ("faults=pace", "faults.pace=null")  # the one that there is, switched off
    keys = (*TINY, *faults, "deadline=none", "rebalance=none", "steps=6", "block=2", "num_microbatches=2")
    run_command("compare", 2, *keys, "run_dir=run", folder=tmp_path)
    results = json.loads((tmp_path / "run" / "compare.json").read_text())
    stable = "step_seconds_median step_seconds_mean step_seconds_p95 validation_loss seconds_to_loss"
    for method in ("ddp", "straggle"):
        assert set(stable.split()) <= results[method].keys()
    assert results["ddp"]["validation_loss"] == results["straggle"]["validation_loss"]
    assert results["ddp"]["parameters_sha256"] == results["straggle"]["parameters_sha256"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment into which a wheel was installed that was made of the sdist alone; what it needs are ours."""
    folder = tmp_path_factory.mktemp("release")
    build = [sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(ROOT)]  # the wheel of the sdist
    subprocess.run(build, check=True, timeout=240, capture_output=True)
    (wheel,) = (folder / "dist").glob("straggle-*.whl")
    (sdist,) = (folder / "dist").glob("straggle-*.tar.gz")
    assert wheel.name.split("-")[1] == sdist.name.removesuffix(".tar.gz").split("-")[1] == straggle.__version__
    files = zipfile.ZipFile(wheel)
    assert not [name for name in files.namelist() if not re.match(r"straggle[-/]", name)]
    (entry,) = (name for name in files.namelist() if name.endswith("entry_points.txt"))
    unasked = b"straggle = straggle.integrations.lightning_unasked:callbacks"
    assert files.read(entry).count(unasked) == 2  # by both names of Lightning
    environment = folder / "environment"
    venv.create(environment, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, timeout=240)
    (site,) = (environment / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return environment


@pytest.mark.slow
def test_wheel_of_the_sdist_trains_launches_and_reports_without_a_checkout(installed: Path) -> None:
    command = [str(ROOT / ".ci" / "installed"), str(installed / "bin" / "python")]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert f"straggle {straggle.__version__} works without a checkout" in done.stdout


def test_workflow_that_publishes_tries_each_python_that_the_package_is_for_and_names_no_host() -> None:
    text = (ROOT / ".github" / "workflows" / "publish.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert jobs["try"]["strategy"]["matrix"]["python"] == pythons
    assert (jobs["try"]["needs"], jobs["publish"]["needs"]) == ("build", "try")
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "://" not in text
    words = [word for job in jobs.values() for step in job["steps"] for word in step.get("run", "").split()]
    assert all((ROOT / word).exists() for word in words if word.startswith(".ci/"))
    (guard,) = (step["run"] for step in jobs["build"]["steps"] if "GITHUB_REF_NAME" in step.get("run", ""))
    for tag, status in ((f"v{straggle.__version__}", 0), ("v0.0.1", 1)):
        environment = {**os.environ, "GITHUB_REF_NAME": tag}
        assert subprocess.run(["bash", "-c", guard], cwd=ROOT, env=environment).returncode == status


def test_launch_help_names_its_commands() -> None:
    done = subprocess.run([str(ROOT / "launch.sh"), "--help"], capture_output=True, text=True, timeout=200, check=True)
    assert "./launch.sh compare" in done.stdout
    assert "./launch.sh test" in done.stdout
