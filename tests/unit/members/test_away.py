"""When it is said that a rank is at work between two steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from repository import ROOT

from straggle.members.away import INSTEAD, Away
from straggle.stuck.frames import Frame


def away_of(max_lag: int = 8, *, lag: int = 0, entered_at: float | None = None) -> tuple[Away, SimpleNamespace]:
    """That of rank 0, whose training thread is this one."""
    rank = SimpleNamespace(
        deadline=SimpleNamespace(late_handling=SimpleNamespace(max_lag=max_lag)),
        training=SimpleNamespace(entered_at=entered_at, step=12),
        channel=SimpleNamespace(name=0, names=range(3)),
        lag=lag,
    )
    return Away(rank), rank  # type: ignore[arg-type]


def be_in(monkeypatch: pytest.MonkeyPatch, line: int, *inner: str) -> None:
    """The training thread is in this line of a user's, and in these files of torch and straggle that it calls."""
    roots = {"torch": Path(torch.__file__).parents[1], "straggle": ROOT}
    frames = [Frame(str(roots[file.partition("/")[0]] / file), 1, "call") for file in inner]
    frames.append(Frame("/home/u/train.py", line, "main"))
    monkeypatch.setattr("straggle.members.away.frames_of_thread", lambda _: tuple(frames))


@pytest.mark.parametrize(("max_lag", "lag"), [(8, 4), (9, 4), (2, 1), (1, 0)])
def test_rank_is_told_after_half_of_max_lag_once_a_line(
    max_lag: int, lag: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    away, rank = away_of(max_lag)
    be_in(monkeypatch, 3)
    for rank.lag in range(max_lag):
        away.stands_in()
    told = [record.message for record in caplog.records]
    assert len(told) == 1
    assert f"while {lag} steps were merged without it, in main (/home/u/train.py:3): after" in told[0]
    assert told[0].endswith(INSTEAD)
    for step, line, number in ((12, 7, 1), (13, 3, 1), (13, 7, 2)):  # another line's work later is another matter
        rank.training.step = step
        be_in(monkeypatch, line)
        away.stands_in()
        assert len(caplog.records) == number


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["torch/distributed/distributed_c10d.py"], "a collective of the loop's own needs all processes"),
        (["torch/nn/modules/linear.py", "straggle/parallel.py"], "`with model.pause():` around an evaluation"),
        (["straggle/merge/wire/groups.py", "straggle/parallel.py"], ""),  # it waits for its replica
    ],
)
def test_what_a_rank_is_told_depends_on_where_it_is(
    files: list[str], words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    be_in(monkeypatch, 3, *files)
    away, _ = away_of(lag=7)
    away.stands_in()
    assert [words in record.message for record in caplog.records] == ([True] if words else [])


def test_rank_in_its_step_is_told_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    be_in(monkeypatch, 3)
    away, _ = away_of(lag=7, entered_at=1.0)
    away.stands_in()
    assert not caplog.records


def steps(*missed: tuple[int, bool]) -> list[tuple[int, frozenset[int], frozenset[int]]]:
    """Of these steps: who was stood in for, and whether between two steps."""
    return [(step, frozenset({2}), frozenset({2} if between else {})) for step, between in missed]


BETWEEN = [(step, True) for step in range(5, 9)]
IN_A_STEP = [(5, False), *((step, True) for step in range(6, 20))]  # its later steps it has not entered either
BACK = [(5, True), (6, True), (8, True), (9, True), (10, True)]


@pytest.mark.parametrize(
    ("missed", "number"), [(BETWEEN, 1), (BETWEEN[:3], 0), (IN_A_STEP, 0), (BACK, 0), ([*BETWEEN, (9, True)], 1)]
)
def test_a_peer_names_it_once_after_half_of_max_lag_in_a_row(
    missed: list[tuple[int, bool]], number: int, caplog: pytest.LogCaptureFixture
) -> None:
    for speaks in (True, False):
        caplog.clear()
        away, _ = away_of()
        for step, stood_in, between in steps(*missed):
            away.merged(step, stood_in, between, speaks=speaks)
        said = [record.message for record in caplog.records]
        assert len(said) == number * speaks
        assert all(words.startswith("rank 2 has been at work between two steps while 4 steps were") for words in said)
