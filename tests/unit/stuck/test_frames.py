"""Where a thread is: the innermost frame of the user's code, and whether it waits for others there."""

import inspect
import sys
import sysconfig
import threading
from pathlib import Path

import pytest
import torch

import straggle
from straggle import Epochs, LateLoader
from straggle.loop.uneven import Joins
from straggle.stuck.frames import (
    Frame,
    Place,
    frames_of,
    frames_of_thread,
    place_in_block,
    place_of,
    short_path,
    text_of,
)

HERE = "tests/unit/stuck/test_frames.py"
TORCH, STRAGGLE = Path(torch.__file__).parent, Path(straggle.__file__).parent
STDLIB = sysconfig.get_path("stdlib")
USER, NUMPY = Frame("/home/me/train.py", 41, "load_batch"), Frame("/v/site-packages/numpy/npyio.py", 4, "load")
ACCELERATE = Frame("/v/site-packages/accelerate/utils/operations.py", 355, "_gpu_gather_one")
LOADER = Frame(f"{TORCH}/utils/data/dataloader.py", 1275, "_try_get_data")
SELECT = Frame(f"{STDLIB}/selectors.py", 415, "select")
BARRIER = Frame(f"{TORCH}/distributed/distributed_c10d.py", 5000, "barrier")
PRIVATE = Frame(f"{TORCH}/distributed/distributed_c10d.py", 80, "_wait")
LOGGER = Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper")
MERGE, LAB = Frame(f"{STRAGGLE}/merge/wire/channel.py", 3, "wait"), Frame(f"{STRAGGLE}/lab/faults.py", 5, "stall")
CALL, BRACKET = (Frame(f"{STRAGGLE}/backward/loop_hooks.py", 9, name) for name in ("_call", "bracketed"))
TIMES = Frame(f"{STRAGGLE}/loop/stopwatch.py", 3, "load")
TYPED = Frame("<stdin>", 1, "<module>")
FROZEN = Frame("<frozen runpy>", 88, "_run_code")


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([], None),
        ([USER, FROZEN], Place(USER, USER)),
        ([SELECT, LOADER, USER, FROZEN], Place(USER, LOADER)),
        ([SELECT, NUMPY, USER], Place(USER, SELECT)),
        ([SELECT, NUMPY, LOADER], Place(NUMPY, SELECT)),
        ([SELECT, MERGE, USER], Place(USER, SELECT, "inside")),
        ([USER, MERGE, USER._replace(line=9)], Place(USER, USER)),
        ([PRIVATE, BARRIER, LOGGER, USER], Place(USER, PRIVATE, "collective", "barrier")),
        ([BARRIER, MERGE, USER], Place(USER, BARRIER, "inside")),
        ([SELECT, LAB, MERGE], Place(LAB, SELECT)),
        ([SELECT, LOADER, TIMES, CALL, BRACKET, USER], Place(USER, LOADER)),  # a call that is timed for the user's code
        ([PRIVATE, TIMES, CALL, BRACKET, BARRIER, LOGGER, USER], Place(USER, PRIVATE, "collective", "barrier")),
        ([TIMES, CALL, BRACKET, USER], Place(USER, USER)),
        ([SELECT, LOADER, CALL, BRACKET, MERGE, USER], Place(USER, LOADER, "inside")),
        ([MERGE, LAB], Place(LAB, MERGE, "inside")),
        ([SELECT, FROZEN], Place(SELECT, SELECT)),
        ([SELECT, TYPED, LAB], Place(TYPED, SELECT)),
    ],
)
def test_place_is_the_innermost_frame_of_the_users_code(frames, expected):
    assert place_of(frames) == expected


@pytest.mark.parametrize("loader", [LateLoader, Epochs, Joins])
def test_loader_of_straggle_that_waits_for_a_workers_batch_is_where_the_users_loop_is(loader):
    frame = Frame(inspect.getfile(loader), 70, "batches")
    for between in ([], [TIMES, CALL, BRACKET]):
        assert place_of([SELECT, LOADER, *between, frame, USER]) == Place(USER, LOADER)


@pytest.mark.parametrize(
    ("frames", "own"),
    [
        ([], None),
        ([BARRIER, LOADER, USER], USER),
        ([BARRIER, USER, MERGE, USER._replace(line=9)], USER),
        ([BARRIER, NUMPY, MERGE, NUMPY._replace(line=9), USER], NUMPY),  # a trainer's loss, and not `trainer.train()`
        ([BARRIER, MERGE, USER, NUMPY, MERGE, USER._replace(line=9)], USER),
        ([BARRIER, LOADER, MERGE, USER], USER),
        ([BARRIER, ACCELERATE, NUMPY, ACCELERATE, MERGE, ACCELERATE, USER], NUMPY),
        ([BARRIER, ACCELERATE, LOADER, MERGE, USER], ACCELERATE),
    ],
)
def test_place_in_a_block_is_what_straggle_has_called_before_what_calls_it(frames, own):
    assert getattr(place_in_block(frames), "own", None) == own


def test_words_have_the_users_line_and_what_it_called():
    assert Place(USER, USER).words() == "in load_batch (/home/me/train.py:41)"
    assert Place(USER, LOADER).words("next(batches)") == (
        "in load_batch (/home/me/train.py:41: next(batches)), inside of _try_get_data "
        "(torch/utils/data/dataloader.py:1275)"
    )


def test_frames_of_another_thread_are_found_with_the_line_of_code():
    entered, leave = threading.Event(), threading.Event()

    def hangs():
        entered.set()
        leave.wait()  # here it hangs

    thread = threading.Thread(target=hangs)
    thread.start()
    entered.wait()
    place = place_of(frames_of_thread(thread.ident))
    leave.set()
    thread.join()
    assert (place.own.function, short_path(place.own.file)) == ("hangs", HERE)
    if place.inner != place.own:  # it has come to the wait
        assert text_of(place.own) == "leave.wait()  # here it hangs"
    assert frames_of_thread(thread.ident)[-1] == frames_of(sys._getframe())[-1]  # the main thread, as it has ended


def test_paths_are_short_and_long_lines_are_cut(tmp_path):
    assert short_path("/usr/lib/dist-packages/a/b.py") == "a/b.py"
    assert short_path(f"{Path.cwd()}/c/d.py") == "c/d.py"
    assert short_path(SELECT.file) == "selectors.py"
    code = tmp_path / "code.py"
    code.write_text(f"{'x' * 101}\n")
    assert text_of(Frame(str(code), 1, "f")) == "x" * 100 + "..."
    assert text_of(Frame(str(tmp_path / "gone.py"), 1, "f")) == ""


def test_place_has_words_also_if_the_folder_in_which_the_job_was_started_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert short_path(str(gone / "train.py")) == str(gone / "train.py")
    assert Place(USER, SELECT).words() == "in load_batch (/home/me/train.py:41), inside of select (selectors.py:415)"
