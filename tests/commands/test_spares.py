"""`straggle launch --spares`: processes that run the script until it asks for its rank, and then take a dead one's."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_jobs import HEAD, alive, left, loaded_launch, store_of, wait_for, wait_for_end, wait_until
from ranks import Started, started_command

from straggle.commands.launching import fork_server
from straggle.commands.launching.launch_options import arguments
from straggle.merge.wire import launcher_words

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="spares are forked by a server that only Linux allows")

# what a process does before it knows its rank, and after
BEFORE = 'import os\nopen(f"before.{os.getpid()}", "w").close()\nprint("loads", flush=True)\n'
WAITS = 'leave("environment", json.dumps(dict(os.environ))); leave("pid", str(os.getpid())); wait_for("end")\n'


def job_script(folder: Path, *, before: str = BEFORE, after: str = WAITS) -> Path:
    path = folder / "worker.py"
    path.write_text(before + HEAD + after)
    return path


def spares_of(folder: Path, *ranks: tuple[int, int]) -> set[int]:
    """The processes that have run the script's beginning, and are none of these ranks' starts."""
    begun = {int(path.suffix[1:]) for path in folder.glob("before.*")}
    return begun - {int(left(folder, "pid", rank, count)) for rank, count in ranks}


def ready(job: Started, number: int) -> None:
    wait_until(job, lambda: job.log.read_text().count("a spare is ready") >= number)


def test_spare_that_has_run_the_script_takes_the_place_of_a_rank_that_dies(tmp_path: Path) -> None:
    words = ["--nproc-per-node=2", "--spares=1", "--restart-delay-s=60", job_script(tmp_path)]
    with loaded_launch(*words, folder=tmp_path) as job:
        wait_for(job, tmp_path, "pid.0.0", "pid.1.0")
        ready(job, 1)
        (spare,) = spares_of(tmp_path, (0, 0), (1, 0))
        os.kill(int(left(tmp_path, "pid", 1)), signal.SIGKILL)
        wait_for(job, tmp_path, "pid.1.1")  # at once: a new process would begin in a minute
        assert int(left(tmp_path, "pid", 1, 1)) == spare
        first, second = (json.loads(left(tmp_path, "environment", 1, count)) for count in (0, 1))
        assert float(second.pop("STRAGGLE_ENDED_AT")) <= time.monotonic()
        assert second == {**first, "TORCHELASTIC_RESTART_COUNT": "1", "STRAGGLE_SPARE": "1"}
        ready(job, 2)
        assert len(spares_of(tmp_path, (0, 0), (1, 0), (1, 1))) == 1
        (tmp_path / "end").touch()
        assert job.status() == 0, job.log.read_text()
    said = job.log.read_text()
    assert "rank 1: a spare takes its place\n" in said
    assert re.search(r"a spare is ready after [\d.]+ s, at worker.py:6\n", said)  # the line of HEAD that reads RANK
    assert said.count("loads") == 4  # no process runs the beginning twice


def test_spares_end_with_the_job_and_nobody_hears_of_it(tmp_path: Path) -> None:
    words = ["--nproc-per-node=1", "--spares=1", job_script(tmp_path)]
    with loaded_launch(*words, folder=tmp_path) as job:
        wait_for(job, tmp_path, "pid.0.0")
        ready(job, 1)
        (spare,) = spares_of(tmp_path, (0, 0))
        said = job.log.read_text()
        (tmp_path / "end").touch()
        assert job.status() == 0
    wait_for_end(spare)
    assert job.log.read_text() == said


@pytest.mark.parametrize("stubborn", [False, True], ids=["", "ignores SIGTERM and never asks"])
def test_spares_end_with_a_launcher_that_is_told_to(stubborn: bool, tmp_path: Path) -> None:
    never = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nif 'RANK' not in list(os.environ):\n"
    never += "    open('deaf', 'w').close()\n    time.sleep(600)\n"
    script = job_script(tmp_path, before=BEFORE + never * stubborn)
    with loaded_launch("--spares=1", script, folder=tmp_path) as job:
        wait_for(job, tmp_path, "pid.0.0")
        wait_for(job, tmp_path, "deaf") if stubborn else ready(job, 1)
        (spare,) = spares_of(tmp_path, (0, 0))
        os.kill(job.pid, signal.SIGINT)
        wait_until(job, lambda: "SIGINT" in job.log.read_text())
        with contextlib.suppress(ProcessLookupError):  # the launcher may have ended it by now
            os.kill(int(left(tmp_path, "pid", 0)), signal.SIGKILL)
        assert job.status() == 128 + signal.SIGINT
    wait_for_end(spare)
    assert "Traceback" not in job.log.read_text()


def test_spare_that_dies_is_replaced(tmp_path: Path) -> None:
    words = ["--spares=1", "--restart-delay-s=0", job_script(tmp_path)]
    with loaded_launch(*words, folder=tmp_path) as job:
        wait_for(job, tmp_path, "pid.0.0")
        ready(job, 1)
        (spare,) = spares_of(tmp_path, (0, 0))
        os.kill(spare, signal.SIGKILL)
        ready(job, 2)
        assert "a spare ended by SIGKILL" in job.log.read_text()
        (second,) = {pid for pid in spares_of(tmp_path, (0, 0)) if alive(pid)}
        os.kill(int(left(tmp_path, "pid", 0)), signal.SIGKILL)
        wait_for(job, tmp_path, "pid.0.1")
        assert int(left(tmp_path, "pid", 0, 1)) == second
        (tmp_path / "end").touch()
        assert job.status() == 0, job.log.read_text()


ONLY_A_SPARE = "if 'RANK' not in list(os.environ):\n    "


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("raise SystemExit(0)", "does not ask for its rank: there will be none"),
        ("raise SystemExit(2)", "a spare ended with status 2, after"),
        ("os.closerange(3, 256); raise SystemExit(2)", "a spare ended with status 2, after"),  # is not killed
        ("raise ValueError('no data')", "all its 1 restarts are used"),
    ],
)
def test_script_that_keeps_no_spare_trains_without(does: str, said: str, tmp_path: Path) -> None:
    script = job_script(tmp_path, before=BEFORE + ONLY_A_SPARE + does + "\n")
    words = ["--spares=1", "--max-restarts=1", "--restart-delay-s=0", script]
    with loaded_launch(*words, folder=tmp_path) as job:
        wait_until(job, lambda: said in job.log.read_text())
        os.kill(int(left(tmp_path, "pid", 0)), signal.SIGKILL)
        wait_for(job, tmp_path, "pid.0.1")
        (tmp_path / "end").touch()
        assert job.status() == 0


def test_job_that_trains_with_all_ranks_or_none_has_no_spare(tmp_path: Path) -> None:
    with loaded_launch("--spares=1", job_script(tmp_path), folder=tmp_path) as job:
        wait_for(job, tmp_path, "pid.0.0")
        ready(job, 1)
        (spare,) = spares_of(tmp_path, (0, 0))
        launcher_words.post_needs_all(store_of(tmp_path))
        wait_for_end(spare)
        (tmp_path / "end").touch()
        assert job.status() == 0
    assert "write members=Elastic()" in job.log.read_text()


def test_what_a_spare_has_written_is_at_the_head_of_its_ranks_log(tmp_path: Path) -> None:
    words = ["--spares=1", "--log-dir=logs", job_script(tmp_path, after='print("knows", rank, count)\n' + WAITS)]
    with loaded_launch(*words, folder=tmp_path) as job:
        wait_for(job, tmp_path, "pid.0.0")
        ready(job, 1)
        os.kill(int(left(tmp_path, "pid", 0)), signal.SIGKILL)
        wait_for(job, tmp_path, "pid.0.1")
        (tmp_path / "end").touch()
        assert job.status() == 0
    assert (tmp_path / "logs/node0.launch0/rank0.start1.log").read_text() == "loads\nknows 0 1\n"


@pytest.mark.slow
def test_without_modules_that_are_loaded_workers_are_new_processes(tmp_path: Path) -> None:
    words = ["--nproc-per-node=1", "--spares=1", job_script(tmp_path)]
    with started_command("launch", *words, folder=tmp_path) as job:
        wait_for(job, tmp_path, "pid.0.0")
        ready(job, 1)
        (spare,) = spares_of(tmp_path, (0, 0))
        os.kill(int(left(tmp_path, "pid", 0)), signal.SIGKILL)
        wait_for(job, tmp_path, "pid.0.1")
        assert int(left(tmp_path, "pid", 0, 1)) == spare
        (tmp_path / "end").touch()
        assert job.status() == 0, job.log.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nproc-per-node=2", "--spares=3"], "--spares 3: more than the 2 workers"),
        (["--nproc-per-node=4", "--replica-size=2", "--spares=1"], "must be a multiple of --replica-size"),
        (["--spares=some"], "must be an integer of at least 0"),
    ],
)
def test_spares_that_cannot_be_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        arguments([*words, "train.py"], {})
    assert said in capsys.readouterr().err


# -- the environment of a spare


@pytest.fixture
def gives(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The launcher's end of a spare's socket; the environment of this process is a spare's until it is given a rank."""
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)  # which nothing could take back
    with own, theirs:
        fork_server.GivenLater.begin(theirs, ["RANK", "LOCAL_RANK"])
        yield own
        own.close()
        os.environ.__class__ = os._Environ  # type: ignore[assignment]
        os.environ.pop("RANK", None), os.environ.pop("LOCAL_RANK", None)


WAYS: list[Callable[[], Any]] = [
    lambda: os.environ["RANK"],
    lambda: os.environ.get("RANK", "0"),
    lambda: os.getenv("RANK"),
    lambda: os.environ.setdefault("RANK", "0"),
    lambda: "RANK" in os.environ and os.environ["RANK"],
    lambda: os.environ.copy()["RANK"],
    lambda: os.environ.pop("RANK"),
]


@pytest.mark.parametrize("way", WAYS)
def test_who_asks_for_the_rank_waits_until_it_is_given(way: Callable[[], Any], gives: socket.socket) -> None:
    found = list[Any]()
    asks = threading.Thread(target=lambda: found.append(way()))
    asks.start()
    gives.recv(4096)  # it says where it waits
    assert not found
    gives.send(json.dumps({"RANK": "3", "LOCAL_RANK": "1"}).encode())
    asks.join(10)
    assert found == ["3"]
    assert os.environ["LOCAL_RANK"] == "1"
    assert type(os.environ) is os._Environ


def test_what_all_ranks_have_alike_is_found_without_waiting(gives: socket.socket) -> None:
    assert os.environ["PATH"] == dict(os.environ.items())["PATH"]
    assert "RANK" not in list(os.environ)
    os.environ["OTHER"] = "1"
    assert os.environ.pop("OTHER") == "1"
    gives.setblocking(False)
    with pytest.raises(BlockingIOError):
        gives.recv(1)  # nobody has asked


def test_process_that_is_not_needed_ends_where_it_waits(gives: socket.socket) -> None:
    gives.close()
    with pytest.raises(SystemExit) as ended:
        os.environ.get("RANK")
    assert ended.value.code == 0


def test_several_threads_may_ask(gives: socket.socket) -> None:
    found = list[str]()
    asking = [threading.Thread(target=lambda: found.append(os.environ["RANK"])) for _ in range(3)]
    for thread in asking:
        thread.start()
    for _ in asking:
        gives.recv(4096)
    gives.send(json.dumps({"RANK": "3"}).encode())
    for thread in asking:
        thread.join(10)
    assert found == ["3"] * 3
