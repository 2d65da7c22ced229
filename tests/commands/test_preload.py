"""`straggle launch --preload`: workers that are forked from a process that has modules loaded."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from launch_jobs import WAITS, launched, left, script, starts, wait_for, wait_for_end, wait_until
from ranks import started_command
from repository import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a launcher how a grandchild ended")

# a module that leaves a file for each process that loads it, and the server's process id
MODULE = """\
import os
server = os.getpid()
open(f"loaded.{server}", "w").close()
"""


def module(folder: Path, text: str = MODULE) -> str:
    (folder / "heavy.py").write_text(text)
    return "--preload=heavy"


def test_what_is_named_is_loaded_once_for_all_workers_and_their_restarts(tmp_path: Path) -> None:
    body = 'import heavy\nleave("server", str(heavy.server))\n'
    with launched(tmp_path, body + WAITS, module(tmp_path), "--nproc-per-node=2", "--restart-delay-s=0") as job:
        wait_for(job, tmp_path, "pid.0.0", "pid.1.0")
        os.kill(int(left(tmp_path, "pid", 1)), signal.SIGKILL)
        wait_for(job, tmp_path, "pid.1.1")
        (tmp_path / "end").touch()
        assert job.status() == 0, job.log.read_text()
    (loaded,) = tmp_path.glob("loaded.*")
    assert [left(tmp_path, "server", *start) for start in ((0, 0), (1, 0), (1, 1))] == [loaded.suffix[1:]] * 3


SEEN = """\
import atexit, random, threading
state = dict(globals())
leave("seen", json.dumps({
    "argv": sys.argv, "path": [*map(os.path.abspath, sys.path)], "file": __file__, "name": __name__,
    "spec": str(__spec__ and __spec__.name), "package": __package__, "folder": os.getcwd(),
    "leader": os.getsid(0) == os.getpid(), "stdin": sys.stdin.read(),
    "main": sys.modules["__main__"].__dict__ is globals(), "signals": [str(signal.getsignal(n)) for n in (2, 15)],
    "environment": {name: value for name, value in os.environ.items() if name[:6] != "MASTER" and name[-2:] != "ID"},
    "open": sorted(os.readlink(f"/proc/self/fd/{n}").split("[")[0] for n in os.listdir("/proc/self/fd") if int(n) > 2
                   and os.path.exists(f"/proc/self/fd/{n}")),
}))
atexit.register(leave, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), leave("thread"))).start()
"""


@pytest.mark.parametrize("program", [("elsewhere/worker.py",), ("elsewhere",), ("-m", "elsewhere.worker")])
@pytest.mark.parametrize("safe", ["", "1"], ids=["", "safe path"])
def test_worker_finds_what_a_new_process_finds(program: tuple[str, ...], safe: str, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    (tmp_path / "elsewhere").mkdir()
    path = script(tmp_path / "elsewhere", SEEN)
    if program == ("elsewhere",):
        path.rename(path.with_name("__main__.py"))
    for way in ((), ("--preload=json",)):
        words = [*way, "--nproc-per-node=2", *program, "a", "b c"]
        environment = {"OMP_NUM_THREADS": "3", "PYTHONSAFEPATH": safe}
        environment |= {"PYTHONPATH": str(tmp_path)} if safe else {}
        with started_command("launch", *words, folder=tmp_path, environment=environment) as job:
            assert job.status() == 0, job.log.read_text()
        seen.append(json.loads(left(tmp_path, "seen", 1)))
        for what in ("at exit", "thread"):
            (tmp_path / f"{what}.1.0").unlink()  # it is there
    new, forked = seen
    assert forked == new
    assert forked["environment"].items() >= {"RANK": "1", "OMP_NUM_THREADS": "3"}.items()


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("sys.exit(3)", 3, "ended with status 3"),
        ("raise ValueError('of the script')", 1, "ValueError: of the script"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 128 + signal.SIGSEGV, "ended by SIGSEGV"),
        ("os._exit(5)", 5, "ended with status 5"),
        ("sys.exit('no data')", 1, "no data"),
    ],
)
def test_status_is_that_of_the_program(body: str, status: int, said: str, tmp_path: Path) -> None:
    with launched(tmp_path, body, "--preload=json", "--max-restarts=0") as job:
        assert job.status() == status
    assert said in job.log.read_text()


def test_script_that_is_not_there_is_not_started_again(tmp_path: Path) -> None:
    with started_command("launch", "--preload=json", "none_such.py", folder=tmp_path) as job:
        assert job.status() == 2  # as with a new process
    said = job.log.read_text()
    assert "can't open file" in said
    assert "its configuration is wrong" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "heavy cannot be loaded: ModuleNotFoundError: No module named 'heavy'"),
        (
            "import none_such",
            "heavy cannot be loaded: ModuleNotFoundError: No module named 'none_such'",
        ),
        ("1 / 0", "heavy cannot be loaded: ZeroDivisionError: division by zero"),
        ("raise SystemExit", "the process that loads it has ended"),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=[9], name='mine', daemon=True).start()",
            "heavy starts threads (mine), which no fork has: leave it to the workers",
        ),
    ],
    ids=["no such module", "no module in it", "error", "ends", "thread"],
)
def test_module_that_cannot_be_loaded_is_refused_before_a_worker_starts(
    text: str | None, said: str, tmp_path: Path
) -> None:
    if text is not None:
        module(tmp_path, text)
    with launched(tmp_path, "", "--preload=heavy") as job:
        assert job.status() == 2
    assert f"--preload heavy: {said}" in job.log.read_text()
    assert starts(tmp_path, 0) == 0


def test_launcher_that_is_told_to_end_while_modules_are_loaded_ends(tmp_path: Path) -> None:
    text = MODULE + "import time\nwhile True: time.sleep(1)\n"
    with launched(tmp_path, "", module(tmp_path, text)) as job:
        wait_until(job, lambda: list(tmp_path.glob("loaded.*")))
        os.kill(job.pid, signal.SIGTERM)
        assert job.status() == 128 + signal.SIGTERM
    (loaded,) = tmp_path.glob("loaded.*")
    wait_for_end(int(loaded.suffix[1:]))
    assert starts(tmp_path, 0) == 0


def test_workers_of_a_server_that_dies_are_started_again_without_it(tmp_path: Path) -> None:
    with launched(tmp_path, WAITS, module(tmp_path), "--nproc-per-node=2", "--restart-delay-s=0") as job:
        wait_for(job, tmp_path, "pid.0.0", "pid.1.0")
        (loaded,) = tmp_path.glob("loaded.*")
        os.kill(int(loaded.suffix[1:]), signal.SIGKILL)
        for rank in range(2):
            wait_for_end(int(left(tmp_path, "pid", rank)))
        wait_for(job, tmp_path, "pid.0.1", "pid.1.1")
        (tmp_path / "end").touch()
        assert job.status() == 0
    said = job.log.read_text()
    assert "rank 1 ended by SIGKILL" in said
    assert "rank 1: the process that workers are forked from has ended, or cannot fork; a new process" in said


TRAINS = """\
import json, os, random, sys
began = [name for name in ("torch", "torch._dynamo", "numpy") if name in sys.modules]
import numpy, torch, torch.distributed as dist, straggle

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((4,), float(index))

def train():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = straggle.StagedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for context in ("fork", "spawn" if os.environ["RANK"] == "0" else "fork"):  # one that loads torch is enough
        for batch in torch.utils.data.DataLoader(Samples(), 4, num_workers=1, multiprocessing_context=context):
            with model.step():
                model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
    return [parameter.tolist() for parameter in model.parameters()]

if __name__ == "__main__":
    text = json.dumps([began, train(), numpy.random.rand(), random.random()])
    open("trained." + os.environ["RANK"], "w").write(text)
"""


@pytest.mark.slow
def test_forked_workers_train_with_loaders_of_their_own_and_draw_different_numbers(tmp_path: Path) -> None:
    path = tmp_path / "worker.py"
    path.write_text(TRAINS)
    words = ["--preload=torch,numpy", "--nproc-per-node=2", path]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with started_command("launch", *words, folder=tmp_path, environment=environment) as job:
        assert job.status(200.0) == 0, job.log.read_text()
    first, second = (json.loads((tmp_path / f"trained.{rank}").read_text()) for rank in range(2))
    assert first[0] == second[0] == ["torch", "torch._dynamo", "numpy"]
    assert first[1] == second[1]
    assert first[2] != second[2]
    assert first[3] != second[3]
