"""A file whose writer changes: no line is lost and none is there twice, whenever the writer dies or is frozen."""

import json
from functools import partial

import pytest

from straggle.observe.handed_on import HandedOnLines
from straggle.observe.trace import read_trace


def content(step):
    return {"value": 10 * step}


def add(lines, steps, *, writes):
    for step in steps:
        lines.add(step, partial(content, step), writes=writes)


def numbers(path):
    return [record["step"] for record in read_trace(path)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "trace.jsonl"


def test_lines_have_their_number_and_what_was_given(path):
    add(HandedOnLines(path, key="step", begins=True), range(2), writes=True)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0, "value": 0},
        {"step": 1, "value": 10},
    ]


@pytest.mark.parametrize("written", [0, 3, 5])
def test_who_takes_over_writes_what_the_dead_writer_had_not_written_and_nothing_twice(path, written):
    dead, heir = HandedOnLines(path, key="step", begins=True), HandedOnLines(path, key="step")
    add(dead, range(written), writes=True)
    add(heir, range(5), writes=False)
    add(heir, range(5, 8), writes=True)
    assert numbers(path) == list(range(8))


def test_half_line_of_a_dead_writer_is_written_again_in_full(path):
    add(HandedOnLines(path, key="step", begins=True), range(3), writes=True)
    with path.open("a") as file:
        file.write('{"step": 3, "val')
    heir = HandedOnLines(path, key="step")
    add(heir, range(4), writes=False)
    add(heir, [4], writes=True)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(5))


def test_what_a_frozen_writer_still_writes_when_it_wakes_up_is_not_in_the_file(path):
    frozen, heir = HandedOnLines(path, key="step", begins=True), HandedOnLines(path, key="step")
    add(frozen, range(3), writes=True)
    add(heir, range(3), writes=False)
    add(heir, [3, 4], writes=True)
    add(frozen, [3], writes=True)  # it does not know yet
    add(heir, [5], writes=True)
    assert numbers(path) == list(range(6))


def test_frozen_writer_that_is_the_writer_again_goes_on_in_the_file_of_its_heir(path):
    frozen, heir = HandedOnLines(path, key="step", begins=True), HandedOnLines(path, key="step")
    add(frozen, range(3), writes=True)
    add(heir, range(3), writes=False)
    add(heir, range(3, 6), writes=True)
    add(frozen, range(6, 9), writes=True)
    add(heir, range(6, 9), writes=False)
    add(heir, [9], writes=True)
    assert numbers(path) == list(range(10))


def test_writer_that_comes_back_goes_on_after_its_heir(path):
    first, heir = HandedOnLines(path, key="step", begins=True), HandedOnLines(path, key="step")
    add(first, range(3), writes=True)
    add(heir, range(3), writes=False)
    add(heir, range(3, 6), writes=True)
    back = HandedOnLines(path, key="step")  # it was started again, and takes part from step 6 on
    add(back, range(6, 8), writes=True)
    add(heir, range(6, 8), writes=False)
    add(heir, [8], writes=True)  # and is away again, for a step
    assert numbers(path) == list(range(9))


def test_who_comes_back_waits_for_the_lines_that_only_its_heir_has(path):
    first, heir = HandedOnLines(path, key="step", begins=True), HandedOnLines(path, key="step")
    add(first, range(3), writes=True)
    back = HandedOnLines(path, key="step", patience_s=1e9)
    add(back, [5], writes=True)
    assert numbers(path) == [0, 1, 2]
    add(heir, range(3), writes=False)
    add(heir, [3, 4], writes=True)
    add(back, [6], writes=True)
    assert numbers(path) == list(range(7))


def test_who_waited_for_too_long_goes_on_without_the_lines_that_are_lost(path):
    add(HandedOnLines(path, key="step", begins=True), range(3), writes=True)
    add(HandedOnLines(path, key="step", patience_s=0.0), [5], writes=True)
    assert numbers(path) == [0, 1, 2, 5]


@pytest.mark.parametrize(("first", "kept"), [(0, []), (2, [0, 1])])
def test_job_that_begins_keeps_what_was_before_its_first_step(path, first, kept):
    add(HandedOnLines(path, key="step", begins=True), range(4), writes=True)
    add(HandedOnLines(path, key="step", first=first, begins=True), [first], writes=True)
    assert numbers(path) == [*kept, first]


def test_folder_that_cannot_be_written_does_not_end_training(tmp_path):
    (tmp_path / "file").touch()
    add(HandedOnLines(tmp_path / "file" / "trace.jsonl", key="step", begins=True), range(3), writes=True)
