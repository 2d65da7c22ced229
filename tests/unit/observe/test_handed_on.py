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


def test_half_line_of_a_dead_writer_is_written_again_in_full(path):
    add(HandedOnLines(path, key="step", begins=True), range(3), writes=True)
    with path.open("a") as file:
        file.write('{"step": 3, "val')
    heir = HandedOnLines(path, key="step")
    add(heir, range(4), writes=False)
    add(heir, [4], writes=True)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(5))


OLD, HEIR, BACK = "the first writer", "its heir", "the first, started again"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        # the old writer dies after 0, 3 or 5 steps; its heir, which had seen them all, goes on
        ([(OLD, [], True), (HEIR, range(5), False), (HEIR, range(5, 8), True)], 8),
        ([(OLD, range(3), True), (HEIR, range(5), False), (HEIR, range(5, 8), True)], 8),
        ([(OLD, range(5), True), (HEIR, range(5), False), (HEIR, range(5, 8), True)], 8),
        # it is frozen, and when it wakes up, it writes one step more: that is not in the file
        ([(OLD, range(3), True), (HEIR, range(3), False), (HEIR, [3, 4], True),
          (OLD, [3], True), (HEIR, [5], True)], 6),
        # it is frozen, and the writer again: it goes on in the file of its heir
        ([(OLD, range(3), True), (HEIR, range(3), False), (HEIR, range(3, 6), True),
          (OLD, range(6, 9), True), (HEIR, range(6, 9), False), (HEIR, [9], True)], 10),
        ([(OLD, range(3), True), (HEIR, range(3), False), (HEIR, range(3, 6), True), (OLD, range(6, 9), True)], 9),
        # it was started again, takes part from step 6 on, and is away again for a step
        ([(OLD, range(3), True), (HEIR, range(3), False), (HEIR, range(3, 6), True),
          (BACK, range(6, 8), True), (HEIR, range(6, 8), False), (HEIR, [8], True)], 9),
        # it is back, and waits for the lines that only its heir has
        ([(OLD, range(3), True), (BACK, [5], True)], 3),
        ([(OLD, range(3), True), (BACK, [5], True), (HEIR, range(3), False), (HEIR, [3, 4], True),
          (BACK, [6], True)], 7),
    ],
)  # fmt: skip
def test_no_line_is_lost_and_none_is_there_twice_whoever_writes(path, script, expected):
    writers = {}
    for name, steps, writes in script:
        if name not in writers:
            writers[name] = HandedOnLines(path, key="step", begins=name == OLD, patience_s=1e9)
        add(writers[name], steps, writes=writes)
    assert numbers(path) == list(range(expected))


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
