"""`benchmarks/peers.py`: its numbers, the pace of a process's sockets, and its driver with DDP and straggle."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The driver's module, which imports those beside it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import peers

    return peers


def test_a_step_that_is_repeated_or_of_which_nothing_was_merged_counts_as_none(peers: Any) -> None:
    # when, step, gradients computed, of these lost, ranks that gave
    lines = [[0.0, 5, 4, 0, 4], [1.0, 6, 4, 0, 4], [1.5, 7, 4, 4, 0], [4.5, 6, 4, 0, 4], [5.0, 8, 3, 1.5, 3]]
    found = peers.numbers_of([*lines, [9.0, 9, 4, 0, 4]], 0.5, 5.5, 2.5)
    assert found == pytest.approx(
        {
            "ms a step": 2500,  # 5 s from the last step before to the last in it, and two steps of use
            "longest step, s": 3.5,
            "thrown away": 2,
            "dropped": 100 * (4 + 4 + 1.5) / 15,
            "back, s": 2.5,
        }
    )


def test_a_step_that_still_lasts_at_the_end_counts_for_as_long_as_it_has_taken(peers: Any) -> None:
    found = peers.numbers_of([[0.0, 1, 4, 0, 4], [1.0, 2, 4, 0, 4]], 0.5, 9.0, None)
    assert found == {"ms a step": 9000, "longest step, s": 8.0, "thrown away": 0, "dropped": 0.0}


def test_the_table_has_the_median_and_range_of_turns_and_says_what_failed(peers: Any) -> None:
    turns = [{"ms a step": ms, "longest step, s": 1.0, "thrown away": 0, "dropped": 0.0} for ms in (240, 260, 250)]
    found = {"DDP": [{"slow": own} for own in turns], "straggle": [{"slow": turns[0]}, {"slow": "it ended"}]}
    head, _, ddp, straggle = peers.table(found, ["slow"], ["DDP", "straggle"])
    assert head.startswith("| one rank | system | ms a step |")
    assert ddp == "| slow | DDP | 250 (240 to 260) | 1.00 | 0 | 0.0 % |  |"
    assert straggle == "| slow | straggle | 240 | 1.00 | 0 | 0.0 % |  failed in 1 of 2 |"


def test_a_process_sends_no_faster_than_its_pace(peers: Any) -> None:
    from slow_uplink import pace

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket\nown = socket.create_connection(('127.0.0.1', {port}))"
        send = f"{connect}\nwhile True: own.sendall(bytes(9999))"
        with subprocess.Popen([sys.executable, "-c", send], stderr=subprocess.DEVNULL) as process:
            try:
                taken, _ = server.accept()
                with taken:
                    try:
                        assert pace(process.pid, 1e6) == 1
                    except OSError as why:  # a container may forbid it
                        pytest.skip(str(why))
                    begun, read = time.monotonic(), 0
                    while read < 8e6 and time.monotonic() < begun + 1.0:  # what was under way comes at once
                        read += len(taken.recv(1 << 16))
                    begun, read = time.monotonic(), 0
                    while read < 500_000:
                        read += len(taken.recv(1 << 16))
                    assert time.monotonic() - begun > 0.2  # a busy machine only makes it slower
            finally:
                process.kill()


@pytest.mark.slow
def test_the_driver_measures_ddp_and_straggle() -> None:
    words = ["--systems", "DDP", "straggle", "--faults", "nothing", "slow", "killed", "--turns", "1", "--quick"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "peers.py"), *words],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=BENCHMARKS.parent,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = dict(re.findall(r"^\| (\w+ \| \w+) \| (\d+) \|", done.stdout, re.MULTILINE))
    assert set(rows) == {
        f"{fault} | {system}" for fault in ("nothing", "slow", "killed") for system in ("DDP", "straggle")
    }
    assert int(rows["nothing | DDP"]) >= 200  # its layers sleep as long
    assert int(rows["slow | DDP"]) >= 330  # the step that was under way is not slow
    assert re.search(r"\| killed \| straggle \|.*\| [\d.]+ \|\n", done.stdout)  # and it came back
