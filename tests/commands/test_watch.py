"""`straggle watch`: a DDP script as it is, whose times can be asked about afterwards."""

import io
import json
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from repository import ROOT
from torch.nn.parallel import DistributedDataParallel

from straggle.commands import watch
from straggle.commands.advise import advise


def watched(rank, folder):
    """Runs the example in the ranks' own group; how many steps this rank recorded."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"})
    made = DistributedDataParallel.__init__
    script = str(ROOT / "examples" / "images" / "ddp.py")
    tiny = ["--epochs", "1", "--num-images", "512", "--batch-size", "8", "--out", f"{folder}/out.pt"]
    words = ["straggle", f"run_dir={folder}/run", script, *tiny]
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        assert watch.main() == 0
    assert DistributedDataParallel.__init__ is made
    return len(Path(folder, "run", "watch", f"rank{rank}.jsonl").read_text().splitlines())


@pytest.mark.slow
def test_a_script_that_knows_nothing_of_it_is_recorded(tmp_path, capsys):
    assert run_ranks(watched, 2, str(tmp_path), timeout_s=120) == [33, 33]  # a line for each step, and the first
    assert advise([str(tmp_path / "run")]) == 0
    assert "steps of 2 ranks" in capsys.readouterr().out


SHARDED = """\
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

dist.init_process_group("gloo")
net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
if sys.argv[1] in ("sharded", "old torch"):
    fully_shard(net, mesh=init_device_mesh("cpu", (2,))).set_force_sum_reduction_for_comms(True)
if sys.argv[1] == "lazy":
    net = nn.Sequential(nn.Linear(4, 8), nn.LazyLinear(2))
if sys.argv[1] == "never called":
    net[0].spare = nn.LazyLinear(2)
if sys.argv[1] == "DDP":
    net[0].spare = nn.LazyLinear(2)  # trained by nobody, and of no size yet
    net._ddp_params_and_buffers_to_ignore = ["0.spare.weight", "0.spare.bias"]
    net = nn.parallel.DistributedDataParallel(net)
if sys.argv[1] == "old torch":
    del FSDPModule.reset_iter_state
if sys.argv[1] == "staged":
    import straggle
    net = straggle.StagedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(5):
    if sys.argv[1] == "staged":
        with net.step():
            net(torch.randn(3, 4)).square().mean().backward()
    else:
        net(torch.randn(3, 4)).square().mean().backward()
        for parameter in net.parameters() if sys.argv[1] == "loop" else ():
            dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
"""


def watched_without_ddp(rank, folder, kind):
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2"})
    script = Path(folder, f"script{rank}.py")
    script.write_text(SHARDED)
    words, said = ["straggle", f"run_dir={folder}/run", str(script), kind], io.StringIO()
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(sys, "stderr", said),
    ):
        assert watch.main() == 0
    return [
        json.loads(line) for path in Path(folder).glob(f"run/watch/rank{rank}.jsonl") for line in open(path)
    ], said.getvalue()


@pytest.mark.parametrize(("kind", "job"), [("loop", "loop"), ("sharded", "FSDP2")])
def test_without_ddp_the_first_model_that_is_called_is_recorded_from_its_first_step_on(kind, job, tmp_path):
    for (head, *lines), _ in run_ranks(watched_without_ddp, 2, str(tmp_path), kind):
        assert head["job"] == job
        assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
        assert all(line["forward_s"] > 0 and line["backward_s"] > 0 for line in lines)


def test_a_model_whose_first_call_gives_its_parameters_their_sizes_is_recorded_from_the_second_on(tmp_path):
    for (head, *lines), said in run_ranks(watched_without_ddp, 2, str(tmp_path), "lazy"):
        assert [stage["numel"] for stage in head["stages"]] == [18, 40]
        assert [line["step"] for line in lines] == [0, 1, 2, 3]
        assert "uninitialized" not in said


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("staged", "watch(StagedDataParallel): it has reports of its own"),
        ("never called", "Attempted to use an uninitialized parameter"),
        ("DDP", "Attempted to use an uninitialized parameter"),
        ("old torch", f"torch {torch.__version__} has no FSDPModule.reset_iter_state"),
    ],
)
def test_a_model_that_cannot_be_watched_trains_on_and_it_is_told_why(kind, why, tmp_path):
    for lines, said in run_ranks(watched_without_ddp, 2, str(tmp_path), kind):
        assert lines == []
        assert said.startswith(f"straggle watch: {why}")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--help"], 0, "run_dir=DIR"),
        ([], 2, "SCRIPT"),
        (["none.py"], 2, "none.py is no file"),
        (["run_dir=x"], 2, "which script?"),
    ],
)
def test_words_that_are_wrong_are_refused(words, status, said, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["straggle", *words])
    assert watch.main() == status
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


def test_the_script_has_its_own_words_and_errors(tmp_path, monkeypatch):
    script = tmp_path / "fails.py"
    script.write_text("import sys\nassert sys.argv[1:] == ['--help', 'run_dir=mine']\nraise SystemExit(7)\n")
    monkeypatch.setattr(sys, "argv", ["straggle", str(script), "--help", "run_dir=mine"])
    with pytest.raises(SystemExit) as end:
        watch.main()
    assert end.value.code == 7
    assert sys.argv[0] == "straggle"
