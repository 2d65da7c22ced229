"""What the files of a run whose members came and went say together, and which of them are refused."""

import json
import sys

import pytest

from straggle.merge.replay import Decision, RecordedStep
from straggle.observe.members_recording import read_members_recording

FULL, ABSENT = (12, None, False, 1, False, True), (0, 3, True, 0, False, True)
PUT_OUT = Decision(1, sys.maxsize, 3, False, None, True, had_work=False)


def left(step, *generations, decision=FULL, lost=None):
    among = {"generations": generations, "lost": lost or {}} if generations else None
    return {"step": step, **submitted(step, decision), "among": among}


def of_pool(line, *numbers):
    return {**line, "drawn": numbers}


def submitted(step, decision):
    names = ("num_gradients", "left_at", "stood_in", "num_over", "idle", "entered")
    return dict(zip(names, decision, strict=True)) | {"submitted": step, "among": None}


def line(entry):
    entry = {key: value for key, value in entry.items() if not (key == "submitted" and "step" in entry)}
    return json.dumps(entry) + "\n"


def write(folder, *files):
    for rank, entries in enumerate(files):
        text = "".join(line({"ranks": len(files)}) if entry is None else line(entry) for entry in (None, *entries))
        (folder / f"rank{rank}.jsonl").write_text(text)


HEALED = {"healed": 2, "started": False, "random": "00"}
NEXT = {"generation": 1, "members": [0, 1]}
# rank 2 leaves in step 1, of which one bucket was merged before
OTHERS = [left(0, 0, 0, 0), NEXT, left(1, 0, 1, 1, lost={0: [1]}), left(2, 1, 1, 1)]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        # killed: it gave all of what was merged with it
        ([left(0, 0, 0, 0)], Decision(1, sys.maxsize, None, False, None, False, had_work=False)),
        # the same, of a pool
        (
            [left(0, 0, 0, 0), {"drew": 1, "numbers": [4, 7]}],
            Decision(1, sys.maxsize, None, False, None, False, drawn=(4, 7), had_work=False),
        ),
        # stopped, and put out: it left its pass when it was back
        ([left(0, 0, 0, 0), left(1, decision=ABSENT)], PUT_OUT),
        # killed before it had entered the step, for which its stand-in had submitted
        (
            [left(0, 0, 0, 0), submitted(1, (0, None, True, 0, True, False))],
            Decision(1, 0, None, True, 0, True, False),
        ),
        # its stand-in had submitted two gradients; it came back, left its pass, and then learned that it was out
        (
            [left(0, 0, 0, 0), submitted(1, (2, None, True, 0, False, True)), left(1, decision=ABSENT)],
            Decision(1, 2, 3, True, 0, False),
        ),
        # put out in the middle of its pass, which it left at its next gradient: that counted for nothing
        (
            [left(0, 0, 0, 0), left(1, decision=(7, 9, True, 0, False, True))],
            Decision(1, 7, 9, False, 0, True, had_work=False),
        ),
        # the same before its last gradient, after which it is asked no more: nothing of it is missing either
        (
            [left(0, 0, 0, 0), left(1, decision=(11, None, True, 0, False, True))],
            Decision(1, 11, None, False, 0, False, had_work=False),
        ),
        # stopped: it ended the step with what was still on its way to it, while its peers made it without it
        ([left(0, 0, 0, 0), left(1, 0, 0, 0)], Decision(1, 12, None, False, 1, False, had_work=False)),
        # killed when it was late itself
        ([left(0, 0, 0, 0), submitted(1, (5, 4, False, 0, False, True))], Decision(1, 5, 4, False, 0, False)),
    ],
)
def test_part_of_a_rank_that_could_not_say_how_it_left_a_step_is_known(tmp_path, own, expected):
    write(tmp_path, OTHERS, OTHERS, own)
    recording = read_members_recording(tmp_path, 2, 3)
    assert recording.decisions[1] == expected
    assert recording.decisions[2] == Decision(2, 0, 0, True, 0, True)  # it was absent
    assert recording.members.steps == (
        RecordedStep(((0, 1, 2), (0, 1, 2)), (0, 1, 2)),
        RecordedStep(((0, 1, 2), (0, 1)), (0, 1), {0: (1,)}, apart=True),
        RecordedStep(((0, 1), (0, 1)), (0, 1)),
    )


def test_line_that_a_process_was_killed_in_is_left_out(tmp_path):
    write(tmp_path, OTHERS, OTHERS, [left(0, 0, 0, 0)])
    with (tmp_path / "rank2.jsonl").open("a") as file:
        file.write('{"submitted": 1, "num_gra')
    assert read_members_recording(tmp_path, 2, 3).decisions[1].num_gradients == sys.maxsize


@pytest.mark.parametrize(("giver", "givers"), [({"giver": 0}, {2: {2: 0}}), ({}, {})], ids=["said", "not-said"])
def test_all_ranks_know_whose_state_one_took(tmp_path, giver, givers):
    write(tmp_path, OTHERS, OTHERS, [left(0, 0, 0, 0), HEALED | giver])
    assert [read_members_recording(tmp_path, rank, 3).members.givers for rank in range(3)] == [givers] * 3


@pytest.mark.parametrize(
    ("others", "own", "words"),
    [
        (OTHERS[:-2] + OTHERS[-1:], [left(0, 0, 0, 0)], "no rank has recorded step 1, though there are later ones"),
        (OTHERS, [left(0, 0, 1, 1)], "have not recorded the same of step 0: their files are of two runs"),
        ([left(0, 4, 4, 4)], [], "who was a member in generation 4, in which gradients of step 0 were merged"),
        (OTHERS, [{"generation": 1, "members": [2]}], "the members of generation 1 are "),
        (OTHERS, [{"resumed": 40}], "went on from a checkpoint of step 40"),
        (OTHERS, [{"ranks": 5}], "recorded on 5 ranks, and this run has 3: start as many"),
        (OTHERS, [{"step": 0}], "not a recording of a run with members"),
        (OTHERS, [HEALED | {"giver": 3}], "step 2 has the state of 3, which is no rank of 3"),
        ([of_pool(left(0, 0, 0, 0), 1)], [], "what rank 2 had drawn in step 0 is not recorded"),
        (
            [of_pool(left(0, 0, 0, 0), 1)],
            [submitted(0, (2, 5, True, 0, False, True))],
            "what rank 2 had drawn in step 0",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_the_step_and_why(tmp_path, others, own, words):
    write(tmp_path, others, others, own)
    with pytest.raises(ValueError, match=words):
        read_members_recording(tmp_path, 0, 3)


def test_recording_that_lacks_a_rank_is_refused(tmp_path):
    write(tmp_path, OTHERS, OTHERS, OTHERS)
    (tmp_path / "rank2.jsonl").unlink()
    with pytest.raises(ValueError, match=r"no recording at .*rank2\.jsonl: start as many ranks"):
        read_members_recording(tmp_path, 0, 3)
