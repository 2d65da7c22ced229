"""torchtitan's own trainer under straggle (`examples/torchtitan`), in an environment of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from repository import ROOT

EXAMPLE = ROOT / "examples" / "torchtitan" / "train.py"
NEEDED = ["torchtitan==0.3.0", "triton"]
LIMIT_S = 300.0  # for a job; its processes take half a minute to load torchtitan on a busy machine
STEP = re.compile(r"step: +(\d+) .*?loss: +(\S+) .*?grad_norm: +(\S+) ")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="torchtitan needs Python 3.11"),
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of an environment with torchtitan and what it needs beside the packages that are here, torch among them."""
    folder = tmp_path_factory.mktemp("torchtitan")
    venv.create(folder, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    quick = ["--retries", "1", "--timeout", "10", "--quiet"]
    wheel = [*pip, "download", *quick, "--no-deps", "--dest", str(folder), NEEDED[0]]
    if (found := subprocess.run(wheel, capture_output=True, text=True, timeout=240)).returncode:
        pytest.skip(f"torchtitan cannot be had here: {found.stderr.strip().splitlines()[-1]}")
    subprocess.run([*pip, "install", "--quiet", "--no-compile", *NEEDED], check=True, timeout=580)
    return folder / "bin" / "python"


@contextmanager
def job(python: Path, folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """``python -m words`` in this folder, and the file of what it says."""
    said = folder / f"said{len([*folder.iterdir()])}"
    path = os.pathsep.join([str(ROOT), str(EXAMPLE.parent)])  # the second for --preload cpu
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with said.open("wb") as out:
        command = [str(python), "-W", "ignore", "-m", *words]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)
    try:
        yield process, said
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # the launcher ends its workers
        process.wait(timeout=60)


def steps_in(said: Path) -> dict[int, list[tuple[str, str]]]:
    """By step what each rank says of it: the loss, and the size of the merged gradient."""
    found = defaultdict(list)
    for step, loss, norm in STEP.findall(re.sub(r"\x1b\[[\d;]*m", "", said.read_text(errors="replace"))):
        found[int(step)].append((loss, norm))
    return found


def wait(process: subprocess.Popen[bytes], said: Path, until: Callable[[], bool]) -> None:
    ends = time.monotonic() + LIMIT_S
    while not until():
        assert process.poll() is None, said.read_text(errors="replace")[-4000:]
        assert time.monotonic() < ends, said.read_text(errors="replace")[-4000:]
        time.sleep(0.2)


def launch(*words: str) -> list[str]:
    shared = ["--nproc-per-node", "4", "--replica-size", "2", "--preload", "cpu,torchtitan.trainer"]
    return ["straggle", "launch", *shared, str(EXAMPLE), *words]


def test_losses_are_those_of_torchtitans_own_replicas(python: Path, tmp_path: Path) -> None:
    found = []
    for words in (["--plain"], []):  # its own are launched in the same way: under torchrun each would load it anew
        with job(python, tmp_path, *launch(*words, "--steps", "6")) as (process, said):
            assert process.wait(timeout=LIMIT_S) == 0, said.read_text(errors="replace")[-4000:]
        steps = steps_in(said)
        assert [len(steps[step]) for step in range(1, 7)] == [4] * 6
        assert all(len(set(ranks)) == 1 for ranks in steps.values())
        found.append([[float(number) for number in steps[step][0]] for step in range(1, 7)])
    plain, ours = found
    for own, other in zip(ours, plain, strict=True):
        assert own == pytest.approx(other, rel=1e-4)
    assert ours[-1][0] < ours[0][0] - 1  # it has learned


def test_replica_is_killed_and_comes_back_while_the_other_one_is_slow_and_saves(python: Path, tmp_path: Path) -> None:
    words = launch("--steps", "100000", "--slow", "1", "--kill", "3", "--kill-at", "8", "--checkpoint", "6")
    with job(python, tmp_path, *words) as (process, said):
        wait(process, said, lambda: said.read_text(errors="replace").count(" takes part again from step ") == 2)
        first = int(re.findall(r"takes part again from step (\d+) on", said.read_text(errors="replace"))[0])
        wait(process, said, lambda: any(len(ranks) == 4 for step, ranks in steps_in(said).items() if step > first + 3))
    text, steps = said.read_text(errors="replace"), steps_in(said)
    assert "replica 1 left: rank 3 of it: its process ended by SIGKILL" in text
    assert all(len(steps[step]) == 4 for step in range(1, 8))
    assert all(len(steps[step]) == 2 for step in range(8, first + 1))  # no step is lost, and none is made again
    assert all(len(set(ranks)) == 1 for ranks in steps.values())  # the same numbers on all ranks
    assert "different" not in text
    assert (tmp_path / "runs" / "torchtitan" / "checkpoint" / "step-6" / ".metadata").exists()
