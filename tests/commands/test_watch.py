"""`straggle watch`: a DDP script as it is, whose times can be asked about afterwards."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_forked, started_command
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
    assert run_forked(watched, 2, str(tmp_path), timeout_s=120) == [33, 33]  # a line for each step, and the first
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
    for (head, *lines), _ in run_forked(watched_without_ddp, 2, str(tmp_path), kind):
        assert head["job"] == job
        assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
        assert all(line["forward_s"] > 0 and line["backward_s"] > 0 for line in lines)


def test_a_model_whose_first_call_gives_its_parameters_their_sizes_is_recorded_from_the_second_on(tmp_path):
    for (head, *lines), said in run_forked(watched_without_ddp, 2, str(tmp_path), "lazy"):
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
    for lines, said in run_forked(watched_without_ddp, 2, str(tmp_path), kind):
        assert lines == []
        assert said.startswith(f"straggle watch: {why}")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--help"], 0, "run_dir=DIR"),
        ([], 2, "SCRIPT"),
        (["none.py"], 2, "none.py is no file"),
        (["run_dir=x"], 2, "which script?"),
        (["-m"], 2, "which script?"),
        (["-m", "no_package.train"], 2, "-m no_package.train: there is no such module here"),
        (["-m", "..train"], 2, "-m ..train: there is no such module here"),
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


def test_a_module_is_run_as_python_runs_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(
        "import sys\nfrom package import train\nprint(__name__, __spec__.name, sys.argv[0] == __file__, sys.argv[1:])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["straggle", "-m", "package.train", "-m", "x"])
    assert watch.main() == 0
    assert "__main__ package.train True ['-m', 'x']" in capsys.readouterr().out


ONE_RANK = """\
import os, sys, torch
from torch import nn

os.chdir(sys.argv[1])
net = nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(int(sys.argv[2])):
    net(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
sys.exit(0)
"""


def test_the_files_stay_where_they_were_asked_for_if_the_script_changes_its_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "script.py").write_text(ONE_RANK)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    for steps, said in [("3", f"advise {tmp_path / 'runs' / 'watch'}"), ("0", "no model was trained in this process")]:
        monkeypatch.chdir(tmp_path)  # and what an earlier run has left there is none of this one
        monkeypatch.setattr(sys, "argv", ["straggle", "script.py", "elsewhere", steps])
        monkeypatch.delenv("RANK", raising=False)
        with pytest.raises(SystemExit) as end:
            watch.main()
        assert end.value.code == 0
        assert said in capsys.readouterr().err
        assert len((tmp_path / "runs/watch/watch/rank0.jsonl").read_text().splitlines()) == 4
    assert os.environ.get("PYTHONPATH", "").count("watched_children") == 0


OWN_RANKS = """\
import os, sys, torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel

def rank_main(rank, kind):
    init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
    net = nn.Linear(4, 2)
    if kind == "DDP":
        net = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    assert "sitecustomize" not in sys.modules or "watched_children" not in sys.modules["sitecustomize"].__file__
    mp.start_processes(rank_main, (sys.argv[2],), nprocs=2, start_method=sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("start", "kind"), [("spawn", "DDP"), ("fork", "loop")])
def test_ranks_that_the_script_starts_itself_are_recorded(start, kind, tmp_path):
    (tmp_path / "script.py").write_text(OWN_RANKS)
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nopen(os.environ['SEEN'], 'a').write('x')\n"
    )  # the user's own
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    environment |= {"PYTHONPATH": path, "SEEN": str(tmp_path / "seen"), "GLOO_SOCKET_IFNAME": "lo"}
    if start == "spawn":
        command = [sys.executable, "-m", "straggle", "watch", "script.py", start, kind]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        status, said = done.returncode, done.stderr
    else:
        with started_command("watch", "script.py", start, kind, folder=tmp_path, environment=environment) as command:
            status, said = command.status(), command.log.read_text()
    assert status == 0, said
    assert "python -m straggle advise runs/watch" in said
    files = [tmp_path / f"runs/watch/watch/rank{rank}.jsonl" for rank in range(2)]
    heads = [json.loads(file.read_text().splitlines()[0]) for file in files]
    assert [(head["rank"], head["world_size"], head["job"]) for head in heads] == [(0, 2, kind), (1, 2, kind)]
    if start == "spawn":  # the sitecustomize that ours hides is imported all the same: this process and each child
        assert len((tmp_path / "seen").read_text()) >= 3
