"""One reader of a run's files: the page and the advice read the same of them, and refuse the same in the same words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pages import a_rank, a_step, write_run
from recorded_jobs import JOBS, write_watched

from straggle.advise.timings import read_timings
from straggle.observe.numbers.run import read_run

HEAD = {"watch": 1, "rank": 0, "world_size": 1, "stages": [{"name": "all", "numel": 1}]}


def without(name: str) -> str:
    return json.dumps({key: value for key, value in HEAD.items() if key != name}) + "\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "there is no complete step in it yet"),
        (json.dumps(HEAD) + "\n", "there is no step yet that all ranks have made"),
        (without("watch") + "{}\n", "not written by straggle.watch, or by another version of it"),
        (without("stages") + "{}\n", "not written by straggle.watch: KeyError"),
    ],
)
def test_page_and_advice_refuse_what_is_not_watched_in_the_same_words(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch" / "rank0.jsonl").write_text(content)
    refusals = []
    for read in (read_run, read_timings):
        with pytest.raises(ValueError, match=said) as refused:
            read(tmp_path)
        refusals.append(str(refused.value).partition(": KeyError")[0])
    assert refusals[0] == refusals[1]


def test_trace_without_stages_is_read_as_of_one(tmp_path: Path) -> None:
    ranks = [replace(a_rank(number, pace=1.0 + number), stages=(), stage_s=()) for number in range(2)]
    timings = read_timings(write_run(tmp_path, [a_step(step, ranks, stages=()) for step in range(12)]))
    assert timings.stage_share.tolist() == [1.0]
    assert timings.unit_s[0].tolist() == [[0.5], [1.0]]


def test_page_and_advice_take_the_folder_that_was_watched_into(tmp_path: Path) -> None:
    folder = write_watched(JOBS[0], tmp_path)
    assert read_run(folder / "watch").num_steps == read_run(folder).num_steps
    assert read_timings(folder / "watch").num_steps == read_timings(folder).num_steps
